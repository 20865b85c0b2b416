"""The greedy baseline of every group, for algorithms that compare with it (ReMax)."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import TypeVar

from megarl.stages import Generator, Scorer
from megarl.types import Prompt, RolloutGroup, ScoredGroup

_First = TypeVar("_First")
_Second = TypeVar("_Second")


class WithGreedyRollout:
    """A `stages.Generator` that adds a greedy rollout to every group as its baseline."""

    def __init__(self, sampled: Generator, greedy: Generator) -> None:
        self._sampled = sampled
        self._greedy = greedy

    async def generate(self, prompt: Prompt) -> RolloutGroup:
        group, greedy = await _both(self._sampled.generate(prompt), self._greedy.generate(prompt))
        (baseline,) = greedy.rollouts
        return replace(group, baseline=baseline)


class WithGreedyScore:
    """A `stages.Scorer` that also scores the baseline of every group."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer

    async def score(self, group: RolloutGroup) -> ScoredGroup:
        assert group.baseline is not None, f"prompt {group.prompt.uid} has no greedy rollout"
        alone = RolloutGroup(prompt=group.prompt, rollouts=(group.baseline,))
        scored, of_baseline = await _both(self._scorer.score(group), self._scorer.score(alone))
        (baseline,) = of_baseline.scores
        return replace(scored, baseline=baseline)


async def _both(
    first: Coroutine[object, object, _First], second: Coroutine[object, object, _Second]
) -> tuple[_First, _Second]:
    """Run both concurrently; the error of one cancels the other."""
    tasks = asyncio.ensure_future(first), asyncio.ensure_future(second)
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
