"""The loop. One for every mode: what differs between modes is in the objects it is given.

Producers consume prompts, wait for the buffer's permission, and produce scored groups.
The step consumes scored groups, waits for a step's worth of them, and produces a version, which unblocks producers.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from megarl.observe.observer import Observer
from megarl.observe.summary import summarize_step
from megarl.runtime.buffer import Buffer
from megarl.runtime.evaluate import Evaluator
from megarl.runtime.rollout_samples import SampleWriter
from megarl.runtime.saver import Saver
from megarl.runtime.tasks import task_group
from megarl.stages import Algorithm, Generator, Phases, PromptSource, Publisher, Scorer, Trainer
from megarl.system.faults import reach
from megarl.types import PolicyVersion

_LONG_WAIT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where the trainer stands when the loop begins."""

    step: int
    """The last one taken; 0 is none."""
    version: PolicyVersion


class Loop:
    def __init__(
        self,
        *,
        prompts: PromptSource,
        generator: Generator,
        scorer: Scorer,
        algorithm: Algorithm,
        trainer: Trainer,
        publisher: Publisher,
        phases: Phases,
        buffer: Buffer,
        evaluator: Evaluator,
        keeper: SampleWriter,
        saver: Saver,
        observer: Observer,
        start: Start,
        num_steps: int,
    ) -> None:
        self._prompts = prompts
        self._generator = generator
        self._scorer = scorer
        self._algorithm = algorithm
        self._trainer = trainer
        self._publisher = publisher
        self._phases = phases
        self._buffer = buffer
        self._evaluator = evaluator
        self._keeper = keeper
        self._saver = saver
        self._observer = observer
        self._start = start
        self._num_steps = num_steps
        self._published: PolicyVersion | None = None
        self._evaluating: asyncio.Task[None] | None = None
        """One that goes on beside the steps."""

    async def run(self) -> None:
        """Every step that is left; returns when the last one is trained, published, evaluated and saved."""
        await self._publish(self._start.version)
        if self._start.step == 0 and self._evaluator.is_due(0, is_last=False):
            await self._evaluate(step=0, version=self._start.version)
        async with self._saver, task_group() as tasks:
            producers = [tasks.create_task(self._produce()) for _ in range(self._buffer.capacity)]
            for step in range(self._start.step + 1, self._num_steps + 1):
                is_last = step == self._num_steps
                version = await self._step(step)
                self._saver.mark(step)
                if is_last:
                    for producer in producers:
                        producer.cancel()
                if self._evaluator.is_due(step, is_last=is_last):
                    await self._evaluate_after(step, version, tasks, is_last=is_last)
                await self._saver.after_step(step, is_last=is_last)
                if not is_last:
                    await self._buffer.release_step(version)

    async def _produce(self) -> None:
        while True:
            ticket = await self._buffer.reserve()
            prompt = self._prompts.next()
            group = await self._generator.generate(prompt)
            scored = await self._scorer.score(group)
            if self._algorithm.keeps(scored):
                await self._buffer.put(ticket, scored)
            else:
                await self._buffer.give_up(ticket)

    async def _step(self, step: int) -> PolicyVersion:
        reach("step_begun", step=step)
        started = time.monotonic()
        async with self._phases.generating():
            with self._observer.phase("generate"):
                groups = await self._saver.unless_leaving(self._buffer.take_step())
        reach("step_taken", step=step)
        async with self._phases.training():
            with self._observer.phase("assign"):
                estimates = await self._trainer.estimate(groups)
                samples = self._algorithm.assign(groups, estimates)
                await self._keeper.keep(step, groups, samples)
            with self._observer.phase("update"):
                update = await self._trainer.update(samples)
        reach("step_trained", step=step)
        for text in update.warnings:
            self._observer.warned(text)
        if update.version != self._published:
            await self._publish(update.version)
        reach("step_published", step=step)
        seconds = time.monotonic() - started
        summary = summarize_step(
            step=step,
            groups=groups,
            samples=samples,
            dropped_groups=self._algorithm.take_dropped(),
            update=update,
            kl_coef=self._algorithm.kl_coef,
            flow=self._buffer.flow,
            seconds=seconds,
        )
        self._observer.step_finished(summary)
        return update.version

    async def _publish(self, version: PolicyVersion) -> None:
        with self._observer.phase("publish"):
            published = await self._publisher.publish(version)
        self._published = version
        self._observer.published(published)

    async def _evaluate_after(
        self, step: int, version: PolicyVersion, tasks: asyncio.TaskGroup, *, is_last: bool
    ) -> None:
        """In turn where generating and training are in turn, and after the last step; else beside the next steps."""
        await self._finish_evaluating(step)
        if is_last:
            await self._evaluate(step=step, version=version)
        elif self._buffer.is_synchronous:
            await self._saver.unless_leaving(self._evaluate(step=step, version=version))
        else:
            self._evaluating = tasks.create_task(self._evaluate_beside(step=step, version=version))

    async def _finish_evaluating(self, step: int) -> None:
        """One at a time: engines that fall behind would answer nothing else."""
        evaluating, self._evaluating = self._evaluating, None
        if evaluating is None:
            return
        began = time.monotonic()
        with self._observer.phase("evaluate"):
            await self._saver.unless_leaving(_finished(evaluating))
        waited_s = time.monotonic() - began
        if waited_s > _LONG_WAIT_S:
            self._observer.warned(
                f"step {step}: training waited {waited_s:.1f} s for the evaluation before this one; "
                "raise evaluation.every_steps or lower evaluation.max_prompts"
            )

    async def _evaluate(self, *, step: int, version: PolicyVersion) -> None:
        async with self._phases.generating():
            with self._observer.phase("evaluate"):
                await self._evaluate_beside(step=step, version=version)

    async def _evaluate_beside(self, *, step: int, version: PolicyVersion) -> None:
        result = await self._evaluator.evaluate(step, version)
        self._observer.evaluated(step, result)
        self._saver.evaluated(step, result)


async def _finished(task: asyncio.Task[None]) -> None:
    await task
