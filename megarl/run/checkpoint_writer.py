"""The driver's half of a checkpoint: every file but the tensors, which the ranks write.

Training waits while the ranks copy their part to host memory; files are written beside the next steps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megarl import __version__
from megarl.checkpoint.carried import write_groups
from megarl.checkpoint.folder import (
    CHECKPOINTS_FOLDER,
    begin,
    below,
    checkpoint_folder,
    commit,
    discard,
    estimate_bytes,
    mark_best,
    remove_old,
)
from megarl.checkpoint.manifest import (
    CRITIC_FOLDER,
    DRAFTER_FOLDER,
    FORMAT,
    FileDigest,
    FolderGrowth,
    Manifest,
    digest_file,
)
from megarl.checkpoint.resume import STATE_FILE, Best, Ledger, RunState, TrainerState, identity_digest, write_state
from megarl.config.model import read_model_shape
from megarl.config.recipe import KeepBestConfig, Recipe
from megarl.errors import CheckpointError
from megarl.families.shape import ModelShape
from megarl.observe.events import CheckpointFailed, CheckpointSaved
from megarl.observe.observer import Observer
from megarl.ranks.calls import TrainedCalls
from megarl.ranks.ranks import RankGroup
from megarl.ranks.start import Trainers, critic_folder, critic_shape, draft_folder
from megarl.run.buffer import Counts
from megarl.system.faults import reach, step_in
from megarl.types import PolicyVersion, ScoredGroup

_SPARE_BYTES = 64 << 20
"""For files that are not tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedModel:
    ranks: RankGroup[TrainedCalls]
    shape: ModelShape
    source_folder: Path
    """Holds the model's configuration and tokenizer."""

    async def write(self, folder: Path, warn: Callable[[str], None]) -> dict[str, FileDigest]:
        """Write the snapshot of the ranks into a folder while they train on; return every file that a rank wrote.

        A save that takes longer than a call may goes on, with a warning, as long as its files grow.
        """
        began, growth = time.monotonic(), FolderGrowth(folder)

        async def grows() -> bool:
            is_growing = await asyncio.to_thread(growth)
            if is_growing:
                size, seconds = f"{growth.num_bytes / 1e9:.3g} GB", time.monotonic() - began
                warn(f"{folder.name}: {size} are written after {seconds:.0f} s, the save goes on: the disk is slow")
            return is_growing

        written = await self.ranks.call_beside(grows, TrainedCalls.write, folder, self.source_folder.absolute())
        return {name: digest for files in written for name, digest in files.items()}


