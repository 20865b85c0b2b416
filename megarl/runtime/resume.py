"""From `--resume` to a place to go on from, and whether the model and the data still fit it. Starts nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeAlias

from megarl.checkpoint.folder import CHECKPOINTS_FOLDER, checkpoint_folder
from megarl.checkpoint.manifest import MODEL_FOLDER, digest_file
from megarl.checkpoint.resume import Decision, ResumePoint, decide, identity_digest, open_named, open_verified
from megarl.checkpoint.state import Ledger
from megarl.config.model import ModelShape, read_model_shape
from megarl.config.recipe import Recipe
from megarl.errors import CheckpointError

ResumeChoice: TypeAlias = Path | Literal["auto", "never"]
"""`auto` goes on from the run's own newest checkpoint, where it has one."""

_TOKENIZER = "tokenizer.json"


def choose(recipe: Recipe, choice: ResumeChoice) -> Decision:
    """Where the run goes on; every byte of it is verified."""
    recipe_digest, num_steps = identity_digest(recipe.model_dump(mode="json")), recipe.run.steps
    match choice:
        case "never":
            return Decision(point=None)
        case "auto":
            parent = recipe.run_folder.absolute() / CHECKPOINTS_FOLDER
            return decide(parent, recipe_digest=recipe_digest, num_steps=num_steps)
        case Path():
            return open_named(choice.resolve(), recipe_digest=recipe_digest, num_steps=num_steps)


def is_of_run(point: ResumePoint, recipe: Recipe) -> bool:
    """Whether a checkpoint is one of the run's own, so that its folder is continued."""
    return point.folder.resolve().is_relative_to(recipe.run_folder.resolve())


def last_good(
    recipe: Recipe, *, first: ResumePoint | None, saved_steps: Sequence[int], warn: Callable[[str], None]
) -> ResumePoint | None:
    """Where a run goes on whose ranks were lost: at the newest checkpoint of its own, or where it began.

    Others may lie in its folder, of a run that went further from the same point: they are not its own.
    """
    parent = recipe.run_folder.absolute() / CHECKPOINTS_FOLDER
    if recipe.checkpoint.contents == "everything":
        folders = [checkpoint_folder(parent, step) for step in sorted(set(saved_steps), reverse=True)]
        for folder in filter(Path.exists, folders):
            try:
                return open_verified(folder)
            except CheckpointError as error:
                warn(f"skipped {folder}: {error}")
    if first is not None and not first.folder.exists():
        raise CheckpointError(f"{first.folder}: the run went on from it, and it is gone; no later checkpoint verifies")
    return first


def fitted(
    point: ResumePoint,
    *,
    model_folder: Path,
    shape: ModelShape,
    data_digest: str,
    allows_data_change: bool,
    warn: Callable[[str], None],
) -> ResumePoint:
    """The point as this run goes on from it; refuses another model or vocabulary, and other prompts unless allowed.

    A place in the stream means nothing among other prompts: those begin with their first epoch.
    """
    remedy = "go back to it, or start anew with --resume never"
    if read_model_shape(point.folder / MODEL_FOLDER) != shape:
        raise CheckpointError(f"model.path {model_folder}: not the model {point.folder} was made with; {remedy}")
    saved = point.manifest.files.get(f"{MODEL_FOLDER}/{_TOKENIZER}")
    path = model_folder / _TOKENIZER
    found = digest_file(path) if path.exists() else None
    if found != saved:
        raise CheckpointError(f"{path}: not the tokenizer {point.folder} was made with; {remedy}")
    if point.state.data_digest != data_digest:
        if not allows_data_change:
            raise CheckpointError(
                f"data.train: not the prompts {point.folder} was made with; go back to them, "
                "go on with --allow-data-change from the first of the new ones, or start anew with --resume never"
            )
        warn(f"data.train: not the prompts {point.folder} was made with; the new ones start with their first epoch")
        return replace(point, state=replace(point.state, prompt_cursor=0, ledger=Ledger()))
    return point
