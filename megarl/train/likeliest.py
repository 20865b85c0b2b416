"""The likeliest tokens of a teacher, and the policy's log-probabilities of them: the heads of distillation.

As in `logprob`, of whose pieces these are made, logits exist for a few tokens at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from megarl.train.logprob import (
    Places,
    RowGradients,
    VocabShard,
    _add_product,
    _chunk_tokens,
    _chunks,
    _columns,
    _grad_logits,
    _logits,
    _over_ranks,
    _summed,
)

_MAX_VOCAB = 1 << 24
"""Ids of tokens below this are exact in float32."""


@dataclass(frozen=True, slots=True)
class Head:
    """The output layer of a model; the fields are arguments of `logprob.token_scores`."""

    weight: Tensor
    shard: VocabShard
    temperature: float
    has_float32_logits: bool
    is_fused: bool

    @property
    def logit_dtype(self) -> torch.dtype:
        return torch.float32 if self.has_float32_logits else self.weight.dtype

    @property
    def chunk_tokens(self) -> int:
        return _chunk_tokens(self.weight, self.logit_dtype)


@torch.no_grad()
def top_scores(hidden: Tensor, targets: Tensor, head: Head, *, num_top: int, vocab: int) -> Tensor:
    """Return the log-probability of the target, then those of the K likeliest tokens, then their ids. [N, 1 + 2K]

    The likeliest tokens are below `vocab`, the size of another model's vocabulary.
    """
    assert vocab < _MAX_VOCAB, f"the id of a token is not exact in float32: {vocab} tokens"
    scores = torch.empty((len(hidden), 1 + 2 * num_top), dtype=torch.float32, device=hidden.device)
    for chunk in _chunks(len(hidden), head.chunk_tokens):
        logits = _logits(hidden[chunk], head.weight[: head.shard.size], head.logit_dtype)
        columns = _columns(targets[chunk], head.shard)
        parts = _over_ranks(_summed(logits, columns, head.temperature, is_fused=head.is_fused), head.shard)
        log_norms = parts.maximum + parts.total.log()
        scores[chunk, 0] = parts.target - log_norms
        if num_top:
            likeliest, token_ids = _likeliest(logits, num_top, vocab, head.shard)
            scores[chunk, 1 : 1 + num_top] = likeliest / head.temperature - log_norms[:, None]
            scores[chunk, 1 + num_top :] = token_ids.float()
    return scores


def _likeliest(logits: Tensor, num_top: int, vocab: int, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Return the largest logits of each row over all ranks, in float32, and their tokens. [chunk, K] each"""
    num_columns = max(0, min(shard.size, vocab - shard.first))
    num_own = min(num_top, num_columns)
    values, columns = logits[:, :num_columns].float().topk(num_own, dim=1)
    # A rank with fewer than K columns fills up with places that lose to every column of another rank.
    missing = num_top - num_own
    values = torch.nn.functional.pad(values, (0, missing), value=-torch.inf)
    token_ids = torch.nn.functional.pad(columns + shard.first, (0, missing))
    if shard.group is None:
        return values, token_ids
    all_values = [torch.empty_like(values) for _ in range(shard.group.size())]
    all_ids = [torch.empty_like(token_ids) for _ in all_values]
    dist.all_gather(all_values, values, group=shard.group)
    dist.all_gather(all_ids, token_ids, group=shard.group)
    values, places = torch.cat(all_values, dim=1).topk(num_top, dim=1)
    return values, torch.cat(all_ids, dim=1).gather(1, places)


def at_places(
    score: Callable[[Tensor, Tensor, Head], Tensor], hidden: Tensor, targets: Tensor, places: Places | None, head: Head
) -> Tensor:
    """Return the scores at `places`, all positions if that is None, and 0 elsewhere. [N, ...]

    A teacher scores the positions that the policy learns: products of equal shape have equal rounding errors.
    """
    if places is None:
        return score(hidden, targets, head)
    scores = score(hidden[places.hidden], targets[places.tokens], head)
    return scores.new_zeros((len(targets), *scores.shape[1:])).index_copy(0, places.tokens, scores)


def candidate_logprobs(hidden: Tensor, candidates: Tensor, head: Head) -> Tensor:
    """Return the log-probabilities of K tokens at each position, with gradient. [N, K], float32

    The gradient of `hidden` is to be summed over the ranks, as that of `logprob.token_scores`.
    """
    logprobs: Tensor = _CandidateLogprobs.apply(hidden, head.weight, candidates, head)  # type: ignore[no-untyped-call]
    return logprobs


class _CandidateContext(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    head: Head


class _CandidateLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _CandidateContext, hidden: Tensor, weight: Tensor, candidates: Tensor, head: Head) -> Tensor:
        log_norms = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        logprobs = torch.empty(candidates.shape, dtype=torch.float32, device=hidden.device)
        nowhere = torch.full_like(candidates[:, 0], -1)
        for chunk in _chunks(len(hidden), head.chunk_tokens):
            logits = _logits(hidden[chunk], weight[: head.shard.size], head.logit_dtype)
            parts = _over_ranks(_summed(logits, nowhere[chunk], head.temperature, is_fused=head.is_fused), head.shard)
            log_norms[chunk] = parts.maximum + parts.total.log()
            at_candidates = _logits_at(logits, _columns(candidates[chunk], head.shard), head.shard)
            logprobs[chunk] = at_candidates / head.temperature - log_norms[chunk][:, None]
        ctx.save_for_backward(hidden, weight, candidates, log_norms)
        ctx.head = head
        return logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx: _CandidateContext, gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        hidden, weight, candidates, log_norms = ctx.saved_tensors
        head, size = ctx.head, ctx.head.shard.size
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        nowhere, nothing = torch.full_like(candidates[:, 0], -1), torch.zeros_like(log_norms)
        for chunk in _chunks(len(hidden), head.chunk_tokens):
            # Each candidate adds [j is the candidate] - p_j, times its gradient: first all -p_j, then the rest.
            rows = RowGradients(
                log_norms=log_norms[chunk],
                entropy=nothing[chunk],
                logprobs=gradients[chunk].sum(dim=1),
                entropies=nothing[chunk],
            )
            logits = _logits(hidden[chunk], weight[:size], head.logit_dtype)
            result = _grad_logits(logits, nowhere[chunk], rows, head.temperature, is_fused=head.is_fused)
            if size:
                columns = _columns(candidates[chunk], head.shard)
                added = torch.where(columns >= 0, gradients[chunk] / head.temperature, 0.0)
                result = result.scatter_add(1, columns.clamp(min=0), added.to(result.dtype))
            result = result.to(weight.dtype)
            grad_hidden[chunk] = result @ weight[:size]
            if ctx.needs_input_grad[1]:
                _add_product(grad_weight[:size], result.t(), hidden[chunk])
        return grad_hidden, grad_weight.to(weight.dtype) if ctx.needs_input_grad[1] else None, None, None


def _logits_at(logits: Tensor, columns: Tensor, shard: VocabShard) -> Tensor:
    """Return the logits of some columns of each row, of whatever rank, in float32. [chunk, K]"""
    if not logits.shape[1]:
        chosen = torch.zeros(columns.shape, dtype=torch.float32, device=logits.device)
    else:
        chosen = torch.where(columns >= 0, logits.gather(1, columns.clamp(min=0)).float(), 0.0)
    if shard.group is not None:
        dist.all_reduce(chosen, dist.ReduceOp.SUM, group=shard.group)
    return chosen
