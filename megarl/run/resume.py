"""Where a run resumes, whether its model and data still fit, and how often lost ranks are restarted. Starts nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeAlias

from megarl.checkpoint.folder import CHECKPOINTS_FOLDER, checkpoint_folder
from megarl.checkpoint.manifest import MODEL_FOLDER, digest_file
from megarl.checkpoint.mirror import Fetched, MirroredRun
from megarl.checkpoint.resume import Decision, Ledger, ResumePoint, decide, open_complete, open_named
from megarl.config.lora import ADAPTER_CONFIG_FILE, LoraConfig, adapter_problem
from megarl.config.model import read_model_shape
from megarl.config.recipe import ModelConfig, Recipe
from megarl.errors import CheckpointError, WorkerError
from megarl.families.shape import ModelShape
from megarl.run.inputs import Inputs
from megarl.system.run_lock import check_held

ResumeChoice: TypeAlias = Path | Literal["auto", "never"]
"""`auto` resumes from the run's own newest checkpoint, if it has one."""

_TOKENIZER = "tokenizer.json"
_MAX_PAUSE_S = 60.0


def choose(
    recipe: Recipe,
    choice: ResumeChoice,
    *,
    damaged: Collection[Path] = (),
    notify: Callable[[str], None] = lambda _text: None,
) -> Decision:
    """Return the checkpoint to resume from; ranks found that those in `damaged` do not verify.

    A newer one of `checkpoint.mirror` is fetched first; `notify` gets lines about it.
    """
    dumped, num_steps = recipe.model_dump(mode="json"), recipe.run.total_steps
    match choice:
        case "never":
            return Decision(point=None)
        case "auto":
            parent = recipe.run_folder.absolute() / CHECKPOINTS_FOLDER
            mirror, fetched = recipe.checkpoint.mirror, Fetched()
            if mirror is not None:
                run = MirroredRun(mirror=mirror, run_folder=recipe.run_folder, recipe=dumped, num_steps=num_steps)
                fetched = run.fetch_newest(damaged=damaged, notify=notify)
            damaged = set(damaged) - fetched.replaced
            decision = decide(parent, recipe=dumped, num_steps=num_steps, damaged=damaged)
            return replace(decision, notes=(*fetched.notes, *decision.notes))
        case Path():
            folder = choice.resolve()
            if folder in damaged:
                raise CheckpointError(f"{folder}: damaged; name an earlier one, or start anew with --resume never")
            return open_named(folder, recipe=dumped, num_steps=num_steps)


def is_of_run(point: ResumePoint, run_folder: Path) -> bool:
    """Whether a checkpoint lies in the run's own folder, which is then continued."""
    return point.folder.resolve().is_relative_to(run_folder.resolve())


def last_good(
    recipe: Recipe,
    *,
    first: ResumePoint | None,
    saved_steps: Sequence[int],
    warn: Callable[[str], None],
    damaged: Collection[Path] = (),
) -> ResumePoint | None:
    """Return where a run resumes after losing ranks: its newest checkpoint, or the point where it began.

    Only checkpoints of `saved_steps` count: the folder may hold others, of an earlier run that went further.
    """
    # Ranks of a driver that another has followed are not lost: the other has them, or has ended them.
    check_held(recipe.run_folder)
    parent = recipe.run_folder.absolute() / CHECKPOINTS_FOLDER
    if recipe.checkpoint.contents == "everything":
        folders = [checkpoint_folder(parent, step) for step in sorted(set(saved_steps), reverse=True)]
        for folder in (folder for folder in folders if folder.exists() and folder not in damaged):
            try:
                return open_complete(folder)
            except CheckpointError as error:
                warn(f"skipped {folder}: {error}")
    if first is not None and not first.folder.exists():
        raise CheckpointError(f"{first.folder}: the run resumed from it, and it is gone; no later checkpoint verifies")
    return first


def checked_resume_point(
    point: ResumePoint,
    *,
    model: ModelConfig,
    inputs: Inputs,
    allows_data_change: bool,
    warn: Callable[[str], None],
) -> ResumePoint:
    """Refuse another model or tokenizer, and other prompts unless allowed; return the point to resume from.

    Other prompts start with their first epoch, since a position in the stream means nothing among them.
    """
    remedy = "go back to it, or start anew with --resume never"
    if not _is_of_model(point.folder / MODEL_FOLDER, inputs.shape, model.lora):
        raise CheckpointError(f"model.path {model.path}: not the model {point.folder} was made with; {remedy}")
    saved = point.manifest.files.get(f"{MODEL_FOLDER}/{_TOKENIZER}")
    path = model.path / _TOKENIZER
    current = digest_file(path) if path.exists() else None
    if current != saved:
        raise CheckpointError(f"{path}: not the tokenizer {point.folder} was made with; {remedy}")
    if point.state.tools_digest not in (None, inputs.tools_digest) and not allows_data_change:
        raise CheckpointError(
            f"environment: not the tools {point.folder} was made with, and prompts name them; go back to these, "
            "go on with --allow-data-change, or start anew with --resume never"
        )
    if point.state.data_digest != inputs.train.digest:
        if not allows_data_change:
            raise CheckpointError(
                f"data.train: not the prompts {point.folder} was made with; go back to them, "
                "go on with --allow-data-change from the first of the new ones, or start anew with --resume never"
            )
        warn(f"data.train: not the prompts {point.folder} was made with; the new ones start with their first epoch")
        return replace(point, state=replace(point.state, prompt_cursor=0, ledger=Ledger()))
    return point


def _is_of_model(folder: Path, shape: ModelShape, lora: LoraConfig | None) -> bool:
    """Whether a checkpoint has a model of this shape, or the recipe's adapter for one."""
    if (folder / ADAPTER_CONFIG_FILE).exists():
        return lora is not None and adapter_problem(lora, folder, shape) is None
    return lora is None and read_model_shape(folder) == shape


class Restarts:
    """Allows `max_restarts` between two checkpoints: a run that makes progress may lose ranks any number of times."""

    def __init__(self, *, max_restarts: int, pause_s: float) -> None:
        self._max_restarts = max_restarts
        self._pause_s = pause_s
        self._num_restarts = 0
        self._saved_step = 0
        self._last = ""

    def spend(self, error: WorkerError, *, saved_step: int) -> float:
        """Return the seconds to wait before the next start after `error`; raise if there is to be none."""
        if saved_step > self._saved_step:
            self._saved_step, self._num_restarts, self._last = saved_step, 0, ""
        before, self._last = self._last, str(error)
        if self._max_restarts == 0:
            raise error
        # An error that a rank itself reported twice in a row is permanent; a death or a hang may not be.
        if type(error) is WorkerError and before == str(error):
            raise WorkerError(f"{error}; it failed the same way when the ranks were started again") from error
        if self._num_restarts == self._max_restarts:
            raise type(error)(
                f"{error}; the ranks were started again {self._num_restarts} times since step {saved_step} was saved "
                "(train.max_restarts)"
            ) from error
        self._num_restarts += 1
        pause_s: float = self._pause_s * 2 ** (self._num_restarts - 1)
        return min(pause_s, _MAX_PAUSE_S)
