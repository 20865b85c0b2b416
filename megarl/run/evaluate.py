"""Evaluation: held-out prompts are answered, scored like rollouts, graded, and written for people to read.

The trainer computes the loss of held-out demonstrations and the order of held-out pairs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from megarl.algo.algorithm import AnyAlgorithm
from megarl.algo.grade import grade, is_right
from megarl.cluster.tasks import task_group
from megarl.config.recipe import EvaluationConfig, Recipe
from megarl.data.evaluation_files import EvaluatedRollout, Generation, generations_file, write_generations
from megarl.data.prompts import Demonstrations, DemonstrationScorer
from megarl.errors import MachineError, WorkerError
from megarl.observe.events import Evaluated
from megarl.observe.observer import Observer
from megarl.ranks.trainer import ModelsTrainer
from megarl.results import EvalResult, PreferenceStats
from megarl.rollout.generator import evaluation_seed
from megarl.rollout.groups import GivenGroups
from megarl.rollout.task import RolloutSource, RolloutTask, Sampling
from megarl.rollout.workers import RolloutWorkers
from megarl.run.inputs import Inputs
from megarl.run.saver import Saver
from megarl.stages import Generator, Phases
from megarl.tokens import counted
from megarl.types import (
    DEMONSTRATION,
    Estimates,
    FloatArray,
    PolicyVersion,
    Prompt,
    ScoredGroup,
    TrainSample,
    with_short_images,
)

logger = logging.getLogger(__name__)

Answer: TypeAlias = Callable[[Prompt], Coroutine[None, None, ScoredGroup]]
"""Returns all rollouts of one prompt, scored."""
WriteAnswers: TypeAlias = Callable[[Path, Sequence[EvaluatedRollout]], Awaitable[None]]
"""Writes the answers of an evaluation to a file."""

_LONG_WAIT_S = 1.0


@dataclass(kw_only=True)
class Evaluation:
    """Evaluates between the steps in synchronous runs and after the last step, else beside the next steps."""

    evaluator: Evaluator
    phases: Phases
    observer: Observer
    saver: Saver
    is_synchronous: bool
    _pending: asyncio.Task[None] | None = field(default=None, init=False)
    """The evaluation beside the steps."""

    async def before_training(self, version: PolicyVersion) -> None:
        if self.evaluator.is_due(0, is_last=False):
            await self._evaluate_alone(0, version)

    async def after_step(self, step: int, version: PolicyVersion, tasks: asyncio.TaskGroup, *, is_last: bool) -> None:
        if not self.evaluator.is_due(step, is_last=is_last):
            return
        await self._finish_pending(step)
        if is_last or self.is_synchronous:
            await self.saver.unless_leaving(self._evaluate_alone(step, version))
        else:
            self._pending = tasks.create_task(self._evaluate(step, version))

    async def _finish_pending(self, step: int) -> None:
        """Wait for the evaluation before this one: two at once would keep the engines from generating."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        began = time.monotonic()
        with self.observer.phase("evaluate"):
            await self.saver.unless_leaving(_finished(pending))
        waited_s = time.monotonic() - began
        if waited_s > _LONG_WAIT_S:
            self.observer.warned(
                f"step {step}: training waited {waited_s:.1f} s for the evaluation before this one; "
                "raise evaluation.every_steps or lower evaluation.max_prompts"
            )

    async def _evaluate_alone(self, step: int, version: PolicyVersion) -> None:
        async with self.phases.generating():
            with self.observer.phase("evaluate"):
                await self._evaluate(step, version)

    async def _evaluate(self, step: int, version: PolicyVersion) -> None:
        result = await self.evaluator.evaluate(step, version)
        self.observer.emit(Evaluated(step=step, result=result))
        self.saver.evaluated(step, result)


async def _finished(task: asyncio.Task[None]) -> None:
    await task


