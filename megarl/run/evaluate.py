"""Evaluation: held-out prompts are answered, scored like rollouts, graded, and written for people to read."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

from megarl.algo.grade import grade, is_right
from megarl.cluster.tasks import task_group
from megarl.config.recipe import EvaluationConfig
from megarl.data.rollout_files import EvaluatedRollout, Generation, generations_file
from megarl.errors import MachineError, WorkerError
from megarl.observe.observer import Observer
from megarl.results import EvalResult
from megarl.run.saver import Saver
from megarl.stages import Phases
from megarl.tokens import counted
from megarl.types import DEMONSTRATION, PolicyVersion, Prompt, ScoredGroup

logger = logging.getLogger(__name__)

Answer: TypeAlias = Callable[[Prompt], Coroutine[None, None, ScoredGroup]]
"""Returns all rollouts of one prompt, scored."""

_LONG_WAIT_S = 1.0


class Evaluation(Protocol):
    """The evaluations of a run, as the loop calls them."""

    async def before_training(self, version: PolicyVersion) -> None: ...

    async def after_step(
        self, step: int, version: PolicyVersion, tasks: asyncio.TaskGroup, *, is_last: bool
    ) -> None: ...


class NoEvaluation:
    """For runs without held-out prompts or without engines."""

    async def before_training(self, version: PolicyVersion) -> None: ...

    async def after_step(
        self, step: int, version: PolicyVersion, tasks: asyncio.TaskGroup, *, is_last: bool
    ) -> None: ...


class Evaluator(Protocol):
    def is_due(self, step: int, *, is_last: bool) -> bool:
        """Whether to evaluate after `step`; 0 is before the first."""
        ...

    async def evaluate(self, step: int, version: PolicyVersion) -> EvalResult:
        """Grade what the engines serve: `version`, or later ones that are published meanwhile."""
        ...


class ScheduledEvaluation:
    """Evaluates in turn with training in synchronous runs and after the last step, else beside the next steps."""

    def __init__(
        self, evaluator: Evaluator, *, phases: Phases, observer: Observer, saver: Saver, is_synchronous: bool
    ) -> None:
        self._evaluator = evaluator
        self._phases = phases
        self._observer = observer
        self._saver = saver
        self._is_synchronous = is_synchronous
        self._pending: asyncio.Task[None] | None = None
        """The evaluation beside the steps."""

    async def before_training(self, version: PolicyVersion) -> None:
        if self._evaluator.is_due(0, is_last=False):
            await self._evaluate_in_turn(0, version)

    async def after_step(self, step: int, version: PolicyVersion, tasks: asyncio.TaskGroup, *, is_last: bool) -> None:
        if not self._evaluator.is_due(step, is_last=is_last):
            return
        await self._finish_pending(step)
        if is_last:
            await self._evaluate_in_turn(step, version)
        elif self._is_synchronous:
            await self._saver.unless_leaving(self._evaluate_in_turn(step, version))
        else:
            self._pending = tasks.create_task(self._evaluate(step, version))

    async def _finish_pending(self, step: int) -> None:
        """Wait for the evaluation before this one: two at once would keep the engines from generating."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        began = time.monotonic()
        with self._observer.phase("evaluate"):
            await self._saver.unless_leaving(_finished(pending))
        waited_s = time.monotonic() - began
        if waited_s > _LONG_WAIT_S:
            self._observer.warned(
                f"step {step}: training waited {waited_s:.1f} s for the evaluation before this one; "
                "raise evaluation.every_steps or lower evaluation.max_prompts"
            )

    async def _evaluate_in_turn(self, step: int, version: PolicyVersion) -> None:
        async with self._phases.generating():
            with self._observer.phase("evaluate"):
                await self._evaluate(step, version)

    async def _evaluate(self, step: int, version: PolicyVersion) -> None:
        result = await self._evaluator.evaluate(step, version)
        self._observer.evaluated(step, result)
        self._saver.evaluated(step, result)


