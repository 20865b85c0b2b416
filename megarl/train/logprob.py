"""Log-probability of each target and entropy of each distribution, from hidden states: no [tokens x vocabulary] tensor.

The logits exist a few tokens at a time, in the forward pass and once more in the backward pass. The vocabulary may be
split over tensor-parallel ranks; each then needs only its own rows of the output weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

_MAX_CHUNK_BYTES = 512 * 1024 * 1024
"""Of float32 logits at a time: large enough for full-speed matrix kernels, small beside the activations."""


class TokenScores(NamedTuple):
    logprobs: Tensor  # [N], float32
    entropy: Tensor  # [N], float32


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabShard:
    """Which columns of the logits this rank makes; rows of the weight beyond them are padding."""

    first: int
    size: int
    group: dist.ProcessGroup | None
    """The ranks that hold the other columns; None when there are none."""


def vocab_shard(*, vocab: int, rows: int, rank: int, size: int, group: dist.ProcessGroup | None) -> VocabShard:
    """The columns of tensor-parallel rank `rank` of `size`, each with `rows` rows of the padded weight."""
    first = min(rank * rows, vocab)
    return VocabShard(first=first, size=min(rows, vocab - first), group=group if size > 1 else None)


def token_scores(
    hidden: Tensor,  # [N, hidden]
    weight: Tensor,  # [rows, hidden]
    targets: Tensor,  # [N]
    *,
    shard: VocabShard,
    temperature: float,
    max_chunk_bytes: int = _MAX_CHUNK_BYTES,
) -> TokenScores:
    """Of softmax(hidden @ weight.T / temperature). The gradient of `hidden` is this rank's part of a sum over ranks."""
    # By rows, padding included: the ranks reduce chunk by chunk, so theirs must be alike.
    chunk_tokens = max(1, max_chunk_bytes // (4 * len(weight)))
    logprobs, entropy = _TokenScores.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, shard, temperature, chunk_tokens
    )
    return TokenScores(logprobs, entropy)


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    shard: VocabShard
    temperature: float
    chunk_tokens: int


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        shard: VocabShard,
        temperature: float,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        num_tokens = hidden.shape[0]
        log_norms = torch.empty(num_tokens, dtype=torch.float32, device=hidden.device)
        logprobs, entropy = torch.empty_like(log_norms), torch.empty_like(log_norms)
        for chunk in _chunks(num_tokens, chunk_tokens):
            logits = _logits(hidden[chunk], weight, shard, temperature)
            parts = _reduced(logits, targets[chunk], shard)
            log_norms[chunk] = parts.maximum + parts.total.log()
            logprobs[chunk] = parts.target - log_norms[chunk]
            entropy[chunk] = parts.total.log() - parts.weighted / parts.total
        ctx.save_for_backward(hidden, weight, targets, log_norms, entropy)
        ctx.shard, ctx.temperature, ctx.chunk_tokens = shard, temperature, chunk_tokens
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: _Context, grad_logprobs: Tensor, grad_entropy: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        hidden, weight, targets, log_norms, entropy = ctx.saved_tensors
        shard = ctx.shard
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for chunk in _chunks(hidden.shape[0], ctx.chunk_tokens):
            log_probs = _logits(hidden[chunk], weight, shard, ctx.temperature) - log_norms[chunk, None]
            probs = log_probs.exp()
            # d logprob / d logit_j = [j is the target] - p_j;  d entropy / d logit_j = -p_j (log p_j + entropy)
            grad_logits = log_probs.add_(entropy[chunk, None]).mul_(grad_entropy[chunk, None])
            grad_logits = grad_logits.add_(grad_logprobs[chunk, None]).mul_(probs).neg_()
            column, is_here = _column(targets[chunk], shard)
            if shard.size:
                grad_logits.scatter_add_(1, column[:, None], (grad_logprobs[chunk] * is_here)[:, None])
            grad_logits = (grad_logits / ctx.temperature).to(hidden.dtype)
            grad_hidden[chunk] = grad_logits @ weight[: shard.size]
            grad_weight[: shard.size] += grad_logits.t() @ hidden[chunk]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


class _Reduced(NamedTuple):
    """Sums over the whole vocabulary, relative to the largest logit. Each [chunk], float32."""

    maximum: Tensor
    total: Tensor
    weighted: Tensor
    target: Tensor


def _reduced(logits: Tensor, targets: Tensor, shard: VocabShard) -> _Reduced:
    # A rank whose rows are all padding has no column to take the maximum of.
    lowest = torch.finfo(torch.float32).min
    maximum = logits.amax(dim=1) if shard.size else logits.new_full((len(logits),), lowest)
    _all_reduce(maximum, dist.ReduceOp.MAX, shard)
    column, is_here = _column(targets, shard)
    own = logits.gather(1, column[:, None])[:, 0] if shard.size else torch.zeros_like(maximum)
    centred = logits - maximum[:, None]
    exponentials = centred.exp()
    sums = torch.stack([exponentials.sum(dim=1), centred.mul_(exponentials).sum(dim=1), own * is_here])
    _all_reduce(sums, dist.ReduceOp.SUM, shard)
    return _Reduced(maximum, *sums)


def _logits(hidden: Tensor, weight: Tensor, shard: VocabShard, temperature: float) -> Tensor:
    return (hidden @ weight[: shard.size].t()).float() / temperature


def _column(targets: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """The targets' columns here (column 0 for those of other ranks), and which are here."""
    column = targets - shard.first
    is_here = (column >= 0) & (column < shard.size)
    return torch.where(is_here, column, torch.zeros_like(column)), is_here


def _chunks(num_tokens: int, chunk_tokens: int) -> list[slice]:
    return [slice(first, first + chunk_tokens) for first in range(0, num_tokens, chunk_tokens)]


def _all_reduce(tensor: Tensor, operation: dist.ReduceOp.RedOpType, shard: VocabShard) -> None:
    if shard.group is not None:
        dist.all_reduce(tensor, operation, group=shard.group)
