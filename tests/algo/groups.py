"""Scored groups for tests. The first token of every rollout is not from the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from megarl.types import FinishReason, Rollout, RolloutGroup, Score, ScoredGroup
from tests.values import make_prompt, make_rollout


def scored_group(
    number: int,
    rewards: Sequence[float],
    *,
    components: Sequence[Mapping[str, float]] | None = None,
    lengths: Sequence[int] | None = None,
    cut: Sequence[int] = (),
) -> ScoredGroup:
    """Rollouts have 2, 3, 4 ... tokens by default; those in `cut` ended at the limit."""
    prompt = make_prompt(number, token_ids=[number, number])
    rollouts = tuple(
        _rollout(length, FinishReason.LENGTH if place in cut else FinishReason.STOP)
        for place, length in enumerate(lengths or range(2, len(rewards) + 2))
    )
    scores = tuple(
        Score(value=reward, components=parts)
        for reward, parts in zip(rewards, components or [{}] * len(rewards), strict=True)
    )
    return ScoredGroup(group=RolloutGroup(prompt=prompt, rollouts=rollouts), scores=scores)


def with_baseline(group: ScoredGroup, *, score: float, length: int) -> ScoredGroup:
    return replace(
        group,
        group=replace(group.group, baseline=_rollout(length, FinishReason.STOP)),
        baseline=Score(value=score, components={}),
    )


def _rollout(length: int, finish_reason: FinishReason) -> Rollout:
    return make_rollout(range(length), loss_mask=np.arange(length) > 0, finish_reason=finish_reason)
