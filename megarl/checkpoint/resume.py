"""Chooses the checkpoint that a run resumes from: sizes, and all bytes but those of weights, which ranks verify."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from megarl.checkpoint.folder import list_checkpoints
from megarl.checkpoint.manifest import Manifest, read_manifest, verify
from megarl.checkpoint.state import RunState, read_state
from megarl.errors import CheckpointError

_IDENTITY: Mapping[str, tuple[str, ...] | None] = {
    "run": ("seed",),
    "data": ("is_shuffled", "max_prompt_tokens", "overlong_prompts"),
    "algorithm": None,
    "sampling": None,
    "reward": None,
    "train": ("prompts_per_step", "prompts_per_update", "max_staleness", "optimizer"),
}
"""Keys that decide what is trained on and how, by section; None stands for the whole section.

Layout, length, paths and output are left out. Model and data are compared by content where they are read.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """A checkpoint whose files are complete; the ranks that load its weights compare them with their digests."""

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
    """Sentences for the user about the choice."""


def decide(parent: Path, *, recipe_digest: str, num_steps: int, damaged: Collection[Path] = ()) -> Decision:
    """Choose the newest checkpoint that is complete, if the run can continue from it.

    Folders in `damaged` are passed over. If there are checkpoints and none is left, a CheckpointError leaves the
    decision to the user.
    """
    notes: list[str] = []
    for folder in list_checkpoints(parent):
        if folder in damaged:
            notes.append(f"skipped {folder}: damaged")
            continue
        try:
            obstacle = _obstacle(read_manifest(folder), recipe_digest=recipe_digest, num_steps=num_steps)
            if obstacle is not None:
                return Decision(point=None, notes=(*notes, f"starting anew: {folder} {obstacle}"))
            return Decision(point=open_complete(folder), notes=tuple(notes))
        except CheckpointError as error:
            notes.append(f"skipped {folder}: {error}")
    if notes:
        raise CheckpointError(
            f"no checkpoint of this run verifies; --resume never starts anew and keeps them: {'; '.join(notes)}"
        )
    return Decision(point=None)


def open_named(folder: Path, *, recipe_digest: str, num_steps: int) -> Decision:
    """Choose the checkpoint that the user named; a changed recipe is allowed and noted."""
    manifest = read_manifest(folder)
    if manifest.contents != "everything":
        raise CheckpointError(f"{folder}: has only weights; start from them with model.path={folder / 'model'}")
    if manifest.step >= num_steps:
        raise CheckpointError(f"{folder}: is at step {manifest.step}, run.steps is {num_steps}; raise run.steps")
    is_changed = manifest.recipe_digest != recipe_digest
    notes = (f"the recipe differs from the one {folder} was made with",) if is_changed else ()
    return Decision(point=open_complete(folder), notes=notes)


def _obstacle(manifest: Manifest, *, recipe_digest: str, num_steps: int) -> str | None:
    """Return why the run cannot continue from an intact checkpoint, as the end of a sentence; None if it can."""
    if manifest.step >= num_steps:
        return f"is at step {manifest.step} of {num_steps}, the run was finished"
    if manifest.contents != "everything":
        return "has only weights"
    if manifest.recipe_digest != recipe_digest:
        return "was made with another recipe (--resume PATH resumes from it nevertheless)"
    return None


def open_complete(folder: Path) -> ResumePoint:
    """Return a checkpoint whose files have their sizes, and all but those of weights their digests."""
    manifest = verify(folder, wants_weights=False)
    return ResumePoint(folder=folder, manifest=manifest, state=read_state(folder))


def identity_digest(recipe: Mapping[str, JsonValue]) -> str:
    """Return the digest of the keys that must stay the same for a run to continue; `recipe` is a manifest's."""
    identity: dict[str, JsonValue] = {}
    for name, keys in _IDENTITY.items():
        section = recipe[name]
        assert isinstance(section, dict), f"{name} is {section!r}"
        identity[name] = section if keys is None else {key: section[key] for key in keys}
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
