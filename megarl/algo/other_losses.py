"""Losses other than PPO's: of the policy, by the kind in the recipe, and of the critic. Pure torch.

A new loss of the policy is a function here and a `case` of `other_loss`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from megarl.algo.loss import PolicyTokens, Segments, TokenLoss, aggregate, clipped_loss, log_ratios, unclipped_loss
from megarl.config.algorithm import (
    AlgorithmConfig,
    CispoLossConfig,
    FunctionLossConfig,
    GmpoLossConfig,
    GpgLossConfig,
    GspoLossConfig,
    SapoLossConfig,
    SppoLossConfig,
)
from megarl.errors import DataError
from megarl.system.user_code import load_code


def other_loss(
    config: GspoLossConfig
    | CispoLossConfig
    | GpgLossConfig
    | SapoLossConfig
    | GmpoLossConfig
    | SppoLossConfig
    | FunctionLossConfig,
    tokens: PolicyTokens,
) -> TokenLoss:
    """Return the loss of each token, as the recipe's section defines it."""
    match config:
        case GspoLossConfig():
            return _gspo(config, tokens)
        case CispoLossConfig():
            return _cispo(config, tokens)
        case GpgLossConfig():
            return unclipped_loss(-tokens.advantages * tokens.logprobs)
        case SapoLossConfig():
            return _sapo(config, tokens)
        case GmpoLossConfig():
            return _gmpo(config, tokens)
        case SppoLossConfig():
            return _sppo(tokens)
        case FunctionLossConfig():
            return _own_loss(config, tokens)
        case _:
            assert_never(config)


def _gspo(config: GspoLossConfig, tokens: PolicyTokens) -> TokenLoss:
    """PPO with the sequence's ratio in place of each token's; the gradient is that of the token's log-probability."""
    of_sequence = tokens.segments.spread(tokens.segments.means(log_ratios(tokens).detach()))
    ratios = (tokens.logprobs - tokens.logprobs.detach() + of_sequence).exp()
    return clipped_loss(tokens.advantages, ratios, low=config.clip_low, high=config.clip_high)


def _cispo(config: CispoLossConfig, tokens: PolicyTokens) -> TokenLoss:
    """The policy gradient weighted by the clipped ratio: clipped tokens keep a gradient."""
    ratios = log_ratios(tokens).detach().exp()
    weights = ratios.clamp(1 - config.clip_low, 1 + config.clip_high)
    return TokenLoss(values=-weights * tokens.advantages * tokens.logprobs, is_clipped=weights != ratios)


def _sapo(config: SapoLossConfig, tokens: PolicyTokens) -> TokenLoss:
    """A sigmoid of the ratio, of slope 1 at ratio 1, in place of the clip."""
    taus = torch.where(tokens.advantages > 0, config.tau_positive, config.tau_negative)
    gates = (4 / taus) * torch.sigmoid(taus * (log_ratios(tokens).exp() - 1))
    return unclipped_loss(-tokens.advantages * gates)


def _gmpo(config: GmpoLossConfig, tokens: PolicyTokens) -> TokenLoss:
    """-A * geometric mean of the ratios, each clipped on the side to which the advantage pushes it."""
    free = log_ratios(tokens)
    clipped = torch.where(tokens.advantages > 0, free.clamp(max=config.clip_high), free.clamp(min=-config.clip_low))
    segments = tokens.segments
    values = -segments.means(tokens.advantages) * segments.means(clipped).exp()
    return TokenLoss(values=segments.spread(values), is_clipped=clipped != free)


def _sppo(tokens: PolicyTokens) -> TokenLoss:
    """Return (log-ratio of the sequence - its advantage)^2, the same for all tokens of a sequence."""
    segments = tokens.segments
    of_sequence = segments.sums(tokens.logprobs - tokens.old_logprobs)
    return unclipped_loss(segments.spread((of_sequence - segments.means(tokens.advantages)).square()))


def _own_loss(config: FunctionLossConfig, tokens: PolicyTokens) -> TokenLoss:
    loss = load_code(config.code, key="algorithm.loss.code")(tokens)
    if isinstance(loss, Tensor):
        loss = unclipped_loss(loss)
    if not isinstance(loss, TokenLoss) or loss.values.shape != tokens.logprobs.shape:
        shape = tuple(loss.values.shape) if isinstance(loss, TokenLoss) else type(loss).__name__
        raise DataError(
            f"algorithm.loss.code: {config.code} returned {shape}; it must be one loss per token, "
            f"{tuple(tokens.logprobs.shape)}"
        )
    return loss


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
    config: AlgorithmConfig, tokens: ValueTokens, *, clip: float, num_loss_tokens: int, num_sequences: int
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


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> Tensor:
    """Half the squared error, the larger of that of the values and of the values clipped around the old ones. [N]"""
    near = old_values + (values - old_values).clamp(-clip, clip)
    return torch.maximum((values - returns).square(), (near - returns).square()) / 2
