from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench import reshard as measure_reshard
from bench.__main__ import run
from bench.reshard import Floor, PublishTimes, ReshardReport
from bench.reshard_report import print_reshard, verdicts

REPORT = ReshardReport(
    plan_bytes=1_000_000_000,
    model_bytes=990_000_000,
    bytes_by_link={"network": 1_000_000_000},
    floor=Floor(loopback_bytes_s=4e9, copy_bytes_s=8e9, num_bytes=1_000_000_000),
    ours=PublishTimes(name="publish", seconds=(1.2, 1.0, 1.4), group_bytes=1_000_000_000),
    gather=PublishTimes(name="gather", seconds=(6.0, 5.0, 7.0), group_bytes=4_000_000_000),
    flattened=PublishTimes(name="flattened", seconds=(2.0, 3.0, 2.5), group_bytes=2_000_000_000),
    is_equal=True,
)


def test_the_table_has_best_and_median_and_what_they_are_of_the_gather(capsys: pytest.CaptureFixture[str]) -> None:
    print_reshard(REPORT)
    out = capsys.readouterr().out
    (ours,) = (line.split() for line in out.splitlines() if "by the plan" in line)
    assert ours[-5:] == ["1.00", "1.20", "0.83", "1.000", "0.20"]
    (floor,) = (line.split() for line in out.splitlines() if "floor" in line)
    assert floor[-4:] == ["0.38", "2.67", "1.000", "0.06"]
    assert "bytes over the group are the plan's; time is 0.20 of the gather scheme's" in out


@pytest.mark.parametrize(
    ("broken", "is_kept"),
    [
        (REPORT, [True, True, True]),
        (replace(REPORT, ours=replace(REPORT.ours, group_bytes=1_000_000_016)), [False, True, True]),
        (replace(REPORT, ours=replace(REPORT.ours, seconds=(3.1,))), [True, False, True]),
        (replace(REPORT, is_equal=False), [True, True, False]),
    ],
)
def test_each_promise_is_kept_or_broken_on_its_own(
    broken: ReshardReport, is_kept: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [kept for _, kept in verdicts(broken)] == is_kept
    monkeypatch.setattr(measure_reshard, "measure_reshard", lambda _folder, **_options: broken)
    assert run(["reshard"]) == (0 if all(is_kept) else 1)


@pytest.mark.slow
@pytest.mark.usefixtures("real_engines")
def test_a_small_publish_is_measured_for_real(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run(["reshard", "--gigabytes", "0.12", "--repeats", "1", "--json"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["is_equal"]
    assert found["ours"]["group_bytes"] == found["plan_bytes"]
