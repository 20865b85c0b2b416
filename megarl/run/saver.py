"""When a run saves: after every so many steps, at its best evaluation, when it is stopped, and at its end."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Mapping
from types import TracebackType
from typing import NoReturn, Protocol, TypeVar

from megarl.checkpoint.resume import Best, RunState
from megarl.config.recipe import KeepBestConfig, Recipe
from megarl.data.stream import PromptStream
from megarl.errors import CheckpointError, ConfigError, Problem, WorkerError
from megarl.observe.observer import Observer
from megarl.results import EvalResult
from megarl.run.buffer import Buffer
from megarl.run.checkpoint_writer import CheckpointWriter, Mark, SavedModel
from megarl.run.preemption import Preemption
from megarl.stages import Algorithm

Result = TypeVar("Result")

_LOST_GRACE_S = 10.0
"""For a save under way when a rank is lost: only the driver's part may be left."""
_HOUR_S = 3600.0
"""The most between two saves, unless a step takes longer."""


class Saver(Protocol):
    """Saves checkpoints. Leaving its context finishes a save that is under way."""

    async def __aenter__(self) -> object: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    async def unless_leaving(self, work: Coroutine[object, object, Result]) -> Result:
        """Await work that can be repeated; on preemption cancel it, save, and raise PreemptedError."""
        ...

    async def unless_held(self, work: Coroutine[object, object, Result]) -> Result:
        """Await what ranks compute in a step. On preemption give it up if the step before it is saved or held in host
        memory: write that and raise PreemptedError. Else finish it: the step is saved after it."""
        ...

    def mark(self, step: int) -> None:
        """Note the state after a trained step, before its release: the run resumes from there."""
        ...

    def evaluated(self, step: int, result: EvalResult) -> None: ...

    async def after_step(self, step: int, *, is_last: bool) -> None:
        """Save if a save is due, or hold the step in host memory; on preemption save and raise PreemptedError."""
        ...


class RunSaver:
    """A failed save is reported and training goes on; only the save after the last step must succeed.

    Where ranks compute for more than half of the grace in a step, the other half might be too short for a save behind
    them. Every step is then copied to host memory: a preemption gives up what the ranks compute and writes the copy.
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`models` are given by their folder within a checkpoint; the actor's is the checkpoint itself.

        `is_lost` returns whether a rank is gone; `saved` gets saved steps; `marked` is called for trained ones.
        """
        self._recipe = recipe
        self._config = recipe.checkpoint
        self._writer = CheckpointWriter(
            recipe,
            models=models,
            data_digest=data_digest,
            tools_digest=tools_digest,
            observer=observer,
            resumed=resumed,
            saved=saved,
        )
        self._algorithm = algorithm
        self._prompts = prompts
        self._buffer = buffer
        self._preemption = preemption
        self._observer = observer
        self._is_lost = is_lost
        self._marked = marked
        self._clock = clock
        self._last_save = self._last_mark = clock()
        self._longest_step_s = 0.0
        """Since the last save began."""
        self._computing_s = 0.0
        """Time in which the ranks compute in a step, the longest so far."""
        self._mark: Mark | None = None
        self._candidate: Best | None = None

    async def __aenter__(self) -> RunSaver:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if (pending := self._writer.pending) is None:
            return
        # A cancelled run leaves at once. After another error the ranks of the save may be gone.
        patience_s = self._preemption.grace_s
        if self._is_lost() or isinstance(error, WorkerError):
            patience_s = min(patience_s, _LOST_GRACE_S)
        elif isinstance(error, asyncio.CancelledError | KeyboardInterrupt):
            patience_s = 0.0
        try:
            await asyncio.wait([pending], timeout=patience_s)
        finally:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)

    def mark(self, step: int) -> None:
        counts = self._buffer.counts
        under_way = [self._prompts.position_of(number) for number in counts.under_way]
        self._mark = Mark(
            step=step,
            prompt_cursor=self._prompts.cursor,
            counts=counts,
            pending=tuple(sorted((*under_way, *self._prompts.pending))),
            versions=self._buffer.versions,
            kl_coef=self._algorithm.kl_coef,
        )
        now = self._clock()
        self._longest_step_s = max(self._longest_step_s, now - self._last_mark)
        self._last_mark = now
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
        if step > 0 and math.isfinite(value) and _beats(value, self._writer.best, keep_best):
            self._candidate = Best(metric=keep_best.metric, value=value, step=step)

    async def unless_leaving(self, work: Coroutine[object, object, Result]) -> Result:
        return await self._unless_asked(work, can_copy=True)

    async def unless_held(self, work: Coroutine[object, object, Result]) -> Result:
        began = self._clock()
        can_leave = self._computes_long and self._mark is not None and self._writer.has(self._mark.step)
        result = await (self._unless_asked(work, can_copy=False) if can_leave else work)
        self._computing_s = max(self._computing_s, self._clock() - began)
        return result

    async def _unless_asked(self, work: Coroutine[object, object, Result], *, can_copy: bool) -> Result:
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
        return await self._leave(can_copy=can_copy)

    async def after_step(self, step: int, *, is_last: bool) -> None:
        assert self._mark is not None, "mark comes first"
        assert self._mark.step == step, f"marked step {self._mark.step}, asked to save step {step}"
        if self._preemption.requested.is_set() and not is_last:
            await self._leave()
        is_best = self._candidate is not None and self._candidate.step == step
        if is_best or self._is_due(step, is_last=is_last):
            self._last_save, self._longest_step_s = self._clock(), 0.0
            with self._observer.phase("save"):
                await self._writer.begin(self._mark, self._candidate)
        elif self._computes_long and not is_last:
            with self._observer.phase("save"):
                await self._writer.hold(self._mark)
        if is_last:
            with self._observer.phase("save"):
                await self._writer.wait()
            if self._config.save_at_end and step not in self._writer.saved_steps:
                raise CheckpointError(f"the run is done, but its last step was not saved: {self._writer.failure}")

    def _is_due(self, step: int, *, is_last: bool) -> bool:
        every_steps = self._config.save_every_steps
        if is_last:
            return self._config.save_at_end
        if every_steps == "hourly":
            return self._clock() - self._last_save + self._longest_step_s > _HOUR_S
        return every_steps is not None and step % every_steps == 0

    @property
    def _computes_long(self) -> bool:
        return self._computing_s > self._preemption.grace_s / 2

    async def _leave(self, *, can_copy: bool = True) -> NoReturn:
        """Save the last trained step, unless it is saved, and end the run. Ranks that compute can copy nothing."""
        mark = self._mark
        if mark is None:
            raise self._preemption.error("before a step was trained")
        given_up = "" if can_copy else f"; step {mark.step + 1} is given up"
        self._observer.noted(f"{self._preemption.signal_name}: saving step {mark.step}{given_up}")
        with self._observer.phase("save"):
            await self._writer.wait()
            if mark.step not in self._writer.saved_steps and (can_copy or self._writer.has(mark.step)):
                await self._writer.begin(mark, self._candidate)
                await self._writer.wait()
        outcome = "saved" if mark.step in self._writer.saved_steps else f"not saved: {self._writer.failure}"
        raise self._preemption.error(f"after step {mark.step}: {outcome}")


def _beats(value: float, best: Best | None, config: KeepBestConfig) -> bool:
    if best is None:
        return True
    return value > best.value if config.mode == "max" else value < best.value
