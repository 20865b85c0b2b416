"""Log-probability of each target and entropy of each distribution, from hidden states: no [tokens x vocabulary] tensor.

Logits are computed for a few tokens at a time, in the forward pass and again in the backward pass. The vocabulary may
be split over tensor-parallel ranks; each then needs only its rows of the output weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from megarl.config.section import LOGIT_CHUNK_BYTES

_CHUNK_MULTIPLE = 256
"""Tokens; the tile size of matrix kernels."""


class TokenScores(NamedTuple):
    logprobs: Tensor  # [N], float32
    entropy: Tensor  # [N], float32
    candidates: Tensor | None = None  # [N, K], float32: `likeliest.candidate_logprobs`, where a teacher named some


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabShard:
    """The columns of the logits that this rank computes; further rows of its weight are padding."""

    first: int
    size: int
    group: dist.ProcessGroup | None
    """The ranks that hold the other columns; None if this rank has all."""


@dataclass(frozen=True, slots=True)
class Places:
    """The K of N tokens that are scored, and the hidden states that predict them: several may have the same."""

    tokens: Tensor  # [K], int64
    hidden: Tensor  # [K], int64 or int32

    @classmethod
    def of(cls, tokens: Tensor | None, computed: Tensor | None) -> Places | None:
        """`computed` are the places of all N among the hidden states, [N]; None where each has its own."""
        return None if tokens is None else cls(tokens, tokens if computed is None else computed[tokens])


def vocab_shard(*, vocab: int, rows: int, rank: int, size: int, group: dist.ProcessGroup | None) -> VocabShard:
    """Return the columns of tensor-parallel rank `rank` of `size`, each with `rows` rows of the padded weight."""
    first = min(rank * rows, vocab)
    return VocabShard(first=first, size=min(rows, vocab - first), group=group if size > 1 else None)


def token_scores(
    hidden: Tensor,  # [N, hidden]
    weight: Tensor,  # [rows, hidden]
    targets: Tensor,  # [N]
    *,
    shard: VocabShard,
    temperature: float,
    scored: Places | None = None,
    has_float32_logits: bool = False,
    is_fused: bool = True,
    max_chunk_bytes: int = LOGIT_CHUNK_BYTES,
) -> TokenScores:
    """Score softmax(hidden @ weight.T / temperature). The gradient of `hidden` is to be summed over the ranks.

    Logits are computed at the `scored` positions only, at all of them with None; the scores of others are 0.

    Logits have the dtype of `weight`, unless `has_float32_logits`; their gradients have it in any case. With `is_fused`
    kernels of Triton pass over the logits once, where there is a GPU.
    """
    logit_dtype = torch.float32 if has_float32_logits else weight.dtype
    chunk_tokens = _chunk_tokens(weight, logit_dtype, max_chunk_bytes)
    if scored is not None:
        num_tokens, hidden, targets = len(targets), hidden[scored.hidden], targets[scored.tokens]
    logprobs, entropy = _TokenScores.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, shard, temperature, chunk_tokens, logit_dtype, is_fused
    )
    if scored is None:
        return TokenScores(logprobs, entropy)
    nothing = torch.zeros(num_tokens, dtype=logprobs.dtype, device=logprobs.device)
    return TokenScores(*(nothing.index_copy(0, scored.tokens, column) for column in (logprobs, entropy)))


class _LogprobContext(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    shard: VocabShard
    temperature: float
    chunk_tokens: int
    logit_dtype: torch.dtype
    is_fused: bool


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _LogprobContext,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        shard: VocabShard,
        temperature: float,
        chunk_tokens: int,
        logit_dtype: torch.dtype,
        is_fused: bool,
    ) -> tuple[Tensor, Tensor]:
        num_tokens = hidden.shape[0]
        log_norms = torch.empty(num_tokens, dtype=torch.float32, device=hidden.device)
        logprobs, entropy = torch.empty_like(log_norms), torch.empty_like(log_norms)
        for chunk in _chunks(num_tokens, chunk_tokens):
            logits = _logits(hidden[chunk], weight[: shard.size], logit_dtype)
            columns = _columns(targets[chunk], shard)
            parts = _over_ranks(_summed(logits, columns, temperature, is_fused=is_fused), shard)
            log_norms[chunk] = parts.maximum + parts.total.log()
            logprobs[chunk] = parts.target - log_norms[chunk]
            entropy[chunk] = parts.total.log() - parts.weighted / parts.total
        ctx.save_for_backward(hidden, weight, targets, log_norms, entropy)
        ctx.shard, ctx.temperature, ctx.chunk_tokens = shard, temperature, chunk_tokens
        ctx.logit_dtype, ctx.is_fused = logit_dtype, is_fused
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: _LogprobContext, grad_logprobs: Tensor, grad_entropy: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None, None, None]:
        hidden, weight, targets, log_norms, entropy = ctx.saved_tensors
        shard = ctx.shard
        grad_hidden = torch.empty_like(hidden)
        # A frozen weight has no gradient.
        grad_weight = (
            torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if ctx.needs_input_grad[1] else None
        )
        for chunk in _chunks(hidden.shape[0], ctx.chunk_tokens):
            rows = RowGradients(
                log_norms=log_norms[chunk],
                entropy=entropy[chunk],
                logprobs=grad_logprobs[chunk].contiguous(),
                entropies=grad_entropy[chunk].contiguous(),
            )
            logits = _logits(hidden[chunk], weight[: shard.size], ctx.logit_dtype)
            columns = _columns(targets[chunk], shard)
            grad_logits = _grad_logits(logits, columns, rows, ctx.temperature, is_fused=ctx.is_fused).to(weight.dtype)
            grad_hidden[chunk] = grad_logits @ weight[: shard.size]
            if grad_weight is not None:
                _add_product(grad_weight[: shard.size], grad_logits.t(), hidden[chunk])
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None, None


class _Sums(NamedTuple):
    """Sums over some columns, relative to the largest of their logits. Each [chunk], float32."""

    maximum: Tensor
    total: Tensor  # of exp(logit - maximum)
    weighted: Tensor  # of (logit - maximum) * exp(logit - maximum)
    target: Tensor  # the target's logit where it is among the columns, else 0


class RowGradients(NamedTuple):
    """The inputs of the gradient of a token's logits. Each [chunk], float32."""

    log_norms: Tensor
    entropy: Tensor
    logprobs: Tensor  # gradient of the loss by the log-probability
    entropies: Tensor  # gradient of the loss by the entropy


