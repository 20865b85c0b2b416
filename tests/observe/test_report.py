from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from megarl.errors import DataError
from megarl.observe.report import BLUE, GREEN, PANEL_HEIGHT_PX, VERMILLION, WIDTH_PX, make_report
from tests.observe.samples import evaluated, grades, run_started, step_finished, write_events


def colours(path: Path) -> set[str]:
    image = Image.open(path).convert("RGB")
    found = image.getcolors(maxcolors=1 << 24)
    assert found is not None
    return {"#" + bytes(colour).hex().upper() for _, colour in found if isinstance(colour, tuple)}


def test_a_report_has_first_last_and_best(tmp_path: Path) -> None:
    run = write_events(
        tmp_path,
        [
            run_started(),
            evaluated(0, 0.25),
            step_finished(1, reward=0.25),
            step_finished(2, reward=0.75),
            evaluated(2, 0.875),
            step_finished(3, reward=0.5),
        ],
    )
    rows = {row.name: (row.first, row.last, row.best, row.best_step) for row in make_report(run).rows}
    assert rows["reward"] == (0.25, 0.5, 0.75, 2)
    assert rows["accuracy"] == (0.25, 0.875, 0.875, 2)
    assert rows["loss"] == (0.5, 0.5, None, None)
    assert rows["tokens/s"] == (1200, 1200, 1200, 1)


def test_sampled_numbers_have_rows_of_their_own(tmp_path: Path) -> None:
    first, second = (
        evaluated(step, 0.5, sampled=grades(0.5, rollouts_per_prompt=4, pass_at={4: pass_at_4}))
        for step, pass_at_4 in ((0, 0.75), (1, 0.875))
    )
    run = write_events(tmp_path, [run_started(), first, step_finished(1), second])
    rows = {row.name: (row.first, row.last, row.best, row.best_step) for row in make_report(run).rows}
    assert list(rows)[:4] == ["accuracy", "mean@4", "pass@4", "majority@4"]
    assert rows["pass@4"] == (0.75, 0.875, 0.875, 1)


def test_steps_that_were_taken_again_after_a_resume_count_once(tmp_path: Path) -> None:
    run = write_events(
        tmp_path,
        [
            run_started(),
            evaluated(0, 0.25),
            step_finished(1, reward=0.1),
            step_finished(2, reward=0.9),
            evaluated(2, 0.99),
            run_started(resumed_step=1),
            step_finished(2, reward=0.2),
            evaluated(2, 0.5),
        ],
    )
    rows = {row.name: (row.first, row.last, row.best, row.best_step) for row in make_report(run).rows}
    assert rows["reward"] == (0.1, 0.2, 0.2, 2)
    assert rows["accuracy"] == (0.25, 0.5, 0.5, 2)


def test_curves_show_reward_and_accuracy(tmp_path: Path) -> None:
    run = write_events(tmp_path, [run_started(), evaluated(0, 0.25), *[step_finished(n) for n in range(1, 9)]])
    report = make_report(run)
    assert report.curves == tmp_path / "curves.png"
    assert Image.open(report.curves).size == (WIDTH_PX, 2 * PANEL_HEIGHT_PX)
    assert {BLUE, VERMILLION} <= colours(report.curves)


def test_a_run_without_rewards_shows_its_loss(tmp_path: Path) -> None:
    run = write_events(
        tmp_path, [run_started(), step_finished(1, reward=None, loss=2.0), step_finished(2, reward=None, loss=1.0)]
    )
    report = make_report(run)
    rows = {row.name: (row.first, row.last, row.best) for row in report.rows}
    assert rows["loss"] == (2.0, 1.0, 1.0)
    assert not {"reward", "accuracy", "response tokens"} & set(rows)
    assert Image.open(report.curves).size == (WIDTH_PX, PANEL_HEIGHT_PX)
    assert GREEN in colours(report.curves)


def test_a_run_without_a_step_still_has_a_picture(tmp_path: Path) -> None:
    report = make_report(write_events(tmp_path, [run_started()]))
    assert report.rows == ()
    assert report.curves.is_file()


def test_a_folder_without_events_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"events\.jsonl: cannot be read"):
        make_report(tmp_path)
