"""The numbers of one step, in one frozen value. Pure: from what the loop has in hand to what people watch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megarl.types import (
    DEMONSTRATION,
    CriticStats,
    FinishReason,
    PolicyVersion,
    ScoredGroup,
    UpdateResult,
    UpdateStats,
)

Phase = Literal["start", "generate", "assign", "update", "publish", "evaluate", "save"]
"""What a run spends its time on; one at a time, as the loop sees it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSummary:
    """The rollouts of one step, as the policy wrote them."""

    num_groups: int
    num_zero_signal_groups: int
    """Groups whose rollouts all have one score: they carry no advantage."""
    reward_mean: float
    reward_std: float
    component_means: Mapping[str, float]
    """Per component of the score; of the rollouts that have it."""
    response_tokens_mean: float
    response_tokens_max: int
    truncated_ratio: float
    """Share of rollouts that ended at the length limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    step: int
    """Counts from 1."""
    version: PolicyVersion
    update: UpdateStats | None
    """None where no update of the actor was applied."""
    critic: CriticStats | None
    num_skipped_updates: int
    kl_coef: float | None
    """What the distance from the reference costs from now on, where it costs anything."""
    rollouts: RolloutSummary | None
    """None where the step trained on demonstrations: nobody generated, nobody scored."""
    num_tokens: int
    """Prompt and response tokens of the step's groups."""
    seconds: float
    """From asking for the step's groups to publishing what they taught; an evaluation in between steps is not in it."""
    tokens_per_second: float


def summarize_step(
    *, step: int, groups: Sequence[ScoredGroup], update: UpdateResult, kl_coef: float | None, seconds: float
) -> StepSummary:
    num_tokens = sum(
        len(scored.group.prompt.token_ids) + len(rollout.token_ids)
        for scored in groups
        for rollout in scored.group.rollouts
    )
    return StepSummary(
        step=step,
        version=update.version,
        update=update.stats,
        critic=update.critic,
        num_skipped_updates=update.num_skipped_updates,
        kl_coef=kl_coef,
        rollouts=None if _are_demonstrations(groups) else _summarize_rollouts(groups),
        num_tokens=num_tokens,
        seconds=seconds,
        tokens_per_second=num_tokens / seconds if seconds > 0 else 0.0,
    )


def _are_demonstrations(groups: Sequence[ScoredGroup]) -> bool:
    return all(
        bool((rollout.versions == DEMONSTRATION).all()) for scored in groups for rollout in scored.group.rollouts
    )


def _summarize_rollouts(groups: Sequence[ScoredGroup]) -> RolloutSummary:
    rollouts = [rollout for scored in groups for rollout in scored.group.rollouts]
    scores = [score for scored in groups for score in scored.scores]
    rewards = np.array([score.value for score in scores], dtype=np.float64)
    lengths = np.array([len(rollout.token_ids) for rollout in rollouts])
    components: dict[str, list[float]] = {}
    for score in scores:
        for name, value in score.components.items():
            components.setdefault(name, []).append(value)
    return RolloutSummary(
        num_groups=len(groups),
        num_zero_signal_groups=sum(len({score.value for score in scored.scores}) == 1 for scored in groups),
        reward_mean=float(rewards.mean()),
        reward_std=float(rewards.std()),
        component_means={name: float(np.mean(values)) for name, values in sorted(components.items())},
        response_tokens_mean=float(lengths.mean()),
        response_tokens_max=int(lengths.max()),
        truncated_ratio=float(np.mean([rollout.finish_reason is FinishReason.LENGTH for rollout in rollouts])),
    )
