from __future__ import annotations

from pathlib import Path

import pytest

from megarl.checkpoint.folder import BEST
from megarl.checkpoint.prune import plan_prune, prune
from megarl.errors import CheckpointError
from tests.checkpoint.samples import write_checkpoint


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    for step in range(1, 6):
        write_checkpoint(tmp_path, step)
    return tmp_path


def steps(folders: tuple[Path, ...]) -> list[int]:
    return [int(folder.name[5:11]) for folder in folders]


def test_the_newest_stay(parent: Path) -> None:
    plan = plan_prune(parent, keep_last=2, keep_best=False)
    assert (steps(plan.kept), steps(plan.removed)) == ([5, 4], [3, 2, 1])
    assert [folder.name for folder in prune(plan)] == ["step_000003", "step_000002", "step_000001"]
    assert {path.name for path in parent.iterdir() if path.is_dir() and not path.is_symlink()} == {
        "step_000004",
        "step_000005",
    }


def test_the_best_stays_on_request(parent: Path) -> None:
    (parent / BEST).symlink_to("step_000002")
    assert steps(plan_prune(parent, keep_last=1, keep_best=True).kept) == [5, 2]
    assert steps(plan_prune(parent, keep_last=1, keep_best=False).kept) == [5]


def test_the_newest_that_verifies_stays_whatever_is_newer(parent: Path) -> None:
    for step in (4, 5):
        (parent / f"step_{step:06d}" / "state.json").write_text("{}")
    plan = plan_prune(parent, keep_last=1, keep_best=False)
    assert (steps(plan.kept), steps(plan.removed)) == ([5, 3], [4, 2, 1])


def test_where_nothing_verifies_nothing_goes(parent: Path) -> None:
    for folder in parent.glob("step_*"):
        (folder / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match="nothing was removed, because no checkpoint verifies"):
        plan_prune(parent, keep_last=1, keep_best=False)


def test_a_save_under_way_is_left_alone_and_what_was_abandoned_goes(parent: Path) -> None:
    (parent / "step_000006.tmp").mkdir()
    (parent / "step_000004").rename(parent / "step_000004.abandoned")
    plan = plan_prune(parent, keep_last=9, keep_best=False)
    assert [folder.name for folder in plan.removed] == ["step_000004.abandoned"]
    list(prune(plan))
    assert (parent / "step_000006.tmp").exists()
    assert not (parent / "step_000004.abandoned").exists()


def test_more_than_there_are_keeps_all(parent: Path) -> None:
    assert plan_prune(parent, keep_last=9, keep_best=False).removed == ()
