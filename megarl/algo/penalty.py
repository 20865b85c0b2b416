"""Penalties that lower rewards: of tokens far from the reference, and of responses near the limit of their length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from megarl.algo.advantage import Float64Array
from megarl.algo.loss import kl
from megarl.config.algorithm import AdaptiveKlConfig, KlRewardConfig
from megarl.tokens import RolloutSums, num_true
from megarl.types import BoolArray, Estimates, FloatArray, Rollout

_MAX_KL_ERROR = 0.2
"""The relative distance from the target counts as at most this, so that one step cannot throw the coefficient."""


class KlPenalty:
    """The KL to the reference, times a coefficient that may adapt to a target."""

    def __init__(self, config: KlRewardConfig, coef: float | None) -> None:
        """`coef` is the adaptive coefficient to resume from."""
        self.config = config
        self.coef = config.coef if coef is None else coef

    def of_tokens(self, estimates: Estimates, loss_masks: tuple[BoolArray, ...]) -> tuple[FloatArray, ...] | None:
        """Return the penalty of each token, B of [T_i]; adapt the coefficient for the next step."""
        if estimates.logprobs is None:
            return None
        assert estimates.reference_logprobs is not None, "a penalty without a reference"
        pairs = zip(estimates.logprobs, estimates.reference_logprobs, strict=True)
        distances = [
            kl(self.config.estimate, torch.from_numpy(policy), torch.from_numpy(reference)).numpy()
            for policy, reference in pairs
        ]
        penalties = tuple((self.coef * distance).astype(np.float32) for distance in distances)
        chosen = [distance[mask] for distance, mask in zip(distances, loss_masks, strict=True)]
        self._adapt([distance.mean(dtype=np.float64) for distance in chosen if len(distance)], len(chosen))
        return penalties

    def of_rollouts(self, sums: RolloutSums | None) -> Float64Array | None:
        """Return the penalty of each rollout, [B], from the sums of the ranks; adapt the coefficient."""
        if sums is None or sums.kl is None:
            return None
        penalties = self.coef * sums.kl
        chosen = sums.counts > 0
        self._adapt((sums.kl[chosen] / sums.counts[chosen]).tolist(), len(sums.kl))
        return penalties

    def _adapt(self, means: Sequence[float], num_sequences: int) -> None:
        """Adapt the coefficient to the mean of the sequences' means: one long rollout does not steer it."""
        if self.config.adaptive is not None:
            mean = float(np.mean(means or [0.0]))
            self.coef = adapted_kl_coef(self.coef, self.config.adaptive, kl=mean, num_sequences=num_sequences)


def adapted_kl_coef(coef: float, config: AdaptiveKlConfig, *, kl: float, num_sequences: int) -> float:
    """Return the next step's coefficient from this step's mean KL."""
    error = min(max(kl / config.target - 1, -_MAX_KL_ERROR), _MAX_KL_ERROR)
    return coef * (1 + error * num_sequences / config.horizon)


def length_penalty(
    lengths: npt.NDArray[np.int64], *, max_tokens: int, buffer_tokens: int, factor: float
) -> Float64Array:
    """[B], 0 up to `buffer_tokens` before the limit, then linear down to -factor at the limit."""
    excess = lengths - (max_tokens - buffer_tokens)
    penalty: Float64Array = np.minimum(0.0, -excess / buffer_tokens * factor)
    return penalty


def penalised_length(rollout: Rollout) -> int:
    """Return the length of a response; tokens that the environment of an episode wrote do not count."""
    return num_true(rollout.loss_mask) if rollout.episode.turns else rollout.num_tokens
