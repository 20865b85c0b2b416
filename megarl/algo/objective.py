"""What the actor minimises: policy loss, correction, entropy bonus, and their sum over a mini-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from megarl.algo.correction import weights
from megarl.algo.loss import PolicyTokens, aggregate, policy_loss
from megarl.config.algorithm import AlgorithmConfig, PolicyGradientConfig, SftConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorLoss:
    """Of one micro-batch; the token columns are meaningful where the loss mask is set."""

    value: Tensor  # [], with its gradient: this micro-batch's part of the mini-batch's loss
    is_clipped: Tensor  # [N]
    is_rejected: Tensor  # [N], True where the correction took the token out of the loss


def actor_loss(config: AlgorithmConfig, tokens: PolicyTokens, *, num_loss_tokens: int, num_sequences: int) -> ActorLoss:
    """The part of one micro-batch; the counts are those of its whole mini-batch."""
    match config:
        case SftConfig():
            none = torch.zeros_like(tokens.segments.loss_mask)
            value = aggregate(
                "token_mean",
                -tokens.logprobs,
                tokens.segments,
                num_loss_tokens=num_loss_tokens,
                num_sequences=num_sequences,
            )
            return ActorLoss(value=value, is_clipped=none, is_rejected=none)
        case PolicyGradientConfig():
            return _policy_gradient(config, tokens, num_loss_tokens=num_loss_tokens, num_sequences=num_sequences)
        case _:
            assert_never(config)


def _policy_gradient(
    config: PolicyGradientConfig, tokens: PolicyTokens, *, num_loss_tokens: int, num_sequences: int
) -> ActorLoss:
    loss = policy_loss(config.loss, tokens)
    values = loss.values
    is_rejected = torch.zeros_like(loss.is_clipped)
    if config.correction is not None:
        factors = weights(
            config.correction,
            old_logprobs=tokens.old_logprobs,
            rollout_logprobs=tokens.rollout_logprobs,
            segments=tokens.segments,
        )
        values = values * factors
        is_rejected = factors == 0
    if config.entropy_coef != 0:
        values = values - config.entropy_coef * tokens.entropy
    value = aggregate(
        config.aggregation,
        values,
        tokens.segments,
        num_loss_tokens=num_loss_tokens,
        num_sequences=num_sequences,
        horizon_tokens=config.horizon_tokens,
    )
    return ActorLoss(value=value, is_clipped=loss.is_clipped, is_rejected=is_rejected)
