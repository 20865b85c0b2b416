"""How much better each rollout was than expected: one estimator per function, one `match` to choose.

Pure numpy over a whole step: no micro-batch, no rank, no torch. `algorithm` turns the result into train samples.
A new estimator is one function `Outcomes -> array` and one `case`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, assert_never

import numpy as np
import numpy.typing as npt

from megarl.types import BoolArray, FloatArray

EstimatorKind: TypeAlias = Literal["grpo"]

_EPS = 1e-6

# Sums over a step are taken in double precision; what travels on is float32.
_Wide: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """The rollouts of one step, in the order of their groups. B rollouts, rollout i has T_i tokens."""

    rewards: _Wide  # [B]
    groups: npt.NDArray[np.int64]  # [B], which group each rollout belongs to, 0 .. G-1
    loss_masks: tuple[BoolArray, ...]  # B of [T_i]

    def __post_init__(self) -> None:
        num_rollouts = len(self.rewards)
        assert len(self.groups) == num_rollouts, f"{len(self.groups)} group numbers, {num_rollouts} rewards"
        assert len(self.loss_masks) == num_rollouts, f"{len(self.loss_masks)} loss masks, {num_rollouts} rewards"
        assert np.isfinite(self.rewards).all(), f"rewards are not finite: {self.rewards}"


def estimate(kind: EstimatorKind, outcomes: Outcomes, *, normalize_std: bool = True) -> tuple[FloatArray, ...]:
    """The advantage of every token, B of [T_i]; 0 where the policy did not choose the token."""
    match kind:
        case "grpo":
            return _over_tokens(_grpo(outcomes, normalize_std=normalize_std), outcomes.loss_masks)
        case _:
            assert_never(kind)


def _grpo(outcomes: Outcomes, *, normalize_std: bool) -> _Wide:
    """(R - mean of its group) / (unbiased std of its group + eps); a group of one knows nothing and gets 0."""
    sizes = np.bincount(outcomes.groups)
    distances = outcomes.rewards - _group_means(outcomes.rewards, outcomes.groups)
    if not normalize_std:
        return distances
    variances = np.bincount(outcomes.groups, weights=distances**2) / np.maximum(sizes - 1, 1)
    return distances / (np.sqrt(variances)[outcomes.groups] + _EPS)


def _group_means(rewards: _Wide, groups: npt.NDArray[np.int64]) -> _Wide:
    """For each rollout, the mean reward of its group."""
    means: _Wide = np.bincount(groups, weights=rewards) / np.maximum(np.bincount(groups), 1)
    return means[groups]


def _over_tokens(per_rollout: _Wide, loss_masks: tuple[BoolArray, ...]) -> tuple[FloatArray, ...]:
    return tuple((mask * value).astype(np.float32) for value, mask in zip(per_rollout, loss_masks, strict=True))