def _logits(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return hidden @ weight.T, summed in float32 and rounded to `dtype`."""
    if dtype == weight.dtype:
        return hidden @ weight.t()
    if hidden.is_cuda:
        # The product of two bfloat16 numbers is exact in float32: as precise as converted factors, and faster.
        return torch.mm(hidden, weight.t(), out_dtype=dtype)
    return hidden.to(dtype) @ weight.to(dtype).t()


def _summed(logits: Tensor, columns: Tensor, temperature: float, *, is_fused: bool = True) -> _Sums:
    """Return the sums over the columns of each row; fused, on a GPU, in one pass over the logits."""
    if is_fused and logits.is_cuda and logits.shape[1]:
        from megarl.train.kernels import sum_rows  # noqa: PLC0415 - triton is only on GPU machines

        return _Sums(*sum_rows(logits, columns, temperature))
    scaled = logits.float() / temperature
    if not logits.shape[1]:
        # All rows of this rank are padding: there is no column to take the maximum of.
        nothing = scaled.new_zeros(len(scaled))
        return _Sums(torch.full_like(nothing, torch.finfo(torch.float32).min), nothing, nothing, nothing)
    maximum = scaled.amax(dim=1)
    target = torch.where(columns >= 0, scaled.gather(1, columns.clamp(min=0)[:, None])[:, 0], 0.0)
    centred = scaled.sub_(maximum[:, None])
    exponentials = centred.exp()
    return _Sums(maximum, exponentials.sum(dim=1), centred.mul_(exponentials).sum(dim=1), target)


def _over_ranks(sums: _Sums, shard: VocabShard) -> _Sums:
    """Combine the sums over each rank's columns to those over the whole vocabulary."""
    if shard.group is None:
        return sums
    maximum = sums.maximum.clone()
    dist.all_reduce(maximum, dist.ReduceOp.MAX, group=shard.group)
    below = sums.maximum - maximum
    scale = below.exp()
    parts = torch.stack([scale * sums.total, scale * (sums.weighted + below * sums.total), sums.target])
    dist.all_reduce(parts, dist.ReduceOp.SUM, group=shard.group)
    return _Sums(maximum, *parts)


def _grad_logits(
    logits: Tensor, columns: Tensor, rows: RowGradients, temperature: float, *, is_fused: bool = True
) -> Tensor:
    """Return the gradient of the logits before temperature, in their dtype; may overwrite them."""
    # d logprob / d logit_j = [j is the target] - p_j;  d entropy / d logit_j = -p_j (log p_j + entropy)
    if is_fused and logits.is_cuda and logits.shape[1]:
        from megarl.train.kernels import grad_rows  # noqa: PLC0415 - triton is only on GPU machines

        return grad_rows(logits, columns, rows, temperature)
    log_probs = logits.float() / temperature - rows.log_norms[:, None]
    probs = log_probs.exp()
    gradients = log_probs.add_(rows.entropy[:, None]).mul_(rows.entropies[:, None])
    gradients = gradients.add_(rows.logprobs[:, None]).mul_(probs).neg_()
    if logits.shape[1]:
        gradients.scatter_add_(1, columns.clamp(min=0)[:, None], (rows.logprobs * (columns >= 0))[:, None])
    return (gradients / temperature).to(logits.dtype)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, accumulated in float32."""
    if total.is_cuda:
        torch.addmm(total, left, right, torch.float32, out=total)
    else:
        total += left @ right


def _columns(targets: Tensor, shard: VocabShard) -> Tensor:
    """Return the targets' columns on this rank; -1 for targets of other ranks."""
    columns = targets - shard.first
    return torch.where((columns >= 0) & (columns < shard.size), columns, -1)


def _chunk_tokens(weight: Tensor, logit_dtype: torch.dtype, max_chunk_bytes: int = LOGIT_CHUNK_BYTES) -> int:
    # Counted in rows with padding: all ranks need the same chunks, because they reduce chunk by chunk.
    chunk_tokens = max(1, max_chunk_bytes // (logit_dtype.itemsize * len(weight)))
    return chunk_tokens - chunk_tokens % _CHUNK_MULTIPLE if chunk_tokens > _CHUNK_MULTIPLE else chunk_tokens


def _chunks(num_tokens: int, chunk_tokens: int) -> list[slice]:
    return [slice(first, first + chunk_tokens) for first in range(0, num_tokens, chunk_tokens)]
