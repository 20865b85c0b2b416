"""Which checkpoint a run goes on from, and why not from another. Verifies every byte before anybody reads a weight."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megarl.checkpoint.folder import list_checkpoints
from megarl.checkpoint.manifest import Manifest, read_manifest, verify
from megarl.checkpoint.state import RunState, read_state
from megarl.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """A checkpoint that verifies."""

    folder: Path
    manifest: Manifest
    state: RunState

    @property
    def step(self) -> int:
        return self.manifest.step


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    point: ResumePoint | None
    """None starts a new run."""
    notes: tuple[str, ...] = ()
    """What people should know about it."""


def decide(parent: Path, *, recipe_digest: str, num_steps: int) -> Decision:
    """Of a run's checkpoints, the newest that verifies, if the run can go on from it.

    Where there are checkpoints and all of them are damaged, starting anew is not for us to decide: a CheckpointError.
    """
    notes: list[str] = []
    for folder in list_checkpoints(parent):
        try:
            obstacle = _obstacle(read_manifest(folder), recipe_digest=recipe_digest, num_steps=num_steps)
            if obstacle is not None:
                return Decision(point=None, notes=(*notes, f"starting anew: {folder} {obstacle}"))
            return Decision(point=open_verified(folder), notes=tuple(notes))
        except CheckpointError as error:
            notes.append(f"skipped {folder}: {error}")
    if notes:
        raise CheckpointError(
            f"no checkpoint of this run verifies; --resume never starts anew and keeps them: {'; '.join(notes)}"
        )
    return Decision(point=None)


def open_named(folder: Path, *, recipe_digest: str, num_steps: int) -> Decision:
    """The checkpoint somebody asked for by name. A changed recipe is their wish; they are told."""
    manifest = read_manifest(folder)
    if manifest.contents != "everything":
        raise CheckpointError(f"{folder}: has only weights; start from them with model.path={folder / 'model'}")
    if manifest.step >= num_steps:
        raise CheckpointError(f"{folder}: stands at step {manifest.step}, run.steps is {num_steps}; raise run.steps")
    is_changed = manifest.recipe_digest != recipe_digest
    notes = (f"the recipe is not the one {folder} was made with",) if is_changed else ()
    return Decision(point=open_verified(folder), notes=notes)


def _obstacle(manifest: Manifest, *, recipe_digest: str, num_steps: int) -> str | None:
    """Why an intact checkpoint is nothing to go on from, as the end of a sentence."""
    if manifest.step >= num_steps:
        return f"is at step {manifest.step} of {num_steps}, the run was finished"
    if manifest.contents != "everything":
        return "has only weights"
    if manifest.recipe_digest != recipe_digest:
        return "was made with another recipe (--resume PATH goes on from it all the same)"
    return None


def open_verified(folder: Path) -> ResumePoint:
    manifest = verify(folder)
    return ResumePoint(folder=folder, manifest=manifest, state=read_state(folder))
