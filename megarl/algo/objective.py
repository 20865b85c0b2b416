"""The objectives of actor and critic: losses, correction, entropy bonus and KL, summed over a mini-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from megarl.algo.correction import weights
from megarl.algo.distillation import distil
from megarl.algo.loss import PolicyTokens, Segments, aggregate, kl, policy_loss, value_loss
from megarl.config.algorithm import AlgorithmConfig, KlLossConfig, PolicyGradientConfig, SftConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorLoss:
    """Loss of one micro-batch; the token columns are meaningful where the loss mask is set."""

    value: Tensor  # [], with gradient: this micro-batch's part of the mini-batch's loss
    is_clipped: Tensor  # [N]
    is_rejected: Tensor  # [N], True where the correction removed the token from the loss
    reference_kl: Tensor | None  # [N], detached; None if the loss has no such term
    teacher_kl: Tensor | None = None  # [N], detached; None without a teacher


def actor_loss(config: AlgorithmConfig, tokens: PolicyTokens, *, num_loss_tokens: int, num_sequences: int) -> ActorLoss:
    """Return the part of one micro-batch; the counts are those of its whole mini-batch."""
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
            return ActorLoss(value=value, is_clipped=none, is_rejected=none, reference_kl=None)
        case PolicyGradientConfig():
            return _policy_gradient(config, tokens, num_loss_tokens=num_loss_tokens, num_sequences=num_sequences)
        case _:
            assert_never(config)


def _policy_gradient(
    config: PolicyGradientConfig, tokens: PolicyTokens, *, num_loss_tokens: int, num_sequences: int
) -> ActorLoss:
    distillation = distil(config.distillation, tokens)
    loss = policy_loss(config.loss, distillation.tokens)
    values = loss.values
    is_rejected = torch.zeros_like(loss.is_clipped)
    if config.correction is not None:
        factors = weights(
            config.correction,
            old_logprobs=tokens.old_logprobs,
            rollout_logprobs=tokens.rollout_logprobs,
            segments=tokens.segments,
        )
        # Not a product outside the mask: a factor that is not finite there would reach the gradient.
        factors = torch.where(tokens.segments.loss_mask, factors, torch.zeros_like(factors))
        values = values * factors
        is_rejected = factors == 0
    if config.entropy_coef != 0:
        values = values - config.entropy_coef * tokens.entropy
    reference_kl = None
    if isinstance(config.kl, KlLossConfig):
        assert tokens.reference_logprobs is not None, "a KL term without a reference"
        distances = kl(config.kl.estimate, tokens.logprobs, tokens.reference_logprobs)
        values = values + config.kl.coef * distances
        reference_kl = distances.detach()
    if distillation.added is not None:
        values = values + distillation.added
    value = aggregate(
        config.aggregation,
        values,
        tokens.segments,
        num_loss_tokens=num_loss_tokens,
        num_sequences=num_sequences,
        horizon_tokens=config.horizon_tokens,
    )
    return ActorLoss(
        value=value,
        is_clipped=loss.is_clipped,
        is_rejected=is_rejected,
        reference_kl=reference_kl,
        teacher_kl=distillation.distances,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueTokens:
    """One micro-batch: the inputs of the critic's loss."""

    values: Tensor  # [N], with gradient
    old_values: Tensor  # [N], before the step's first update
    returns: Tensor  # [N]
    segments: Segments


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticLoss:
    value: Tensor  # [], with gradient: this micro-batch's part of the mini-batch's loss
    is_clipped: Tensor  # [N]


def critic_loss(
    config: PolicyGradientConfig, tokens: ValueTokens, *, clip: float, num_loss_tokens: int, num_sequences: int
) -> CriticLoss:
    """Return the part of one micro-batch, aggregated like the actor's loss."""
    losses = value_loss(tokens.values, tokens.old_values, tokens.returns, clip=clip)
    value = aggregate(
        config.aggregation,
        losses,
        tokens.segments,
        num_loss_tokens=num_loss_tokens,
        num_sequences=num_sequences,
        horizon_tokens=config.horizon_tokens,
    )
    errors = (tokens.values - tokens.returns).detach().square() / 2
    return CriticLoss(value=value, is_clipped=losses.detach() > errors)
