"""The driver's half of a checkpoint: when to save, and every file but the tensors, which the ranks write.

Training waits while the ranks copy their part to host memory; files are written beside the next steps.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Protocol, TypeVar

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
from megarl.checkpoint.manifest import CRITIC_FOLDER, FORMAT, FileDigest, Manifest, digest_file
from megarl.checkpoint.resume import STATE_FILE, Best, Ledger, RunState, TrainerState, identity_digest, write_state
from megarl.config.model import ModelShape
from megarl.config.recipe import KeepBestConfig, Recipe
from megarl.data.stream import PromptStream
from megarl.errors import CheckpointError, ConfigError, Problem, WorkerError
from megarl.observe.observer import Observer
from megarl.ranks.calls import TrainedCalls
from megarl.ranks.ranks import RankGroup
from megarl.ranks.start import Trainers, critic_folder, critic_shape
from megarl.results import EvalResult
from megarl.run.buffer import Buffer
from megarl.run.preemption import Preemption
from megarl.stages import Algorithm
from megarl.system.faults import reach, step_in
from megarl.types import PolicyVersion, ScoredGroup

Result = TypeVar("Result")

_LOST_GRACE_S = 10.0
"""For a save under way when a rank is lost: only the driver's part may be left."""
_SPARE_BYTES = 64 << 20
"""For files that are not tensors."""


class Saver(Protocol):
    """Saves checkpoints. Leaving its context finishes a save that is under way."""

    async def __aenter__(self) -> object: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    async def unless_leaving(self, work: Coroutine[object, object, Result]) -> Result:
        """Await work that can be repeated; on preemption cancel it, save, and raise PreemptedError."""
        ...

    def mark(self, step: int) -> None:
        """Note the state after a trained step, before its release: the run resumes from there."""
        ...

    def evaluated(self, step: int, result: EvalResult) -> None: ...

    async def after_step(self, step: int, *, is_last: bool) -> None:
        """Save if a save is due; on preemption save and raise PreemptedError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedModel:
    ranks: RankGroup[TrainedCalls]
    shape: ModelShape
    source_folder: Path
    """Holds the model's configuration and tokenizer."""

    async def write(self, folder: Path) -> dict[str, FileDigest]:
        """Write the snapshot of the ranks into a folder while they train on; return every file that a rank wrote."""
        written = await self.ranks.call_beside(TrainedCalls.write, folder, self.source_folder.absolute())
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
    return models


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    """The state of a run between two steps, without that of its ranks."""

    step: int
    prompt_cursor: int
    ledger: Ledger
    carried: tuple[ScoredGroup, ...]
    versions: tuple[PolicyVersion, ...]
    kl_coef: float | None


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


