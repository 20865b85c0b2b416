"""The outcomes of a step's rollouts, and their advantages by GRPO: how much better each was than its group.

Pure numpy over a whole step: no micro-batch, no rank, no torch. The other estimators are in `estimators.py`,
`token_credit.py` and `pairs.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from megarl.algo.early_rewards import rewards_by_token, without_earlier
from megarl.tokens import is_repeated, num_true, repeated
from megarl.types import BoolArray, FloatArray, Rollout, Score, ScoredGroup

EPS = 1e-6
"""Added to the standard deviation of a group, which may be 0."""

# Sums over a step are taken in double precision.
Float64Array: TypeAlias = npt.NDArray[np.float64]
Groups: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """The rollouts of one step, in the order of their groups. B rollouts, rollout i has T_i tokens."""

    rewards: Float64Array  # [B]
    groups: Groups  # [B], each rollout's group, 0 .. G-1
    loss_masks: tuple[BoolArray, ...]  # B of [T_i]
    components: Mapping[str, Float64Array] = field(default_factory=dict)  # [B] each; `gdpo` uses them
    baselines: Float64Array | None = None  # [B], reward of a greedy rollout of the same prompt, for `remax`
    penalties: tuple[FloatArray, ...] | None = None  # B of [T_i], subtracted from the reward per token
    penalty_sums: Float64Array | None = None  # [B], instead of `penalties` where their tokens are elsewhere
    values: tuple[FloatArray, ...] | None = None  # B of [T_i], the critic's estimates, for `gae`
    are_right: BoolArray | None = None  # [B], by the score alone, for `prime`
    implicit: Float64Array | None = None  # [B], the rewards by which a preference algorithm compares pairs
    earlier_rewards: tuple[Mapping[int, float], ...] | None = None
    """Per rollout the parts of its reward that came earlier than at its end, by the token that they are credited to."""

    def __post_init__(self) -> None:
        num_rollouts = len(self.rewards)
        assert len(self.groups) == num_rollouts, f"{len(self.groups)} group numbers, {num_rollouts} rewards"
        assert len(self.loss_masks) == num_rollouts, f"{len(self.loss_masks)} loss masks, {num_rollouts} rewards"
        assert np.isfinite(self.rewards).all(), f"rewards are not finite: {self.rewards}"
        assert np.bincount(self.groups).all(), f"a group has no rollouts: {self.groups}"

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """[B], tokens the policy chose."""
        return np.array([num_true(mask) for mask in self.loss_masks], dtype=np.int64)

    @property
    def totals(self) -> Float64Array:
        """[B], each reward less all penalties of its tokens."""
        if self.penalty_sums is not None:
            return np.subtract(self.rewards, self.penalty_sums)
        if self.penalties is None:
            return self.rewards
        pairs = zip(self.penalties, self.loss_masks, strict=True)
        return np.subtract(self.rewards, [penalty[mask].sum(dtype=np.float64) for penalty, mask in pairs])


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """B of [T_i] each, 0 where the policy did not choose the token."""

    advantages: tuple[FloatArray, ...]
    returns: tuple[FloatArray, ...] | None = None
    """Targets of the critic; None without one."""


def grpo_credit(outcomes: Outcomes, *, normalize_std: bool) -> Credit:
    """Return the credit of every token: the distance of its rollout's reward from the mean of the group."""
    per_rollout = grpo(outcomes.totals, outcomes.groups, normalize_std=normalize_std)
    credit = over_tokens(per_rollout, outcomes.loss_masks)
    if outcomes.earlier_rewards is None:
        return credit
    scales = grpo_scales(outcomes.totals, outcomes.groups, normalize_std=normalize_std)
    advantages = without_earlier(credit.advantages, scales, outcomes.earlier_rewards, outcomes.loss_masks)
    return Credit(advantages=advantages)


def grpo(rewards: Float64Array, groups: Groups, *, normalize_std: bool) -> Float64Array:
    """(R - mean of its group) / (unbiased std of its group + eps); 0 in a group of one."""
    distances = from_mean(rewards, groups)
    return distances / (group_std(rewards, groups)[groups] + EPS) if normalize_std else distances


def grpo_scales(rewards: Float64Array, groups: Groups, *, normalize_std: bool) -> Float64Array:
    """[B], by how much the advantage of `grpo` grows with the reward; 0 in groups that have no signal."""
    if not normalize_std:
        return has_others(groups)
    stds = group_std(rewards, groups)[groups]
    return np.where(stds > EPS, has_others(groups) / (stds + EPS), 0.0)


def has_others(groups: Groups) -> Float64Array:
    """[B], 1 where a rollout can be compared with others of its group, else 0."""
    return (np.bincount(groups)[groups] > 1).astype(np.float64)


def from_mean(rewards: Float64Array, groups: Groups) -> Float64Array:
    """[B], each reward less the mean of its group."""
    means: Float64Array = np.bincount(groups, weights=rewards) / np.bincount(groups)
    return rewards - means[groups]


def group_std(rewards: Float64Array, groups: Groups) -> Float64Array:
    """[G], unbiased; 0 for a group of one."""
    squares = np.bincount(groups, weights=from_mean(rewards, groups) ** 2)
    std: Float64Array = np.sqrt(squares / np.maximum(np.bincount(groups) - 1, 1))
    return std


def over_tokens(per_rollout: Float64Array, loss_masks: tuple[BoolArray, ...]) -> Credit:
    """Give every token the policy chose the advantage of its rollout."""
    pairs = zip(per_rollout.astype(np.float32), loss_masks, strict=True)
    return Credit(
        advantages=tuple(
            # One number in memory, however many tokens have it.
            repeated(value * mask[0], len(mask)) if is_repeated(mask) else np.multiply(mask, value)
            for value, mask in pairs
        )
    )


def sum_of_parts(rollout: Rollout, score: Score) -> float:
    """Return the sum of the rewards of turns and tokens, which come beside the score's value."""
    if not has_parts(rollout, score):
        return 0.0
    return sum(turn.reward for turn in rollout.episode.turns) + sum(score.tokens or ())


def has_parts(rollout: Rollout, score: Score) -> bool:
    """Whether turns or tokens have rewards of their own."""
    return bool(rollout.episode.turns) or score.tokens is not None


def earlier_rewards(groups: Sequence[ScoredGroup]) -> tuple[dict[int, float], ...] | None:
    """Return the rewards of turns, by the last token of each, and of tokens; None where no rollout has any."""
    rewards = tuple(
        rewards_by_token(rollout, score, scored.group.prompt.uid) if has_parts(rollout, score) else {}
        for scored in groups
        for rollout, score in zip(scored.group.rollouts, scored.scores, strict=True)
    )
    return rewards if any(rewards) else None
