"""Mismatch between trainer and engine, which give the same token different probabilities, and its correction.

Weights are computed from the log-probabilities before the step's first update, so they stay fixed while the policy
changes. Rejected tokens still count in the loss's denominators, which are known before any forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, assert_never

import torch
from torch import Tensor

from megarl.algo.loss import MAX_LOG_RATIO, Segments, k3, kl
from megarl.config.algorithm import CorrectionConfig, IcepopConfig, MaskConfig, TisConfig

_Level: TypeAlias = Literal["token", "sequence"]

_ESS_MAX_WEIGHT = 2.0
"""Cut-off of the weights in the effective sample size: the same for every recipe, so that runs can be compared."""


@torch.no_grad()
def weights(config: CorrectionConfig, *, old_logprobs: Tensor, rollout_logprobs: Tensor, segments: Segments) -> Tensor:
    """Return the factor of each token's policy loss. [N]"""
    match config:
        case TisConfig():
            return _ratios(old_logprobs, rollout_logprobs, segments, config.level).clamp(max=config.max_weight)
        case IcepopConfig():
            ratios = _ratios(old_logprobs, rollout_logprobs, segments, config.level)
            is_kept = (ratios >= config.min_weight) & (ratios <= config.max_weight)
            return torch.where(is_kept, ratios, torch.zeros_like(ratios))
        case MaskConfig():
            log_ratios = rollout_logprobs - old_logprobs
            is_k3 = config.measure == "k3"
            measures = k3(log_ratios) if is_k3 else kl(config.measure, rollout_logprobs, old_logprobs)
            return _mask(config, measures, segments)
        case _:
            assert_never(config)


def _ratios(old_logprobs: Tensor, rollout_logprobs: Tensor, segments: Segments, level: _Level) -> Tensor:
    """p_train / p_rollout of the token, or of all tokens that the policy chose in its sequence. [N]"""
    log_ratios = old_logprobs - rollout_logprobs
    if level == "sequence":
        log_ratios = segments.spread(segments.sums(log_ratios))
    return log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _mask(config: MaskConfig, measures: Tensor, segments: Segments) -> Tensor:
    if config.level == "sequence":
        measures = segments.spread(segments.means(measures))
    is_kept = measures <= config.highest
    if config.lowest is not None:
        is_kept &= measures >= config.lowest
    return is_kept.to(measures.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Mismatch per token, [N] each; the means over loss tokens are statistics of an update."""

    distance: Tensor
    """|p_train - p_rollout|"""
    kl: Tensor
    """log(p_rollout / p_train), whose mean is KL(rollout || train)."""
    k3: Tensor
    """Estimate k3 of the same KL, never negative."""
    chi2: Tensor
    """The squared ratio p_train / p_rollout, minus 1."""
    weight: Tensor
    """The ratio, cut off; (sum)^2 / (n * sum of squares) is the effective sample size as a share of n."""


@torch.no_grad()
def mismatch(old_logprobs: Tensor, rollout_logprobs: Tensor) -> Mismatch:
    old, rollout = old_logprobs.double(), rollout_logprobs.double()
    ratios = (old - rollout).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return Mismatch(
        distance=(old.exp() - rollout.exp()).abs(),
        kl=kl("k1", rollout, old),
        k3=k3(rollout - old),
        chi2=ratios.square() - 1,
        weight=ratios.clamp(max=_ESS_MAX_WEIGHT),
    )
