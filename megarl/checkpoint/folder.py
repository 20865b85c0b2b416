"""The checkpoints of a run on disk: their names, which is the latest, how one appears and how old ones go.

A checkpoint has its name only when every byte of it is on disk: it is written as `step_N.tmp` and renamed.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath

from megarl.checkpoint.manifest import FileDigest, Manifest, sync, write_manifest
from megarl.errors import CheckpointError
from megarl.system.faults import reach, step_in

CHECKPOINTS_FOLDER = "checkpoints"
LATEST = "latest"
BEST = "best"
ABANDONED = ".abandoned"
LATEST_STEP_FILE = "latest_checkpointed_iteration.txt"
"""For tools that look for a step number under this name."""

_STEP = re.compile(r"step_(\d{6,})")


def checkpoint_folder(parent: Path, step: int) -> Path:
    return parent / f"step_{step:06d}"


def step_of(folder: Path) -> int | None:
    match = _STEP.fullmatch(folder.name)
    return int(match.group(1)) if match else None


def list_checkpoints(parent: Path) -> list[Path]:
    """The newest first; what a killed save left behind is not among them."""
    if not parent.is_dir():
        return []
    steps = {path: step for path in parent.iterdir() if path.is_dir() and (step := step_of(path)) is not None}
    return sorted(steps, key=lambda path: steps[path], reverse=True)


def begin(folder: Path, *, num_bytes: int) -> Path:
    """An empty folder to write a checkpoint of about `num_bytes` into; leftovers of killed saves are removed."""
    parent = folder.parent
    parent.mkdir(parents=True, exist_ok=True)
    for leftover in parent.glob("step_*.tmp"):
        shutil.rmtree(leftover)
    free_bytes = shutil.disk_usage(parent).free
    if free_bytes < num_bytes:
        raise CheckpointError(
            f"{folder} was not saved: it needs {num_bytes / 1e9:.1f} GB and {free_bytes / 1e9:.1f} GB are free; "
            "make room, lower checkpoint.keep_last or set checkpoint.contents to weights"
        )
    partial = _partial(folder)
    partial.mkdir()
    reach("begun", step=step_in(partial))
    return partial


def commit(partial: Path, folder: Path, manifest: Manifest) -> None:
    """Give a complete checkpoint its name, and make it the latest."""
    write_manifest(partial, manifest)
    reach("manifest_written", step=step_in(partial))
    for inner in {inside for name in manifest.files for inside in PurePosixPath(name).parents}:
        sync(partial / inner)
    reach("folders_synced", step=step_in(partial))
    _set_aside_from(folder)
    reach("later_set_aside", step=step_in(partial))
    partial.rename(folder)
    sync(folder.parent)
    reach("renamed", step=step_in(folder))
    _point(folder, LATEST)
    reach("latest_linked", step=step_in(folder))
    _write_latest_step(folder)
    reach("latest_numbered", step=step_in(folder))


def discard(folder: Path) -> None:
    """Remove what a failed save of `folder` has written; what cannot be removed now goes with the next save."""
    shutil.rmtree(_partial(folder), ignore_errors=True)


def mark_best(folder: Path) -> None:
    _point(folder, BEST)


def prune(parent: Path, *, keep_last: int, keep_steps: Collection[int] = ()) -> None:
    """Remove all but the newest, and those of `keep_steps`."""
    for folder in list_checkpoints(parent)[keep_last:]:
        if step_of(folder) not in keep_steps:
            remove(folder)


def remove(folder: Path) -> None:
    """A checkpoint, or one that was set aside."""
    # Under the name of a leftover: killed in here, it is not half a checkpoint, and goes with the next save.
    doomed = _partial(folder.with_name(folder.name.removesuffix(ABANDONED)))
    folder.rename(doomed)
    reach("doomed", step=step_in(doomed))
    shutil.rmtree(doomed)
    reach("pruned", step=step_in(doomed))


def below(folder_name: str, files: Mapping[str, FileDigest]) -> dict[str, FileDigest]:
    """Files of an inner folder by their path in the checkpoint."""
    return {f"{folder_name}/{name}": digest for name, digest in files.items()}


def _partial(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.tmp")


def _set_aside_from(folder: Path) -> None:
    """Rename what is of this step or later: damaged, or of a future that the run abandoned by resuming before it."""
    step = step_of(folder)
    assert step is not None, f"{folder} is not named after a step"
    for later in list_checkpoints(folder.parent):
        if (step_of(later) or 0) >= step:
            aside = later.with_name(f"{later.name}{ABANDONED}")
            shutil.rmtree(aside, ignore_errors=True)
            later.rename(aside)


def _point(folder: Path, name: str) -> None:
    # Something new renamed over the old: whoever looks finds one of the two, never neither.
    link = folder.with_name(f"{name}.tmp")
    link.unlink(missing_ok=True)
    link.symlink_to(folder.name)
    link.rename(folder.with_name(name))
    sync(folder.parent)


def _write_latest_step(folder: Path) -> None:
    number = folder.with_name(f"{LATEST_STEP_FILE}.tmp")
    number.write_text(f"{step_of(folder)}\n")
    sync(number)
    number.rename(folder.with_name(LATEST_STEP_FILE))
    sync(folder.parent)
