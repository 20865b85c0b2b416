from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import pytest

from megarl.checkpoint import folder as folder_module
from megarl.checkpoint.folder import (
    BEST,
    begin,
    checkpoint_folder,
    discard,
    list_checkpoints,
    plan_prune,
    prune,
    remove_old,
)
from megarl.checkpoint.manifest import verify
from megarl.checkpoint.resume import decide
from megarl.errors import CheckpointError, MachineError
from megarl.system.run_lock import LOCKS_FOLDER, run_lock
from tests.checkpoint.samples import make_recipe, write_checkpoint


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_the_newest_comes_first_and_latest_names_it(tmp_path: Path) -> None:
    for step in (2, 10, 1_000_000):
        write_checkpoint(tmp_path, step)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_1000000", "step_000010", "step_000002"]
    assert (tmp_path / "latest").readlink() == Path("step_1000000")
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1000000\n"


def test_what_a_killed_save_left_is_no_checkpoint_and_goes_with_the_next(tmp_path: Path) -> None:
    leftover = begin(checkpoint_folder(tmp_path, 1), num_bytes=0)
    (leftover / "model").mkdir()
    assert list_checkpoints(tmp_path) == []
    write_checkpoint(tmp_path, 2)
    assert not leftover.exists()


def test_two_drivers_that_save_one_step_do_not_touch_each_others_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint_folder(tmp_path / "run" / "checkpoints", 4)
    early = begin(folder, num_bytes=0, token=1)
    late = begin(folder, num_bytes=0, token=2)
    assert not early.exists(), "what an earlier driver left is removed"
    monkeypatch.setattr(folder_module, "held_token", lambda _run_folder: 1)
    early = begin(folder, num_bytes=0)
    assert late.exists()
    discard(folder)
    assert (early.exists(), late.exists()) == (False, True)


@pytest.mark.fault("another driver takes over while a checkpoint is being synced", "it is not renamed")
@pytest.mark.parametrize("point", ["folders_synced", "later_set_aside", "renamed"])
def test_a_driver_that_loses_the_run_while_it_commits_gives_no_name_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    folder = checkpoint_folder(tmp_path / "run" / "checkpoints", 2)
    with run_lock(tmp_path / "run", beat_s=3600) as holder:
        write_checkpoint(folder.parent, 1)
        lock = tmp_path / LOCKS_FOLDER / "run.json"
        successor = json.dumps(asdict(replace(holder, token=holder.token + 1, pid=12)))
        monkeypatch.setattr(folder_module, "reach", lambda now, step: now == point and lock.write_text(successor))
        with pytest.raises(MachineError, match=r"process 12 on .* has taken over this run"):
            write_checkpoint(folder.parent, 2)
    assert folder.exists() == (point == "renamed")
    assert (folder.parent / "latest").readlink() == Path("step_000001")


def test_what_a_run_resumed_before_is_set_aside_when_it_saves_again(tmp_path: Path) -> None:
    for step in (1, 2, 8, 9):
        write_checkpoint(tmp_path, step)
    (tmp_path / "step_000002" / "state.json").write_text("damaged")
    verify(write_checkpoint(tmp_path, 2))
    remove_old(tmp_path, keep_last=1)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_000002"]
    assert (tmp_path / "latest").resolve() == tmp_path / "step_000002"
    aside = {path.name for path in tmp_path.glob("*.abandoned")}
    assert aside == {f"step_00000{step}.abandoned" for step in (2, 8, 9)}


def test_nothing_is_begun_on_a_disk_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 10**12 - 10**9, 10**9))
    with pytest.raises(CheckpointError, match=r"needs 2\.0 GB and 1\.0 GB are free; make room"):
        begin(checkpoint_folder(tmp_path, 1), num_bytes=2 * 10**9)
    assert list(tmp_path.iterdir()) == []


class Killed(BaseException):
    """Stands for kill -9."""


@pytest.mark.parametrize("num_calls", range(36))
def test_killed_anywhere_in_a_save_the_newest_complete_checkpoint_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_calls: int
) -> None:
    """A save is killed after `num_calls` calls to the file system; it makes fewer than 36."""
    write_checkpoint(tmp_path, 1)
    left = num_calls

    def dying(call: Callable[..., object]) -> Callable[..., object]:
        def wrapper(*arguments: object, **options: object) -> object:
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            return call(*arguments, **options)

        return wrapper

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", dying(os.fsync))
        for name in ("mkdir", "write_bytes", "rename", "symlink_to"):
            patch.setattr(Path, name, dying(getattr(Path, name)))
        try:
            write_checkpoint(tmp_path, 2)
        except Killed:
            is_killed = True
        else:
            is_killed = False
    point = decide(tmp_path, recipe=make_recipe().model_dump(mode="json"), num_steps=9).point
    assert point is not None
    assert point.step in ((1, 2) if is_killed else (2,))
    assert (tmp_path / "latest" / "manifest.json").exists()
    write_checkpoint(tmp_path, 3)
    assert {path.name for path in tmp_path.glob("*.tmp")} == set()


def test_a_name_is_given_to_what_is_on_disk_and_is_on_disk_itself_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power failure only what was synced is there: contents before their name, a name before what follows."""
    calls: list[tuple[str, Path]] = []
    sync, rename = os.fsync, Path.rename

    def record_sync(descriptor: int) -> None:
        calls.append(("sync", Path(f"/proc/self/fd/{descriptor}").readlink().relative_to(tmp_path)))
        sync(descriptor)

    def record_rename(path: Path, target: Path) -> Path:
        calls.append(("rename", target.relative_to(tmp_path)))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(Path, "rename", record_rename)
    folder = write_checkpoint(tmp_path, 2)
    latest, number = Path("latest"), Path("latest_checkpointed_iteration.txt")
    named = calls.index(("rename", Path(folder.name)))
    synced = {name for call, name in calls[:named] if call == "sync"}
    inside = [folder / "manifest.json", *(path for path in folder.rglob("*") if path.is_dir())]
    assert {Path(f"{folder.name}.0.tmp") / path.relative_to(folder) for path in inside} <= synced
    assert calls[named:] == [
        ("rename", Path(folder.name)),
        ("sync", Path()),
        ("rename", latest),
        ("sync", Path()),
        ("sync", number.with_suffix(".txt.0.tmp")),
        ("rename", number),
        ("sync", Path()),
    ]


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    for step in range(1, 6):
        write_checkpoint(tmp_path, step)
    return tmp_path


def steps(folders: tuple[Path, ...]) -> list[int]:
    return [int(folder.name[5:11]) for folder in folders]


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
