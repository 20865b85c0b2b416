"""Greedy answers to held-out prompts, scored as the rollouts are."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from megarl.stages import Generator, Scorer
from megarl.types import EvalResult, PolicyVersion, Prompt, ScoredGroup


class Evaluator(Protocol):
    def is_due(self, step: int, *, is_last: bool) -> bool: ...

    async def evaluate(self, version: PolicyVersion) -> EvalResult | None: ...


class NoEvaluator:
    """For runs without held-out prompts or without engines."""

    def is_due(self, step: int, *, is_last: bool) -> bool:
        return False

    async def evaluate(self, version: PolicyVersion) -> EvalResult | None:
        return None


class GreedyEvaluator:
    def __init__(
        self, *, prompts: Sequence[Prompt], generator: Generator, scorer: Scorer, every_steps: int | None
    ) -> None:
        assert prompts, "an evaluation needs prompts"
        self._prompts = prompts
        self._generator = generator
        self._scorer = scorer
        self._every_steps = every_steps

    def is_due(self, step: int, *, is_last: bool) -> bool:
        return is_last or (self._every_steps is not None and step % self._every_steps == 0)

    async def evaluate(self, version: PolicyVersion) -> EvalResult | None:
        scored = await asyncio.gather(*(self._answer(prompt) for prompt in self._prompts))
        by_source: dict[str, list[float]] = {}
        for group in scored:
            by_source.setdefault(group.group.prompt.data_source, []).append(group.scores[0].value)
        return EvalResult(
            version=version,
            num_prompts=len(scored),
            accuracy=float(np.mean([group.scores[0].value for group in scored])),
            by_source={source: float(np.mean(values)) for source, values in sorted(by_source.items())},
        )

    async def _answer(self, prompt: Prompt) -> ScoredGroup:
        return await self._scorer.score(await self._generator.generate(prompt))
