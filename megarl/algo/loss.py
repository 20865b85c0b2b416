"""PPO's loss per token, estimates of KL, and the aggregation to one number. Pure torch, no ranks, no devices.

Every function sees one micro-batch and divides by the counts of the whole mini-batch: the sum over micro-batches and
ranks is the loss, however the sequences were split. The other losses are in `other_losses.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import assert_never

import torch
from torch import Tensor

from megarl.config.algorithm import Aggregation, KlEstimate, PpoLossConfig

MAX_LOG_RATIO = 20.0
"""Bound on the exponent of a probability ratio, far below overflow."""

_MAX_K3 = 10.0
"""Limit of one token in a loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTokens:
    """One micro-batch: the inputs of a policy loss."""

    logprobs: Tensor  # [N], of the policy being updated, with gradient
    entropy: Tensor  # [N], of the policy being updated, with gradient
    old_logprobs: Tensor  # [N], of the policy before the step's first update
    rollout_logprobs: Tensor  # [N], of the engine that sampled; 0 in demonstrations
    advantages: Tensor  # [N]
    segments: Segments
    reference_logprobs: Tensor | None = None  # [N], if the loss has a KL term
    teacher: Tensor | None = None  # [N, 1 + 2K], see `train.likeliest.top_scores`
    candidates: Tensor | None = None  # [N, K], of the policy being updated for the teacher's tokens, with gradient

    def masked(self) -> PolicyTokens:
        """Return 0 in every column outside the loss mask: what is not finite there would reach gradients."""
        mask = self.segments.loss_mask

        def of(column: Tensor) -> Tensor:
            return torch.where(mask if column.ndim == 1 else mask[:, None], column, torch.zeros_like(column))

        return replace(
            self,
            logprobs=of(self.logprobs),
            entropy=of(self.entropy),
            old_logprobs=of(self.old_logprobs),
            rollout_logprobs=of(self.rollout_logprobs),
            advantages=of(self.advantages),
            reference_logprobs=None if self.reference_logprobs is None else of(self.reference_logprobs),
            teacher=None if self.teacher is None else of(self.teacher),
            candidates=None if self.candidates is None else of(self.candidates),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """Meaningful where the loss mask is set."""

    values: Tensor  # [N]
    is_clipped: Tensor  # [N], True where the clip set the value


def ppo_loss(config: PpoLossConfig, tokens: PolicyTokens) -> TokenLoss:
    """PPO with the dual clip: where the advantage is negative the loss is bounded by `-advantage * clip_dual`."""
    single = clipped_loss(tokens.advantages, log_ratios(tokens).exp(), low=config.clip_low, high=config.clip_high)
    bound = -tokens.advantages * config.clip_dual
    is_bounded = (tokens.advantages < 0) & (single.values > bound)
    return TokenLoss(
        values=torch.where(is_bounded, bound, single.values),
        is_clipped=single.is_clipped | is_bounded,
    )


def log_ratios(tokens: PolicyTokens) -> Tensor:
    return (tokens.logprobs - tokens.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clipped_loss(advantages: Tensor, ratios: Tensor, *, low: float, high: float) -> TokenLoss:
    free = -advantages * ratios
    clipped = -advantages * ratios.clamp(1 - low, 1 + high)
    return TokenLoss(values=torch.maximum(free, clipped), is_clipped=clipped > free)


def unclipped_loss(values: Tensor) -> TokenLoss:
    return TokenLoss(values=values, is_clipped=torch.zeros_like(values, dtype=torch.bool))


def aggregate(
    kind: Aggregation,
    values: Tensor,
    segments: Segments,
    *,
    num_loss_tokens: int,
    num_sequences: int,
    horizon_tokens: int | None = None,
) -> Tensor:
    """Return this micro-batch's part of the mini-batch's loss. The counts are those of the mini-batch."""
    match kind:
        case "token_mean":
            return masked_sum(values, segments.loss_mask) / max(num_loss_tokens, 1)
        case "token_sum":
            return masked_sum(values, segments.loss_mask)
        case "seq_mean_token_sum":
            return masked_sum(values, segments.loss_mask) / max(num_sequences, 1)
        case "seq_mean_token_mean":
            return segments.own_means(values).sum() / max(num_sequences, 1)
        case "seq_mean_token_sum_norm":
            assert horizon_tokens is not None, "seq_mean_token_sum_norm without a horizon"
            return masked_sum(values, segments.loss_mask) / (max(num_sequences, 1) * horizon_tokens)
        case _:
            assert_never(kind)


def masked_sum(values: Tensor, loss_mask: Tensor) -> Tensor:
    # `where`, not a product: zero times a value that is not finite is not zero.
    return torch.where(loss_mask, values, torch.zeros_like(values)).sum()


def kl(kind: KlEstimate, logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Return estimates of KL(policy || reference) at tokens that the policy chose. [N]

    A kind with `+` has the gradient of k2, whose expectation is the gradient of the KL.
    """
    delta = logprobs - reference_logprobs
    match kind:
        case "k1":
            return delta
        case "abs":
            return delta.abs()
        case "k2":
            return delta.square() / 2
        case "k3":
            return k3(delta).clamp(max=_MAX_K3)
        case "k1+":
            return _with_k2_gradient(delta, kl("k1", logprobs, reference_logprobs))
        case "abs+":
            return _with_k2_gradient(delta, kl("abs", logprobs, reference_logprobs))
        case "k3+":
            return _with_k2_gradient(delta, kl("k3", logprobs, reference_logprobs))
        case _:
            assert_never(kind)


def k3(delta: Tensor) -> Tensor:
    """Return the estimate as it is, for a judgement; a loss needs its bound (`kl`)."""
    bounded = delta.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (-bounded).exp() + bounded - 1


def _with_k2_gradient(delta: Tensor, value: Tensor) -> Tensor:
    k2 = delta.square() / 2
    return k2 - k2.detach() + value.detach()


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """The S episodes of one micro-batch of N tokens, padding included. Sums are over loss tokens only.

    The N tokens may be a part of each episode, of which other ranks have the rest.
    """

    loss_mask: Tensor  # [N], bool
    lengths: Tensor  # [S], int64: all tokens
    sequence_ids: Tensor  # [N], int64
    num_loss_tokens: Tensor  # [S], float64, of whole sequences
    over_parts: Callable[[Tensor], Tensor] | None = None
    """Adds up the sums of all parts, with gradients; None where the sequences are whole."""

    @classmethod
    def of(
        cls,
        loss_mask: Tensor,
        starts: Tensor,
        num_loss_tokens: Tensor | None = None,
        over_parts: Callable[[Tensor], Tensor] | None = None,
    ) -> Segments:
        """`starts`: where each sequence starts, then N. [S + 1]

        Rows of one episode are one sequence here; `num_loss_tokens` counts also those in other micro-batches.
        """
        lengths = starts.diff().to(torch.int64)
        numbers = torch.arange(len(lengths), device=lengths.device)
        if num_loss_tokens is None:
            own = _segment_sums(loss_mask.double(), lengths)
            num_loss_tokens = own if over_parts is None else over_parts(own)
        return cls(
            loss_mask=loss_mask,
            lengths=lengths,
            sequence_ids=numbers.repeat_interleave(lengths, output_size=len(loss_mask)),
            num_loss_tokens=num_loss_tokens.double(),
            over_parts=over_parts,
        )

    def sums(self, values: Tensor) -> Tensor:
        """[N] -> [S], over loss tokens. In double precision: a sequence may have tens of thousands of tokens."""
        own = self._own_sums(values)
        return (own if self.over_parts is None else self.over_parts(own)).to(values.dtype)

    def own_means(self, values: Tensor) -> Tensor:
        """[N] -> [S], what these tokens add to the mean of their sequence."""
        return (self._own_sums(values) / self.num_loss_tokens.clamp(min=1)).to(values.dtype)

    def _own_sums(self, values: Tensor) -> Tensor:
        # `where`, not a product: zero times a value that is not finite is not zero.
        counted = torch.where(self.loss_mask, values, torch.zeros_like(values))
        return _segment_sums(counted.double(), self.lengths)

    def means(self, values: Tensor) -> Tensor:
        """[N] -> [S], over loss tokens; 0 for a sequence without any."""
        return self.sums(values) / self.num_loss_tokens.clamp(min=1).to(values.dtype)

    def spread(self, per_sequence: Tensor) -> Tensor:
        """[S] -> [N], each token with the value of its sequence."""
        return per_sequence[self.sequence_ids]


def _segment_sums(values: Tensor, lengths: Tensor) -> Tensor:
    # Not index_add: on a GPU its order of addition varies, and with it the last bits of the result.
    return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)
