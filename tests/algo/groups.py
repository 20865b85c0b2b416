"""Scored groups for tests. The first token of every rollout is not from the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from megarl.tokens import Content
from megarl.types import FinishReason, Prompt, Rollout, RolloutGroup, Score, ScoredGroup


def scored_group(
    number: int,
    rewards: Sequence[float],
    *,
    components: Sequence[Mapping[str, float]] | None = None,
    lengths: Sequence[int] | None = None,
    cut: Sequence[int] = (),
) -> ScoredGroup:
    """Rollouts have 2, 3, 4 ... tokens by default; those in `cut` ended at the limit."""
    prompt = Prompt(
        uid=f"train.parquet:{number}",
        position=number,
        epoch=0,
        token_ids=np.array([number, number], dtype=np.int32),
        data_source="sums",
        ground_truth="",
        extra_info={},
    )
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
    return Rollout(
        content=Content(
            token_ids=np.arange(length, dtype=np.int32), logprobs=np.zeros(length, dtype=np.float32), text=""
        ),
        versions=np.zeros(length, dtype=np.int32),
        loss_mask=np.arange(length) > 0,
        finish_reason=finish_reason,
    )
