"""What is minimised: per-token losses and their sum over global denominators. Pure torch, no ranks, no devices.

Every function sees one micro-batch. None of them counts tokens itself: the denominators are those of the whole
mini-batch, so the sum over micro-batches and ranks is the loss, however the tokens were split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from megarl.config.algorithm import AlgorithmConfig, GrpoConfig, SftConfig

_MAX_LOG_RATIO = 20.0
"""Bound on the exponent of a probability ratio: beyond it the ratio overflows and says nothing more."""

_MAX_K3 = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTokens:
    """One micro-batch as a loss sees it."""

    logprobs: Tensor  # [N], of the policy being updated, with its gradient
    entropy: Tensor  # [N], likewise
    old_logprobs: Tensor  # [N], of the policy before the step's first update
    advantages: Tensor  # [N]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """Meaningful where the loss mask is set."""

    values: Tensor  # [N]
    is_clipped: Tensor  # [N], True where the clip and not the policy set the value


def policy_loss(config: AlgorithmConfig, tokens: PolicyTokens) -> TokenLoss:
    """The loss of each token under the recipe's algorithm."""
    match config:
        case SftConfig():
            return TokenLoss(values=-tokens.logprobs, is_clipped=torch.zeros_like(tokens.logprobs, dtype=torch.bool))
        case GrpoConfig():
            loss = ppo_loss(tokens, clip_low=config.clip_low, clip_high=config.clip_high, clip_dual=config.clip_dual)
            if config.entropy_coef == 0:
                return loss
            return TokenLoss(values=loss.values - config.entropy_coef * tokens.entropy, is_clipped=loss.is_clipped)
        case _:
            assert_never(config)


def ppo_loss(tokens: PolicyTokens, *, clip_low: float, clip_high: float, clip_dual: float) -> TokenLoss:
    """PPO with the dual clip: where the advantage is negative the loss is bounded by `-advantage * clip_dual`."""
    log_ratio = (tokens.logprobs - tokens.old_logprobs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    free = -tokens.advantages * ratio
    clipped = -tokens.advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    single = torch.maximum(free, clipped)
    bound = -tokens.advantages * clip_dual
    is_bounded = (tokens.advantages < 0) & (single > bound)
    return TokenLoss(
        values=torch.where(is_bounded, bound, single),
        is_clipped=(clipped > free) | is_bounded,
    )


def token_mean(values: Tensor, loss_mask: Tensor, *, num_loss_tokens: int) -> Tensor:
    """This micro-batch's part of the mean over all loss tokens of the mini-batch."""
    return masked_sum(values, loss_mask) / max(num_loss_tokens, 1)


def masked_sum(values: Tensor, loss_mask: Tensor) -> Tensor:
    # `where`, not a product: zero times a value that is not finite would spread it.
    return torch.where(loss_mask, values, torch.zeros_like(values)).sum()


def kl_k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Unbiased, never negative estimate of KL(policy || reference) at tokens the policy chose. [N]"""
    delta = (reference_logprobs - logprobs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return (delta.exp() - delta - 1).clamp(max=_MAX_K3)