async def _finished(task: asyncio.Task[None]) -> None:
    await task


class HeldOutEvaluator:
    """Answers greedily, by sampling, or both; the same seeds each time, so that only learning makes a difference."""

    def __init__(
        self,
        config: EvaluationConfig,
        *,
        prompts: Sequence[Prompt],
        greedy: Answer | None,
        sampled: Answer | None,
        write: Callable[[Path, Sequence[EvaluatedRollout]], Awaitable[None]],
        run_folder: Path,
    ) -> None:
        """`greedy` or `sampled` is None where the configuration does not ask for it. `write` writes a file."""
        assert prompts, "an evaluation needs prompts"
        self._config = config
        self._prompts = prompts
        self._greedy = greedy
        self._sampled = sampled
        self._write = write
        self._run_folder = run_folder

    def is_due(self, step: int, *, is_last: bool) -> bool:
        return self._config.is_due(step, is_last=is_last)

    async def evaluate(self, step: int, version: PolicyVersion) -> EvalResult:
        # One after the other: next to a greedy request SGLang draws the sampled ones of a batch by rank, not by token,
        # and the same seeds give other tokens.
        greedy = await self._answers(self._greedy)
        sampled = await self._answers(self._sampled)
        await self._keep(step, greedy, sampled)
        versions = sorted(_versions([*greedy, *sampled]))
        right_from, sampling = self._config.right_from, self._config.sampled
        pass_at = sampling.pass_at_or_default if sampling is not None else ()
        return EvalResult(
            version=versions[0],
            newest_version=versions[-1] if len(versions) > 1 else None,
            greedy=grade(greedy, right_from=right_from) if greedy else None,
            sampled=grade(sampled, right_from=right_from, pass_at=pass_at) if sampled else None,
        )

    async def _answers(self, answer: Answer | None) -> list[ScoredGroup]:
        """Return one group per prompt, in their order; the first failure ends them all."""
        if answer is None:
            return []
        async with task_group() as tasks:
            answering = [tasks.create_task(answer(prompt)) for prompt in self._prompts]
        return [task.result() for task in answering]

    async def _keep(self, step: int, greedy: Sequence[ScoredGroup], sampled: Sequence[ScoredGroup]) -> None:
        answers = [
            answer
            for groups, is_greedy in ((greedy, True), (sampled, False))
            for scored in groups
            for answer in self._answers_of(scored, is_greedy=is_greedy)
        ]
        try:
            await self._write(generations_file(self._run_folder, step), answers)
        except (MachineError, WorkerError) as error:
            logger.warning("the generations of an evaluation are not kept: %s", error)

    def _answers_of(self, scored: ScoredGroup, *, is_greedy: bool) -> Iterator[EvaluatedRollout]:
        prompt = scored.group.prompt
        for index, (rollout, score) in enumerate(zip(scored.group.rollouts, scored.scores, strict=True)):
            generation = Generation(
                prompt_uid=prompt.uid,
                data_source=prompt.data_source,
                is_greedy=is_greedy,
                index=index,
                is_right=is_right(score, right_from=self._config.right_from),
                score=score.value,
                components=score.components,
                prediction=score.prediction,
                ground_truth=prompt.ground_truth,
                finish_reason=rollout.finish_reason,
                num_tokens=rollout.num_tokens,
                ending=None if rollout.episode.ending is None else rollout.episode.ending.value,
            )
            yield EvaluatedRollout(
                generation=generation,
                prompt_ids=prompt.token_ids,
                content=rollout.content,
                turns=rollout.episode.turns,
            )


def _versions(groups: Sequence[ScoredGroup]) -> set[PolicyVersion]:
    """Return all versions that chose a token."""
    return {
        PolicyVersion(version)
        for scored in groups
        for rollout in scored.group.rollouts
        for version, _ in counted(rollout.versions)
    } - {DEMONSTRATION}
