"""Which checkpoints of a run may go. Decides first, removes after; never the newest one that verifies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megarl.checkpoint.folder import ABANDONED, BEST, LATEST, list_checkpoints, remove
from megarl.checkpoint.manifest import OnBytes, verify
from megarl.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunePlan:
    kept: tuple[Path, ...]
    removed: tuple[Path, ...]


def plan_prune(parent: Path, *, keep_last: int, keep_best: bool, on_bytes: OnBytes | None = None) -> PrunePlan:
    """Keeps the newest `keep_last`, the newest that verifies, `latest` and, if asked to, `best`.

    What a run has set aside as abandoned goes; a save under way (`.tmp`) is not touched.
    """
    checkpoints = list_checkpoints(parent)
    kept = {*checkpoints[:keep_last], _newest_whole(checkpoints, on_bytes)}
    kept |= {
        folder for name in (LATEST, *([BEST] if keep_best else [])) if (folder := marked(parent, name)) is not None
    }
    removed = [folder for folder in checkpoints if folder not in kept]
    return PrunePlan(
        kept=tuple(folder for folder in checkpoints if folder in kept),
        removed=(*removed, *sorted(parent.glob(f"step_*{ABANDONED}"))),
    )


def prune(plan: PrunePlan) -> Iterator[Path]:
    """Remove what the plan says; yields each folder when it is gone."""
    for folder in plan.removed:
        try:
            remove(folder)
        except OSError as error:
            raise CheckpointError(f"{folder}: cannot be removed: {error.strerror}") from error
        yield folder


def marked(parent: Path, name: str) -> Path | None:
    """The checkpoint a link of the run points to."""
    link = parent / name
    return parent / link.readlink().name if link.is_symlink() and link.exists() else None


def _newest_whole(checkpoints: list[Path], on_bytes: OnBytes | None) -> Path:
    complaints = []
    for folder in checkpoints:
        try:
            verify(folder, on_bytes=on_bytes)
        except CheckpointError as error:
            complaints.append(str(error))
        else:
            return folder
    raise CheckpointError(f"nothing was removed, because no checkpoint verifies: {'; '.join(complaints)}")
