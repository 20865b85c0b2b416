"""What the page is told of a run, while it goes on and after."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.data.rollout_files import rollouts_file, write_rollouts
from megarl.errors import DataError
from megarl.observe.events import RunFinished, RunStatus
from megarl.observe.history import Series
from megarl.tools.page.run_data import MAX_ROWS, RolloutQuery, RunFolder, thinned
from tests.data.test_rollout_files import decode, sampled
from tests.observe.samples import step_finished
from tests.tools.page.runs import make_run, write_events


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", is_finished=False)


def test_curves_status_and_steps(folder: Path) -> None:
    run: dict[str, Any] = RunFolder(folder).overview()
    assert (run["name"], run["status"], run["step"], run["steps"]) == ("sample", "running", 4, 4)
    charts = {chart["title"]: chart["series"] for chart in run["charts"]}
    assert charts["Evaluation"][0] == {"name": "accuracy", "steps": [0, 4], "values": [0.25, 0.75]}
    assert charts["Reward"][0]["values"] == [0.5625, 0.625, 0.6875, 0.75]
    assert "Value loss" not in charts, "there is no critic"
    json.dumps(run, allow_nan=False)


def test_what_comes_later_is_seen_and_has_another_stamp(folder: Path) -> None:
    run = RunFolder(folder)
    before, stamp = run.overview(), run.stamp
    write_events(folder, [step_finished(5), RunFinished(status=RunStatus.FAILED, reason="no engine is left")])
    after = run.overview()
    assert (before["step"], after["step"]) == (4, 5)
    assert (after["status"], after["reason"]) == ("failed", "no engine is left")
    assert run.stamp != stamp


def test_a_number_that_is_not_finite_is_a_gap(folder: Path) -> None:
    write_events(folder, [step_finished(5, loss=float("nan"))])
    run: dict[str, Any] = RunFolder(folder).overview()
    loss = next(chart for chart in run["charts"] if chart["title"] == "Loss")
    assert loss["series"][0]["values"] == [0.5, 0.5, 0.5, 0.5, None]


def test_rollouts_are_sorted_filtered_and_paged(folder: Path) -> None:
    run = RunFolder(folder)
    everything: dict[str, Any] = run.rollouts(RolloutQuery())
    assert (everything["total"], everything["steps"], everything["sources"]) == (32, [1, 2, 3, 4], ["arithmetic"])
    worst: dict[str, Any] = run.rollouts(RolloutQuery(sort="largest_gap", is_descending=True, limit=3))
    assert [row["largest_gap"] for row in worst["rows"]] == [pytest.approx(0.7)] * 3
    second: dict[str, Any] = run.rollouts(RolloutQuery(step=2, sort="score", offset=6))
    assert (second["total"], len(second["rows"])) == (8, 2)
    found: dict[str, Any] = run.rollouts(RolloutQuery(text="4 3 WORDS"))
    assert [(row["step"], row["row"]) for row in found["rows"]] == [(4, 3)]


def test_a_page_is_never_longer_than_the_limit(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", num_steps=1, rollouts_per_step=MAX_ROWS + 50)
    answer: dict[str, Any] = RunFolder(folder).rollouts(RolloutQuery(limit=10**9))
    assert (answer["total"], len(answer["rows"])) == (MAX_ROWS + 50, MAX_ROWS)


def test_a_step_that_is_written_again_is_read_again(folder: Path) -> None:
    run = RunFolder(folder)
    run.rollouts(RolloutQuery())
    write_rollouts(rollouts_file(folder, 4), [sampled("anew")], decode=decode)
    answer: dict[str, Any] = run.rollouts(RolloutQuery(step=4))
    assert [row["line"] for row in answer["rows"]] == ["anew"]


def test_one_rollout_has_its_tokens(folder: Path) -> None:
    one: dict[str, Any] = RunFolder(folder).rollout(3, 1)
    assert "".join(one["pieces"]) == "3 1 words"
    assert one["step"] == 3
    with pytest.raises(DataError, match="no rollouts of step 9"):
        RunFolder(folder).rollout(9, 0)


def test_another_folder_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"not the folder of a run: it has no events\.jsonl"):
        RunFolder(tmp_path)


def test_long_series_keep_their_ends() -> None:
    short = thinned(Series.of((step, float(step)) for step in range(10_000)))
    assert len(short.steps) <= 1501
    assert (short.steps[0], short.steps[-1]) == (0, 9999)
