"""What is remembered of an update: sums over loss tokens, added up over micro-batches and ranks, read once per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.algo.correction import mismatch
from megarl.algo.loss import PolicyTokens, kl, masked_sum
from megarl.algo.objective import ActorLoss
from megarl.train.topology import Topology
from megarl.types import MiniBatch, UpdateStats

_SUMS = (
    "entropy",
    "clipped",
    "rejected",
    "approx_kl",
    "distance",
    "kl",
    "k3",
    "chi2",
    "weight",
    "squared_weight",
)
"""What is added up over loss tokens, in this order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchReport:
    logprobs: Tensor  # [N], detached
    loss: Tensor  # [], float64: this micro-batch's part
    sums: Tensor  # [len(_SUMS)], float64
    mismatch_max: Tensor  # []


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatchStats:
    """Over all loss tokens of a mini-batch; equal on every rank."""

    loss: float
    entropy: float
    clip_fraction: float
    rejected_fraction: float
    approx_kl: float
    mismatch_mean: float
    mismatch_max: float
    mismatch_kl: float
    mismatch_k3: float
    mismatch_chi2: float
    effective_sample_ratio: float


@torch.no_grad()
def report(tokens: PolicyTokens, loss: ActorLoss, *, is_from_engine: bool) -> MicroBatchReport:
    """Of one micro-batch. A demonstration has no engine to disagree with."""
    loss_mask = tokens.segments.loss_mask
    apart = mismatch(tokens.old_logprobs, tokens.rollout_logprobs if is_from_engine else tokens.old_logprobs)
    columns = {
        "entropy": tokens.entropy,
        "clipped": loss.is_clipped,
        "rejected": loss.is_rejected,
        "approx_kl": kl("k3", tokens.old_logprobs, tokens.logprobs),
        "distance": apart.distance,
        "kl": apart.kl,
        "k3": apart.k3,
        "chi2": apart.chi2,
        "weight": apart.weight,
        "squared_weight": apart.weight.square(),
    }
    return MicroBatchReport(
        logprobs=tokens.logprobs.detach(),
        loss=loss.value.detach().double(),
        sums=torch.stack([masked_sum(columns[name].double(), loss_mask) for name in _SUMS]),
        mismatch_max=torch.where(loss_mask, apart.distance, 0.0).max(),
    )


def reduce_reports(reports: Sequence[MicroBatchReport], mini_batch: MiniBatch, topology: Topology) -> MiniBatchStats:
    """Over micro-batches, data-parallel ranks and, since only the last stage has reports, pipeline stages."""
    sums = torch.zeros(1 + len(_SUMS), dtype=torch.float64, device=topology.device)
    mismatch_max = torch.zeros((), dtype=torch.float64, device=topology.device)
    for item in reports:
        sums += torch.cat([item.loss[None], item.sums])
        mismatch_max = torch.maximum(mismatch_max, item.mismatch_max)
    for group in (topology.data_group, topology.pipeline_group):
        dist.all_reduce(sums, dist.ReduceOp.SUM, group=group)
        dist.all_reduce(mismatch_max, dist.ReduceOp.MAX, group=group)
    loss, *totals = sums.tolist()
    num_tokens = max(mini_batch.num_loss_tokens, 1)
    means = {name: total / num_tokens for name, total in zip(_SUMS, totals, strict=True)}
    return MiniBatchStats(
        loss=loss,
        entropy=means["entropy"],
        clip_fraction=means["clipped"],
        rejected_fraction=means["rejected"],
        approx_kl=means["approx_kl"],
        mismatch_mean=means["distance"],
        mismatch_max=mismatch_max.item(),
        mismatch_kl=means["kl"],
        mismatch_k3=means["k3"],
        mismatch_chi2=means["chi2"],
        effective_sample_ratio=means["weight"] ** 2 / means["squared_weight"] if mini_batch.num_loss_tokens else 0.0,
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
        mismatch_kl=fmean(item.mismatch_kl for item in stats),
        mismatch_k3=fmean(item.mismatch_k3 for item in stats),
        mismatch_chi2=fmean(item.mismatch_chi2 for item in stats),
        effective_sample_ratio=fmean(item.effective_sample_ratio for item in stats),
        rejected_fraction=fmean(item.rejected_fraction for item in stats),
        num_loss_tokens=sum(mini_batch.num_loss_tokens for mini_batch in mini_batches),
        num_sequences=sum(mini_batch.num_sequences for mini_batch in mini_batches),
        num_micro_batches=sum(len(mini_batch.shares[0]) for mini_batch in mini_batches),
    )