class RunSaver:
    """Keeps at most one save under way; the next one waits for it, since skipping would lose more steps in a crash.

    A failed save is reported and training goes on; only the save after the last step must succeed.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        models: Mapping[str, SavedModel],
        algorithm: Algorithm,
        prompts: PromptStream,
        buffer: Buffer,
        data_digest: str,
        tools_digest: str | None = None,
        preemption: Preemption,
        observer: Observer,
        resumed: RunState | None = None,
        is_lost: Callable[[], bool] = lambda: False,
        saved: Callable[[int], None] = lambda _step: None,
        marked: Callable[[], None] = lambda: None,
    ) -> None:
        """`models` are given by their folder within a checkpoint; the actor's is the checkpoint itself.

        `is_lost` returns whether a rank is gone; `saved` gets saved steps; `marked` is called for trained ones.
        """
        self._recipe = recipe
        self._config = recipe.checkpoint
        self._parent = recipe.run_folder.absolute() / CHECKPOINTS_FOLDER
        self._models = models
        has_all, lora = self._config.contents == "everything", recipe.model.lora
        sizes = [estimate_bytes(each.shape, wants_optimizer=has_all, lora=lora) for each in self._models.values()]
        self._num_bytes = sum(sizes) + _SPARE_BYTES
        self._algorithm = algorithm
        self._prompts = prompts
        self._buffer = buffer
        self._ledger_before = Ledger() if resumed is None else resumed.ledger
        self._data_digest = data_digest
        self._tools_digest = tools_digest
        self._preemption = preemption
        self._observer = observer
        self._is_lost = is_lost
        self._saved = saved
        self._marked = marked
        self._mark: _Mark | None = None
        self._pending: asyncio.Task[None] | None = None
        self._saved_steps: set[int] = set()
        self._failure = ""
        self._best = None if resumed is None else _still_best(resumed.best, self._config.keep_best, self._parent)
        self._candidate: Best | None = None

    async def __aenter__(self) -> RunSaver:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pending is None:
            return
        # A cancelled run leaves at once. After another error the ranks of the save may be gone.
        patience_s = self._config.grace_s
        if self._is_lost() or isinstance(error, WorkerError):
            patience_s = min(patience_s, _LOST_GRACE_S)
        elif isinstance(error, asyncio.CancelledError | KeyboardInterrupt):
            patience_s = 0.0
        try:
            await asyncio.wait([self._pending], timeout=patience_s)
        finally:
            self._pending.cancel()
            await asyncio.gather(self._pending, return_exceptions=True)

    def mark(self, step: int) -> None:
        counts, before = self._buffer.counts, self._ledger_before
        under_way = [self._prompts.position_of(number) for number in counts.under_way]
        ledger = Ledger(
            num_trained=before.num_trained + counts.num_taken,
            num_dropped=before.num_dropped + counts.num_given_up,
            pending=tuple(sorted((*under_way, *self._prompts.pending))),
            num_carried=len(counts.carried),
        )
        cursor = self._prompts.cursor
        assert ledger.num_drawn == cursor, f"{cursor} prompts were drawn, the ledger has {ledger.num_drawn}"
        self._mark = _Mark(
            step=step,
            prompt_cursor=cursor,
            ledger=ledger,
            carried=counts.carried,
            versions=self._buffer.versions,
            kl_coef=self._algorithm.kl_coef,
        )
        self._marked()

    def evaluated(self, step: int, result: EvalResult) -> None:
        keep_best = self._config.keep_best
        if keep_best is None:
            return
        value = result.numbers.get(keep_best.metric)
        if value is None:
            message = f"the evaluation has no {keep_best.metric}; it has {', '.join(result.numbers)}"
            problem = Problem(key="checkpoint.keep_best.metric", message=message)
            raise ConfigError(self._recipe.run.name, (problem,))
        if step > 0 and math.isfinite(value) and _beats(value, self._best, keep_best):
            self._candidate = Best(metric=keep_best.metric, value=value, step=step)

    async def unless_leaving(self, work: Coroutine[object, object, Result]) -> Result:
        doing = asyncio.ensure_future(work)
        asked = asyncio.ensure_future(self._preemption.requested.wait())
        try:
            await asyncio.wait((doing, asked), return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                return doing.result()
        finally:
            for task in (doing, asked):
                task.cancel()
            await asyncio.wait((doing, asked))
        return await self._leave()

    async def after_step(self, step: int, *, is_last: bool) -> None:
        assert self._mark is not None, "mark comes first"
        assert self._mark.step == step, f"marked step {self._mark.step}, asked to save step {step}"
        if self._preemption.requested.is_set() and not is_last:
            await self._leave()
        is_best = self._candidate is not None and self._candidate.step == step
        if is_best or self._is_due(step, is_last=is_last):
            with self._observer.phase("save"):
                await self._begin(self._mark)
        if is_last:
            with self._observer.phase("save"):
                await self._wait_for_pending()
            if self._config.save_at_end and step not in self._saved_steps:
                raise CheckpointError(f"the run is done, but its last step was not saved: {self._failure}")

    def _is_due(self, step: int, *, is_last: bool) -> bool:
        every_steps = self._config.save_every_steps
        return self._config.save_at_end if is_last else every_steps is not None and step % every_steps == 0

    async def _leave(self) -> NoReturn:
        """Save the last trained step, unless it is saved, and end the run."""
        mark = self._mark
        if mark is None:
            raise self._preemption.error("before a step was trained")
        self._observer.noted(f"{self._preemption.signal_name}: saving step {mark.step}")
        with self._observer.phase("save"):
            await self._wait_for_pending()
            if mark.step not in self._saved_steps:
                await self._begin(mark)
                await self._wait_for_pending()
        outcome = "saved" if mark.step in self._saved_steps else f"not saved: {self._failure}"
        raise self._preemption.error(f"after step {mark.step}: {outcome}")

    async def _begin(self, mark: _Mark) -> None:
        """Do the part of a save that training has to wait for."""
        began = time.monotonic()
        await self._wait_for_pending()
        waited_s = time.monotonic() - began
        if waited_s > 1:
            self._observer.warned(
                f"step {mark.step}: training waited {waited_s:.1f} s for the save before it; "
                "raise checkpoint.save_every_steps or save to a faster disk"
            )
        folder = checkpoint_folder(self._parent, mark.step)
        best_before = self._best
        try:
            partial = await asyncio.to_thread(begin, folder, num_bytes=self._num_bytes)
            trainers = await asyncio.gather(
                *(model.ranks.compute(TrainedCalls.snapshot, self._config.contents) for model in self._models.values())
            )
        except (CheckpointError, OSError) as error:
            await self._fail(mark.step, folder, error)
            return
        if self._candidate is not None and self._candidate.step == mark.step:
            self._best = self._candidate
        states = dict(zip(self._models, trainers, strict=True))
        save = _Save(
            step=mark.step,
            partial=partial,
            folder=folder,
            state=self._state(mark, states),
            carried=mark.carried,
            best_before=best_before,
            began=began,
            blocking_seconds=time.monotonic() - began,
        )
        self._pending = asyncio.create_task(self._finish(save))

    def _state(self, mark: _Mark, trainers: Mapping[str, TrainerState]) -> RunState:
        # While a critic warms up, its actor has taken fewer steps.
        num_steps = max(trainer.num_steps for trainer in trainers.values())
        assert num_steps == mark.step, f"the ranks stand at step {num_steps}, the loop at {mark.step}"
        return RunState(
            trainer=trainers[""],
            critic=trainers.get(CRITIC_FOLDER),
            kl_coef=mark.kl_coef,
            prompt_cursor=mark.prompt_cursor,
            ledger=mark.ledger,
            versions=mark.versions,
            best=self._best,
            seed=self._recipe.run.seed,
            data_digest=self._data_digest,
            tools_digest=self._tools_digest,
        )

    async def _finish(self, save: _Save) -> None:
        """Do the rest of a save beside the next steps."""
        try:
            files = await self._write_models(save.partial)
            manifest = await self._complete_whole(save, files)
        except (CheckpointError, OSError) as error:
            self._best = save.best_before
            await self._fail(save.step, save.folder, error)
            return
        self._observer.checkpoint_saved(
            save.step,
            save.folder,
            num_bytes=manifest.num_bytes,
            blocking_seconds=save.blocking_seconds,
            seconds=time.monotonic() - save.began,
        )
        try:
            await asyncio.to_thread(self._tidy, save)
        except OSError as error:
            self._observer.warned(f"old checkpoints in {self._parent} were not removed: {error}")

    async def _write_models(self, partial: Path) -> dict[str, FileDigest]:
        written = await asyncio.gather(
            *(model.write(partial / name) for name, model in self._models.items()),
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
                self._saved_steps.add(save.step)
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
        self._failure = str(error)
        self._observer.checkpoint_failed(step, str(error))

    async def _wait_for_pending(self) -> None:
        """Wait for the save under way; cancelling the wait does not cancel the save."""
        pending = self._pending
        if pending is not None:
            await asyncio.wait([pending])
            self._pending = None
            pending.result()


def _beats(value: float, best: Best | None, config: KeepBestConfig) -> bool:
    if best is None:
        return True
    return value > best.value if config.mode == "max" else value < best.value


def _still_best(best: Best | None, config: KeepBestConfig | None, parent: Path) -> Best | None:
    """Return the best step of an earlier checkpoint, if its metric is still asked for and its folder exists."""
    is_asked = best is not None and config is not None and best.metric == config.metric
    return best if is_asked and best is not None and checkpoint_folder(parent, best.step).exists() else None
