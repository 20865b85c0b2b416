"""What is remembered of an update: sums over loss tokens, added up over micro-batches and ranks, read once per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.algo.loss import PolicyTokens, TokenLoss, kl_k3, masked_sum
from megarl.train.topology import Topology
from megarl.types import MiniBatch, UpdateStats


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchReport:
    logprobs: Tensor  # [N], detached
    sums: Tensor  # [5], float64: loss, entropy, clipped tokens, k3, mismatch
    mismatch_max: Tensor  # []


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatchStats:
    """Over all loss tokens of a mini-batch; equal on every rank."""

    loss: float
    entropy: float
    clip_fraction: float
    approx_kl: float
    mismatch_mean: float
    mismatch_max: float


@torch.no_grad()
def report(
    tokens: PolicyTokens, loss: TokenLoss, *, loss_mask: Tensor, rollout_logprobs: Tensor | None
) -> MicroBatchReport:
    """Of one micro-batch. Without an engine's log-probabilities there is no mismatch."""
    if rollout_logprobs is None:
        mismatch = torch.zeros_like(tokens.old_logprobs)
    else:
        mismatch = torch.where(loss_mask, (tokens.old_logprobs.exp() - rollout_logprobs.exp()).abs(), 0.0)
    approx_kl = kl_k3(tokens.old_logprobs, tokens.logprobs)
    columns = (loss.values, tokens.entropy, loss.is_clipped, approx_kl, mismatch)
    return MicroBatchReport(
        logprobs=tokens.logprobs.detach(),
        sums=torch.stack([masked_sum(column.double(), loss_mask) for column in columns]),
        mismatch_max=mismatch.max(),
    )


def reduce_reports(reports: Sequence[MicroBatchReport], mini_batch: MiniBatch, topology: Topology) -> MiniBatchStats:
    """Over micro-batches, data-parallel ranks and, since only the last stage has reports, pipeline stages."""
    sums = torch.zeros(5, dtype=torch.float64, device=topology.device)
    mismatch_max = torch.zeros((), dtype=torch.float32, device=topology.device)
    for item in reports:
        sums += item.sums
        mismatch_max = torch.maximum(mismatch_max, item.mismatch_max)
    for group in (topology.data_group, topology.pipeline_group):
        dist.all_reduce(sums, dist.ReduceOp.SUM, group=group)
        dist.all_reduce(mismatch_max, dist.ReduceOp.MAX, group=group)
    means = (sums / max(mini_batch.num_loss_tokens, 1)).tolist()
    loss, entropy, clip_fraction, approx_kl, mismatch_mean = means
    return MiniBatchStats(
        loss=loss,
        entropy=entropy,
        clip_fraction=clip_fraction,
        approx_kl=approx_kl,
        mismatch_mean=mismatch_mean,
        mismatch_max=mismatch_max.item(),
    )


def gather_logprobs(logprobs: Sequence[Tensor], shape: tuple[int, int], topology: Topology) -> Tensor:
    """[data-parallel ranks, micro-batches, N] on every rank, from this rank's part (empty but on the last stage)."""
    gathered = torch.zeros((topology.data, *shape), dtype=torch.float32, device=topology.device)
    if topology.is_last_stage:
        dist.all_gather(list(gathered), torch.stack(list(logprobs)), group=topology.data_group)
    dist.broadcast(gathered, group_src=topology.pipeline - 1, group=topology.pipeline_group)
    return gathered


def summarise(
    mini_batches: Sequence[MiniBatch],
    stats: Sequence[MiniBatchStats],
    grad_norms: Sequence[float],
    learning_rate: float,
) -> UpdateStats:
    """One step: means over its mini-batches."""
    return UpdateStats(
        loss=fmean(item.loss for item in stats),
        grad_norm=fmean(grad_norms),
        learning_rate=learning_rate,
        entropy=fmean(item.entropy for item in stats),
        clip_fraction=fmean(item.clip_fraction for item in stats),
        approx_kl=fmean(item.approx_kl for item in stats),
        mismatch_mean=fmean(item.mismatch_mean for item in stats),
        mismatch_max=max(item.mismatch_max for item in stats),
        num_loss_tokens=sum(mini_batch.num_loss_tokens for mini_batch in mini_batches),
        num_sequences=sum(mini_batch.num_sequences for mini_batch in mini_batches),
        num_micro_batches=sum(len(mini_batch.shares[0]) for mini_batch in mini_batches),
    )
