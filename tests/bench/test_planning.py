from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.planning import Goal, Measurement, Sample, measure, start_in_fresh_process, write_large_recipe
from megarl.cli.main import run
from megarl.errors import MachineError

GOAL = Goal(seconds=1.0, megabytes=500.0)


def test_the_median_of_the_times_and_the_largest_peak_count() -> None:
    samples = iter([(9.0, 100.0), (0.5, 300.0), (0.4, 200.0)])
    started: list[Sequence[str]] = []

    def start(arguments: Sequence[str]) -> Sample:
        started.append(arguments)
        seconds, megabytes = next(samples)
        return Sample(seconds=seconds, cpu_seconds=seconds / 2, megabytes=megabytes)

    found = measure("planning", ["plan", "a.yaml"], GOAL, repeats=3, start=start)
    assert started == [["plan", "a.yaml"]] * 3
    assert (found.seconds, found.cpu_seconds, found.megabytes) == (0.5, 0.25, 300.0)


@pytest.mark.parametrize(("seconds", "megabytes", "ratio"), [(0.5, 100.0, 0.5), (3.0, 100.0, 3.0), (0.1, 750.0, 1.5)])
def test_the_worst_of_time_and_memory_decides(seconds: float, megabytes: float, ratio: float) -> None:
    found = Measurement(command="plan", seconds=seconds, cpu_seconds=0.1, megabytes=megabytes, goal=GOAL)
    assert found.worst_ratio == pytest.approx(ratio)


@pytest.mark.slow
def test_a_fresh_process_is_measured() -> None:
    sample = start_in_fresh_process(["--version"])
    assert sample.seconds > 0
    assert sample.cpu_seconds > 0
    assert 5 < sample.megabytes < 500


@pytest.mark.patient
def test_a_command_that_fails_is_not_measured(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"^megarl validate \S*none.yaml failed: \S*none.yaml: 1 problem"):
        start_in_fresh_process(["validate", str(tmp_path / "none.yaml")])


def test_the_large_recipe_is_valid_and_as_large_as_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(write_large_recipe(tmp_path))
    assert run(["validate", recipe]) == 0
    assert run(["plan", recipe]) == 0
    captured = capsys.readouterr()
    assert "768 x h100 on 96 node(s)" in " ".join(captured.out.split())
    assert captured.err == ""
