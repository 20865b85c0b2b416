"""Builds the evaluations of a loop, and writes rollouts for people where their tokens are."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.algo.algorithm import PolicyGradient, Sft
from megarl.config.recipe import EvaluationConfig, Recipe
from megarl.data.prompts import Demonstrations, DemonstrationScorer
from megarl.data.rollout_files import FiledRollout, write_rollouts
from megarl.observe.observer import Observer
from megarl.ranks.trainer import ModelsTrainer
from megarl.rollout.generator import Sampling, evaluation_seed
from megarl.rollout.groups import GivenGroups
from megarl.rollout.worker import RolloutSource, RolloutTask
from megarl.rollout.workers import RolloutWorkers
from megarl.run.evaluate import Answer, Evaluation, Evaluator, HeldOutEvaluator, NoEvaluation, ScheduledEvaluation
from megarl.run.held_out_loss import DemonstrationEvaluator, PairEvaluator
from megarl.run.inputs import Inputs
from megarl.run.saver import Saver
from megarl.stages import Phases
from megarl.types import Prompt, ScoredGroup


@dataclass(frozen=True, kw_only=True)
class RolloutWriter:
    """Writes files of rollouts, where their tokens are."""

    inputs: Inputs
    workers: RolloutSource | None

    async def write(self, path: Path, rollouts: Sequence[FiledRollout]) -> None:
        if isinstance(self.workers, RolloutWorkers):
            return await self.workers.write(path, rollouts)
        return await asyncio.to_thread(write_rollouts, path, rollouts, decode=self.inputs.tokenizer.decode)


def build_evaluation(
    recipe: Recipe,
    inputs: Inputs,
    workers: RolloutSource | None,
    models: ModelsTrainer,
    algorithm: Sft | PolicyGradient,
    *,
    phases: Phases,
    observer: Observer,
    saver: Saver,
) -> Evaluation:
    config = recipe.evaluation
    if config is None:
        return NoEvaluation()
    evaluator = _held_out_evaluator(recipe, config, inputs, workers) if inputs.eval and workers is not None else None
    if inputs.eval_demonstrations:
        evaluator = DemonstrationEvaluator(
            config,
            demonstrations=inputs.eval_demonstrations,
            answers=evaluator,
            generator=Demonstrations(inputs.tokenizer),
            logprobs=models.logprobs,
            phases=phases,
            samples_per_call=recipe.train.prompts_per_step,
        )
    if inputs.eval_pairs:
        # The first answer of a pair is the better one.
        pairs = Demonstrations(inputs.tokenizer, is_scored_at_end=recipe.algorithm.needs.is_scorer)
        evaluator = PairEvaluator(
            config,
            pairs=inputs.eval_pairs,
            answers=evaluator,
            answer=GivenGroups(pairs, DemonstrationScorer((1.0, 0.0))).scored_group,
            estimate=models.estimate,
            measure=algorithm.measure,
            phases=phases,
            pairs_per_call=recipe.train.prompts_per_step,
        )
    if evaluator is None:
        return NoEvaluation()
    is_synchronous = recipe.train.max_staleness == 0
    return ScheduledEvaluation(evaluator, phases=phases, observer=observer, saver=saver, is_synchronous=is_synchronous)


def _held_out_evaluator(recipe: Recipe, config: EvaluationConfig, inputs: Inputs, workers: RolloutSource) -> Evaluator:
    max_tokens = recipe.evaluation_response_tokens
    # A greedy request would change what the seeds of rollouts beside it mean.
    greedy = Sampling.nearly_greedy if recipe.train.max_staleness else Sampling.greedy

    def sampled_with(sampling: Sampling) -> Answer:
        task = RolloutTask(sampling=sampling, seed=evaluation_seed(recipe.run.seed), in_flight=recipe.in_flight)

        async def answer(prompt: Prompt) -> ScoredGroup:
            return (await workers.answer(prompt, task)).scored

        return answer

    sampled = config.sampled
    return HeldOutEvaluator(
        config,
        prompts=inputs.eval,
        greedy=sampled_with(greedy(max_response_tokens=max_tokens)) if config.is_greedy else None,
        sampled=None if sampled is None else sampled_with(Sampling.of(sampled, max_response_tokens=max_tokens)),
        write=RolloutWriter(inputs=inputs, workers=workers).write,
        run_folder=recipe.run_folder.absolute(),
    )
