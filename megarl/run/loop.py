"""The loop of a run: a step takes scored groups, updates and publishes while producers make others. One for every mode.

Producers consume prompts, wait for a place in the buffer, and produce scored groups.
The step consumes scored groups, waits for a step's worth of them, and produces a version, which unblocks producers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field

from megarl.cluster.tasks import task_group
from megarl.observe.events import Published
from megarl.observe.observer import Observer
from megarl.results import UpdateResult
from megarl.run.buffer import Buffer
from megarl.run.evaluate import Evaluation
from megarl.run.saver import Saver
from megarl.stages import Stages
from megarl.types import PolicyVersion, ScoredGroup, TrainSample


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where the trainer stands when the loop begins."""

    step: int
    """The last step taken; 0 is none."""
    version: PolicyVersion


@dataclass(eq=False)
class Loop:
    stages: Stages
    _: KW_ONLY
    buffer: Buffer
    evaluation: Evaluation | None
    saver: Saver
    observer: Observer
    start: Start
    num_steps: int
    _published: PolicyVersion | None = field(default=None, init=False)

    async def run(self) -> None:
        """Take every step that is left; return when the last one is trained, published, evaluated and saved."""
        await self._publish(self.start.version)
        if self.start.step == 0 and self.evaluation is not None:
            await self.evaluation.before_training(self.start.version)
        if self.start.step >= self.num_steps:  # producers would wait for a step for ever
            return
        async with self.saver, task_group() as tasks:
            producers = [tasks.create_task(self._produce()) for _ in range(self.buffer.capacity)]
            for step in range(self.start.step + 1, self.num_steps + 1):
                is_last = step == self.num_steps
                self.observer.step_started()
                version = await self._step(step)
                self.saver.mark(step)
                for producer in producers if is_last else ():
                    producer.cancel()
                if self.evaluation is not None:
                    await self.evaluation.after_step(step, version, tasks, is_last=is_last)
                await self.saver.after_step(step, is_last=is_last)
                if not is_last:
                    await self.buffer.release_step(version)

    async def _produce(self) -> None:
        stages = self.stages
        while True:
            ticket = await self.buffer.reserve()
            prompt = next(stages.prompts)
            scored = await stages.groups.scored_group(prompt)
            if scored is not None and stages.algorithm.keeps(scored):
                await self.buffer.put(ticket, scored)
            else:
                await self.buffer.give_up(ticket)

    async def _step(self, step: int) -> PolicyVersion:
        stages, observer = self.stages, self.observer
        with observer.phase("generate"):
            async with stages.phases.generating():
                groups = await self.saver.unless_leaving(self.buffer.take_step())
        async with stages.phases.training():
            samples, update = await self.saver.unless_held(self._train(groups))
        if update.version != self._published:
            await self._publish(update.version)
        observer.step_finished(
            step,
            groups,
            samples,
            update,
            dropped={**stages.algorithm.take_dropped(), **stages.groups.take_dropped()},
            kl_coef=stages.algorithm.kl_coef,
            flow=self.buffer.flow,
        )
        return update.version

    async def _train(self, groups: Sequence[ScoredGroup]) -> tuple[Sequence[TrainSample], UpdateResult]:
        with self.observer.phase("assign"):
            estimates = await self.stages.trainer.estimate(groups)
            samples = self.stages.algorithm.assign(groups, estimates)
        with self.observer.phase("update"):
            return samples, await self.stages.trainer.update(samples)

    async def _publish(self, version: PolicyVersion) -> None:
        with self.observer.phase("publish"):
            published = await self.stages.publisher.publish(version)
        self._published = version
        self.observer.emit(Published(result=published))
