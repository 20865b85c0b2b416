"""Correction of the policy loss for tokens whose probability differs between trainer and engine. Pure torch."""

from __future__ import annotations

from typing import Literal, TypeAlias, assert_never

import torch
from torch import Tensor

from megarl.algo.loss import MAX_LOG_RATIO, Segments, k3, kl
from megarl.config.algorithm import CorrectionConfig, IcepopConfig, MaskConfig, TisConfig

_Level: TypeAlias = Literal["token", "sequence"]


@torch.no_grad()
def correction_weights(
    config: CorrectionConfig, *, old_logprobs: Tensor, rollout_logprobs: Tensor, segments: Segments
) -> Tensor:
    """Return the factor of each token's policy loss. [N]"""
    match config:
        case TisConfig():
            return _ratios(old_logprobs, rollout_logprobs, segments, config.level).clamp(max=config.max_weight)
        case IcepopConfig():
            ratios = _ratios(old_logprobs, rollout_logprobs, segments, config.level)
            is_inside = (ratios >= config.min_weight) & (ratios <= config.max_weight)
            return torch.where(is_inside, ratios, torch.zeros_like(ratios))
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
    is_inside = measures <= config.highest
    if config.lowest is not None:
        is_inside &= measures >= config.lowest
    return is_inside.to(measures.dtype)