def saved_models(recipe: Recipe, trainers: Trainers, shape: ModelShape) -> dict[str, SavedModel]:
    """Return the trained models by their folder within a checkpoint; the actor's is the checkpoint itself."""
    models = {"": SavedModel(ranks=trainers.actor, shape=shape, source_folder=recipe.model.path)}
    critic = recipe.roles.critic
    if trainers.critic is not None and critic is not None:
        models[CRITIC_FOLDER] = SavedModel(
            ranks=trainers.critic,
            shape=critic_shape(critic, shape, recipe.algorithm),
            source_folder=critic_folder(critic, recipe.model.path),
        )
    if trainers.drafter is not None:
        folder = draft_folder(recipe)
        models[DRAFTER_FOLDER] = SavedModel(
            ranks=trainers.drafter, shape=read_model_shape(folder), source_folder=folder
        )
    return models


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The state of a run between two steps, without that of its ranks."""

    step: int
    prompt_cursor: int
    counts: Counts
    """Counted since the loop began."""
    pending: tuple[int, ...]
    """Stream positions of prompts without a group."""
    versions: tuple[PolicyVersion, ...]
    kl_coef: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """A step whose tensors the ranks have copied to host memory."""

    step: int
    trainers: Mapping[str, TrainerState]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Save:
    """A save under way."""

    step: int
    partial: Path
    folder: Path
    state: RunState
    carried: tuple[ScoredGroup, ...]
    best_before: Best | None
    began: float
    """On the clock of time.monotonic."""
    blocking_seconds: float


class CheckpointWriter:
    """Keeps at most one save under way; the next one waits for it, since skipping would lose more steps in a crash.

    A failed save is reported and training goes on.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        models: Mapping[str, SavedModel],
        data_digest: str,
        tools_digest: str | None,
        observer: Observer,
        resumed: RunState | None,
        saved: Callable[[int], None],
    ) -> None:
        """`models` are given by their folder within a checkpoint; `saved` gets saved steps."""
        self._recipe = recipe
        self._config = recipe.checkpoint
        self._parent = recipe.run_folder.absolute() / CHECKPOINTS_FOLDER
        self._models = models
        has_all, lora = self._config.contents == "everything", recipe.model.lora
        sizes = [
            estimate_bytes(each.shape, wants_optimizer=has_all, lora=None if name == DRAFTER_FOLDER else lora)
            for name, each in self._models.items()
        ]
        self._num_bytes = sum(sizes) + _SPARE_BYTES
        self._ledger_before = Ledger() if resumed is None else resumed.ledger
        self._data_digest = data_digest
        self._tools_digest = tools_digest
        self._observer = observer
        self._saved = saved
        self.pending: asyncio.Task[None] | None = None
        self._pending_step = 0
        self._held: _Held | None = None
        self.saved_steps: set[int] = set()
        self.failure = ""
        """The reason why the last save failed."""
        self.best = None if resumed is None else _still_best(resumed.best, self._config.keep_best, self._parent)
        """The best evaluation that a checkpoint has."""

    def has(self, step: int) -> bool:
        """Whether a step is saved, or will be without the ranks' main thread."""
        is_writing = self.pending is not None and not self.pending.done() and self._pending_step == step
        return step in self.saved_steps or is_writing or self._is_held(step)

    async def hold(self, mark: Mark) -> None:
        """Have the ranks copy a step to host memory, unless a save is under way: there is room for one copy."""
        if self.pending is None or self.pending.done():
            self._held = await self._copy(mark)

    async def begin(self, mark: Mark, candidate: Best | None) -> None:
        """Do the part of a save that training has to wait for; `candidate` is the best evaluation since the last."""
        began = time.monotonic()
        await self.wait()
        waited_s = time.monotonic() - began
        if waited_s > 1:
            self._observer.warned(
                f"step {mark.step}: training waited {waited_s:.1f} s for the save before it; "
                "raise checkpoint.save_every_steps or save to a faster disk"
            )
        folder = checkpoint_folder(self._parent, mark.step)
        best_before = self.best
        try:
            partial = await asyncio.to_thread(begin, folder, num_bytes=self._num_bytes)
            held = self._held if self._is_held(mark.step) else None
            copied, self._held = held or await self._copy(mark), None
        except (CheckpointError, OSError) as error:
            await self._fail(mark.step, folder, error)
            return
        if candidate is not None and candidate.step == mark.step:
            self.best = candidate
        save = _Save(
            step=mark.step,
            partial=partial,
            folder=folder,
            state=self._state(mark, copied.trainers),
            carried=mark.counts.carried,
            best_before=best_before,
            began=began,
            blocking_seconds=time.monotonic() - began,
        )
        self._pending_step = mark.step
        self.pending = asyncio.create_task(self._finish(save))

    def _is_held(self, step: int) -> bool:
        return self._held is not None and self._held.step == step

    async def _copy(self, mark: Mark) -> _Held:
        """Have the ranks copy their part to host memory, in place of an earlier copy."""
        self._held = None
        trainers = await asyncio.gather(
            *(model.ranks.compute(TrainedCalls.snapshot, self._config.contents) for model in self._models.values())
        )
        return _Held(step=mark.step, trainers=dict(zip(self._models, trainers, strict=True)))

    def _state(self, mark: Mark, trainers: Mapping[str, TrainerState]) -> RunState:
        # While a critic warms up, its actor has taken fewer steps; a drafter may take one in several.
        num_steps = max(trainer.num_steps for trainer in trainers.values())
        assert num_steps == mark.step, f"the ranks stand at step {num_steps}, the loop at {mark.step}"
        counts, before = mark.counts, self._ledger_before
        ledger = Ledger(
            num_trained=before.num_trained + counts.num_taken,
            num_dropped=before.num_dropped + counts.num_given_up,
            pending=mark.pending,
            num_carried=len(counts.carried),
        )
        cursor = mark.prompt_cursor
        assert ledger.num_drawn == cursor, f"{cursor} prompts were drawn, the ledger has {ledger.num_drawn}"
        return RunState(
            trainer=trainers[""],
            critic=trainers.get(CRITIC_FOLDER),
            drafter=trainers.get(DRAFTER_FOLDER),
            kl_coef=mark.kl_coef,
            prompt_cursor=cursor,
            ledger=ledger,
            versions=mark.versions,
            best=self.best,
            seed=self._recipe.run.seed,
            data_digest=self._data_digest,
            tools_digest=self._tools_digest,
        )

    async def _finish(self, save: _Save) -> None:
        """Do the rest of a save beside the next steps."""
        try:
            files = await self._write_models(save)
            manifest = await self._complete_whole(save, files)
        except (CheckpointError, OSError) as error:
            self.best = save.best_before
            await self._fail(save.step, save.folder, error)
            return
        saved = CheckpointSaved(
            step=save.step,
            path=str(save.folder),
            num_bytes=manifest.num_bytes,
            blocking_seconds=save.blocking_seconds,
            seconds=time.monotonic() - save.began,
        )
        self._observer.emit(saved)
        try:
            await asyncio.to_thread(self._tidy, save)
        except OSError as error:
            self._observer.warned(f"old checkpoints in {self._parent} were not removed: {error}")

    async def _write_models(self, save: _Save) -> dict[str, FileDigest]:
        written = await asyncio.gather(
            *(model.write(save.partial / name, self._observer.warned) for name, model in self._models.items()),
            return_exceptions=True,
        )
        files: dict[str, FileDigest] = {}
        for name, outcome in zip(self._models, written, strict=True):
            if isinstance(outcome, BaseException):
                raise outcome
            files |= below(name, outcome) if name else outcome
        return files

    async def _complete_whole(self, save: _Save, files: Mapping[str, FileDigest]) -> Manifest:
        """Write the driver's files; when cancelled, wait for the thread, which would else rename the folder later."""
        completing = asyncio.ensure_future(asyncio.to_thread(self._complete, save, files))
        try:
            manifest = await asyncio.shield(completing)
        finally:
            await asyncio.wait([completing])
            if completing.exception() is None:
                self.saved_steps.add(save.step)
                self._saved(save.step)
        return manifest

    def _complete(self, save: _Save, files: Mapping[str, FileDigest]) -> Manifest:
        reach("ranks_done", step=step_in(save.partial))
        write_state(save.partial, save.state)
        files = {**files, **write_groups(save.partial, save.carried)}
        recipe = self._recipe.model_dump(mode="json")
        manifest = Manifest(
            format=FORMAT,
            megarl_version=__version__,
            step=save.step,
            contents=self._config.contents,
            recipe=recipe,
            recipe_digest=identity_digest(recipe),
            files=dict(sorted({**files, STATE_FILE: digest_file(save.partial / STATE_FILE)}.items())),
        )
        commit(save.partial, save.folder, manifest)
        return manifest

    def _tidy(self, save: _Save) -> None:
        best = save.state.best
        if best is not None and best.step == save.step:
            mark_best(save.folder)
        remove_old(self._parent, keep_last=self._config.keep_last, keep_steps=() if best is None else (best.step,))

    async def _fail(self, step: int, folder: Path, error: Exception) -> None:
        await asyncio.to_thread(discard, folder)
        self.failure = str(error)
        self._observer.emit(CheckpointFailed(step=step, reason=str(error)))

    async def wait(self) -> None:
        """Wait for the save under way; cancelling the wait does not cancel the save."""
        pending = self.pending
        if pending is not None:
            await asyncio.wait([pending])
            self.pending = None
            pending.result()


def _still_best(best: Best | None, config: KeepBestConfig | None, parent: Path) -> Best | None:
    """Return the best step of an earlier checkpoint, if its metric is still asked for and its folder exists."""
    is_asked = best is not None and config is not None and best.metric == config.metric
    return best if is_asked and best is not None and checkpoint_folder(parent, best.step).exists() else None
