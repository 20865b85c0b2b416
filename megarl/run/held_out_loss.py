"""Evaluations that the trainer computes: the loss of held-out demonstrations, and the order of held-out pairs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import numpy as np

from megarl.config.recipe import EvaluationConfig
from megarl.results import EvalResult, PreferenceStats
from megarl.run.evaluate import Answer, Evaluator
from megarl.stages import Generator, Phases
from megarl.types import Estimates, FloatArray, PolicyVersion, Prompt, ScoredGroup, TrainSample


class DemonstrationEvaluator:
    """An `Evaluator` that adds the loss of held-out demonstrations to the grades of answers, if there are any."""

    def __init__(
        self,
        config: EvaluationConfig,
        *,
        demonstrations: Sequence[Prompt],
        answers: Evaluator | None,
        generator: Generator,
        logprobs: Callable[[Sequence[TrainSample]], Awaitable[tuple[FloatArray, ...]]],
        phases: Phases,
        samples_per_call: int,
    ) -> None:
        """`generator` turns a demonstration into a rollout; `logprobs` are the trainer's, of every token of it."""
        assert demonstrations, "a loss needs demonstrations"
        self._config = config
        self._demonstrations = demonstrations
        self._answers = answers
        self._generator = generator
        self._logprobs = logprobs
        self._phases = phases
        self._samples_per_call = samples_per_call

    def is_due(self, step: int, *, is_last: bool) -> bool:
        return self._config.is_due(step, is_last=is_last)

    async def evaluate(self, step: int, version: PolicyVersion) -> EvalResult:
        result = EvalResult(version=version, greedy=None, sampled=None)
        if self._answers is not None:
            result = await self._answers.evaluate(step, version)
        async with self._phases.comparing():
            return replace(result, held_out_loss=await self._loss())

    async def _loss(self) -> float:
        """Return the mean over all imitated tokens, computed a step's worth of samples at a time."""
        total, num_tokens = 0.0, 0
        for start in range(0, len(self._demonstrations), self._samples_per_call):
            prompts = self._demonstrations[start : start + self._samples_per_call]
            samples = [await self._sample(prompt) for prompt in prompts]
            for sample, logprobs in zip(samples, await self._logprobs(samples), strict=True):
                imitated = logprobs[sample.rollout.loss_mask]
                total -= float(imitated.sum(dtype=np.float64))
                num_tokens += len(imitated)
        return total / num_tokens

    async def _sample(self, prompt: Prompt) -> TrainSample:
        (rollout,) = (await self._generator.generate(prompt)).rollouts
        nothing = np.zeros(0, np.float32)
        return TrainSample(prompt_ids=prompt.token_ids, rollout=rollout, advantages=nothing)


class PairEvaluator:
    """An `Evaluator` that adds how the model orders held-out pairs to the grades of answers, if there are any."""

    def __init__(
        self,
        config: EvaluationConfig,
        *,
        pairs: Sequence[Prompt],
        answers: Evaluator | None,
        answer: Answer,
        estimate: Callable[[Sequence[ScoredGroup]], Awaitable[Estimates]],
        measure: Callable[[Sequence[ScoredGroup], Estimates], PreferenceStats | None],
        phases: Phases,
        pairs_per_call: int,
    ) -> None:
        """`answer` turns a pair into a group of two; `estimate` and `measure` are those of a step of training."""
        self._config = config
        self._pairs = pairs
        self._answers = answers
        self._answer = answer
        self._estimate = estimate
        self._measure = measure
        self._phases = phases
        self._pairs_per_call = pairs_per_call

    def is_due(self, step: int, *, is_last: bool) -> bool:
        return self._config.is_due(step, is_last=is_last)

    async def evaluate(self, step: int, version: PolicyVersion) -> EvalResult:
        result = EvalResult(version=version, greedy=None, sampled=None)
        if self._answers is not None:
            result = await self._answers.evaluate(step, version)
        parts: list[PreferenceStats] = []
        async with self._phases.comparing():
            for start in range(0, len(self._pairs), self._pairs_per_call):
                chosen = self._pairs[start : start + self._pairs_per_call]
                groups = [await self._answer(pair) for pair in chosen]
                part = self._measure(groups, await self._estimate(groups))
                assert part is not None, "held-out answers without a pair"
                parts.append(part)
        return replace(result, held_out_pairs=PreferenceStats.merge(parts))