@dataclass(kw_only=True)
class Evaluator:
    """Grades answers, and measures how the trainer's model does on given ones."""

    config: EvaluationConfig
    phases: Phases
    answers: HeldOutAnswers | None = None
    demonstrations: HeldOutDemonstrations | None = None
    pairs: HeldOutPairs | None = None

    def is_due(self, step: int, *, is_last: bool) -> bool:
        """Whether to evaluate after `step`; 0 is before the first."""
        return self.config.is_due(step, is_last=is_last)

    async def evaluate(self, step: int, version: PolicyVersion) -> EvalResult:
        """Grade what the engines serve: `version`, or later ones that are published meanwhile."""
        result = EvalResult(version=version, greedy=None, sampled=None)
        if self.answers is not None:
            result = await self.answers.evaluate(step)
        if self.demonstrations is not None:
            async with self.phases.comparing():
                result = replace(result, held_out_loss=await self.demonstrations.loss())
        if self.pairs is not None:
            async with self.phases.comparing():
                result = replace(result, held_out_pairs=await self.pairs.order())
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutAnswers:
    """Answers greedily, by sampling, or both; the same seeds each time, so that only learning makes a difference."""

    config: EvaluationConfig
    prompts: Sequence[Prompt]
    greedy: Answer | None
    """None where the configuration does not ask for it."""
    sampled: Answer | None
    write: WriteAnswers
    run_folder: Path

    async def evaluate(self, step: int) -> EvalResult:
        # One after the other: next to a greedy request SGLang draws the sampled ones of a batch by rank, not by token,
        # and the same seeds give other tokens.
        greedy = await self._answers(self.greedy)
        sampled = await self._answers(self.sampled)
        await self._write(step, greedy, sampled)
        versions = sorted(_versions([*greedy, *sampled]))
        right_from, sampling = self.config.right_from, self.config.sampled
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
            answering = [tasks.create_task(answer(prompt)) for prompt in self.prompts]
        return [task.result() for task in answering]

    async def _write(self, step: int, greedy: Sequence[ScoredGroup], sampled: Sequence[ScoredGroup]) -> None:
        answers = [
            answer
            for groups, is_greedy in ((greedy, True), (sampled, False))
            for scored in groups
            for answer in self._answers_of(scored, is_greedy=is_greedy)
        ]
        try:
            await self.write(generations_file(self.run_folder, step), answers)
        except (MachineError, WorkerError) as error:
            logger.warning("the generations of an evaluation are not written: %s", error)

    def _answers_of(self, scored: ScoredGroup, *, is_greedy: bool) -> Iterator[EvaluatedRollout]:
        prompt = scored.group.prompt
        for index, (rollout, score) in enumerate(zip(scored.group.rollouts, scored.scores, strict=True)):
            generation = Generation(
                prompt_uid=prompt.uid,
                data_source=prompt.data_source,
                is_greedy=is_greedy,
                index=index,
                is_right=is_right(score, right_from=self.config.right_from),
                score=score.value,
                components=score.components,
                prediction=score.prediction,
                ground_truth=prompt.ground_truth,
                finish_reason=rollout.finish_reason,
                num_tokens=rollout.num_tokens,
                images=tuple(image.digest for image in prompt.images),
                ending=None if rollout.episode.ending is None else rollout.episode.ending.value,
            )
            yield EvaluatedRollout(
                generation=generation,
                prompt_ids=with_short_images(prompt.token_ids, prompt.images),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutDemonstrations:
    prompts: Sequence[Prompt]
    generator: Generator
    """Turns a demonstration into a rollout."""
    logprobs: Callable[[Sequence[TrainSample]], Awaitable[tuple[FloatArray, ...]]]
    """Returns the trainer's log-probabilities of every token."""
    samples_per_call: int

    async def loss(self) -> float:
        """Return the mean over all imitated tokens, computed a step's worth of samples at a time."""
        total, num_tokens = 0.0, 0
        for start in range(0, len(self.prompts), self.samples_per_call):
            prompts = self.prompts[start : start + self.samples_per_call]
            samples = [await self._sample(prompt) for prompt in prompts]
            for sample, logprobs in zip(samples, await self.logprobs(samples), strict=True):
                imitated = logprobs[sample.rollout.loss_mask]
                total -= float(imitated.sum(dtype=np.float64))
                num_tokens += len(imitated)
        return total / num_tokens

    async def _sample(self, prompt: Prompt) -> TrainSample:
        (rollout,) = (await self.generator.generate(prompt)).rollouts
        nothing = np.zeros(0, np.float32)
        return TrainSample(prompt_ids=prompt.token_ids, images=prompt.images, rollout=rollout, advantages=nothing)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutPairs:
    prompts: Sequence[Prompt]
    answer: Answer
    """Turns a pair into a group of two."""
    estimate: Callable[[Sequence[ScoredGroup]], Awaitable[Estimates]]
    measure: Callable[[Sequence[ScoredGroup], Estimates], PreferenceStats | None]
    pairs_per_call: int

    async def order(self) -> PreferenceStats:
        """Return how the model orders the pairs, measured as in a step of training."""
        parts: list[PreferenceStats] = []
        for start in range(0, len(self.prompts), self.pairs_per_call):
            groups = [await self.answer(pair) for pair in self.prompts[start : start + self.pairs_per_call]]
            part = self.measure(groups, await self.estimate(groups))
            assert part is not None, "held-out answers without a pair"
            parts.append(part)
        return PreferenceStats.merge(parts)


def build_evaluation(
    recipe: Recipe,
    inputs: Inputs,
    workers: RolloutSource | None,
    models: ModelsTrainer,
    algorithm: AnyAlgorithm,
    *,
    phases: Phases,
    observer: Observer,
    saver: Saver,
    policy: str,
) -> Evaluation | None:
    """Return the evaluation of a run; None without held-out data, or where only engines could answer it."""
    config, samples_per_call = recipe.evaluation, recipe.train.prompts_per_step
    if config is None:
        return None
    evaluator = Evaluator(config=config, phases=phases)
    if inputs.eval and workers is not None:
        evaluator.answers = _held_out_answers(recipe, config, inputs, workers, policy)
    if inputs.eval_demonstrations:
        evaluator.demonstrations = HeldOutDemonstrations(
            prompts=inputs.eval_demonstrations,
            generator=Demonstrations(inputs.tokenizer),
            logprobs=models.logprobs,
            samples_per_call=samples_per_call,
        )
    if inputs.eval_pairs:
        # The first answer of a pair is the better one.
        pairs = Demonstrations(inputs.tokenizer, is_scored_at_end=recipe.algorithm.needs.is_scorer)
        evaluator.pairs = HeldOutPairs(
            prompts=inputs.eval_pairs,
            answer=GivenGroups(pairs, DemonstrationScorer((1.0, 0.0))).scored_group,
            estimate=models.estimate,
            measure=algorithm.measure,
            pairs_per_call=samples_per_call,
        )
    if not (evaluator.answers or evaluator.demonstrations or evaluator.pairs):
        return None
    return Evaluation(
        evaluator=evaluator,
        phases=phases,
        observer=observer,
        saver=saver,
        is_synchronous=recipe.train.max_staleness == 0,
    )


def _held_out_answers(
    recipe: Recipe, config: EvaluationConfig, inputs: Inputs, workers: RolloutSource, policy: str
) -> HeldOutAnswers:
    max_tokens = recipe.evaluation_response_tokens
    # A greedy request would change what the seeds of rollouts beside it mean.
    greedy = Sampling.nearly_greedy if recipe.train.max_staleness or policy else Sampling.greedy

    def sampled_with(sampling: Sampling) -> Answer:
        seed = evaluation_seed(recipe.run.seed)
        task = RolloutTask(sampling=sampling, seed=seed, policy=policy, in_flight=recipe.in_flight)

        async def answer(prompt: Prompt) -> ScoredGroup:
            return (await workers.answer(prompt, task)).scored

        return answer

    sampled = config.sampled
    return HeldOutAnswers(
        config=config,
        prompts=inputs.eval,
        greedy=sampled_with(greedy(max_response_tokens=max_tokens)) if config.is_greedy else None,
        sampled=None if sampled is None else sampled_with(Sampling.of(sampled, max_response_tokens=max_tokens)),
        write=_answer_writer(inputs, workers),
        run_folder=recipe.run_folder.absolute(),
    )


def _answer_writer(inputs: Inputs, workers: RolloutSource) -> WriteAnswers:
    """Return what writes answers for people, where their tokens are."""
    if isinstance(workers, RolloutWorkers):
        return workers.write_answers

    async def write(path: Path, answers: Sequence[EvaluatedRollout]) -> None:
        lines = (answer.line(inputs.tokenizer.decode) for answer in answers)
        await asyncio.to_thread(write_generations, path, lines)

    return write
