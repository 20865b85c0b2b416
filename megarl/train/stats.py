"""What is remembered of an update: sums over loss tokens, added up over micro-batches and ranks, read once per step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.algo.correction import mismatch
from megarl.algo.loss import PolicyTokens, kl, masked_sum
from megarl.algo.objective import ActorLoss, CriticLoss, ValueTokens
from megarl.results import CriticStats, UpdateStats
from megarl.train.topology import Topology
from megarl.types import MiniBatch

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
    "reference_kl",
    "behind",
    "behind_distance",
)
"""What is added up over loss tokens of the actor, in this order."""

_VALUE_SUMS = ("clipped", "value", "return", "squared_return", "error", "squared_error")
"""The same of the critic; `error` is that of the values before the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchReport:
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
    reference_kl: float
    """0 where the loss has no such term."""
    engine_mismatch: float | None
    policy_drift: float | None
    behind_fraction: float


@torch.no_grad()
def report(
    tokens: PolicyTokens, loss: ActorLoss, *, is_from_engine: bool, is_behind: Tensor | None = None
) -> MicroBatchReport:
    """Of one micro-batch. A demonstration has no engine to disagree with; `is_behind` where an earlier policy chose."""
    loss_mask = tokens.segments.loss_mask
    behind = torch.zeros_like(loss_mask) if is_behind is None else is_behind
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
        "reference_kl": torch.zeros_like(tokens.logprobs) if loss.reference_kl is None else loss.reference_kl,
        "behind": behind,
        "behind_distance": torch.where(behind, apart.distance, 0.0),
    }
    return MicroBatchReport(
        loss=loss.value.detach().double(),
        sums=_sums(_SUMS, columns, loss_mask),
        mismatch_max=torch.where(loss_mask, apart.distance, 0.0).max(),
    )


def _sums(names: Sequence[str], columns: Mapping[str, Tensor], loss_mask: Tensor) -> Tensor:
    return torch.stack([masked_sum(columns[name].double(), loss_mask) for name in names])


def reduce_reports(reports: Sequence[MicroBatchReport], mini_batch: MiniBatch, topology: Topology) -> MiniBatchStats:
    """Over micro-batches, data-parallel ranks and, since only the last stage has reports, pipeline stages."""
    mismatch_max = torch.zeros((), dtype=torch.float64, device=topology.device)
    for item in reports:
        mismatch_max = torch.maximum(mismatch_max, item.mismatch_max)
    for group in (topology.data_group, topology.pipeline_group):
        dist.all_reduce(mismatch_max, dist.ReduceOp.MAX, group=group)
    loss, means = _reduced(_SUMS, reports, mini_batch, topology)
    behind = means["behind"]
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
        reference_kl=means["reference_kl"],
        engine_mismatch=(means["distance"] - means["behind_distance"]) / (1 - behind) if behind < 1 else None,
        policy_drift=means["behind_distance"] / behind if behind > 0 else None,
        behind_fraction=behind,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueReport:
    loss: Tensor  # [], float64: this micro-batch's part
    sums: Tensor  # [len(_VALUE_SUMS)], float64


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueStats:
    """Over all loss tokens of a mini-batch; equal on every rank."""

    loss: float
    clip_fraction: float
    value_mean: float
    return_mean: float
    explained_variance: float


@torch.no_grad()
def report_values(tokens: ValueTokens, loss: CriticLoss) -> ValueReport:
    errors = tokens.returns - tokens.old_values
    columns = {
        "clipped": loss.is_clipped,
        "value": tokens.old_values,
        "return": tokens.returns,
        "squared_return": tokens.returns.double().square(),
        "error": errors,
        "squared_error": errors.double().square(),
    }
    return ValueReport(loss=loss.value.detach().double(), sums=_sums(_VALUE_SUMS, columns, tokens.segments.loss_mask))


def reduce_values(reports: Sequence[ValueReport], mini_batch: MiniBatch, topology: Topology) -> ValueStats:
    loss, means = _reduced(_VALUE_SUMS, reports, mini_batch, topology)
    variance = means["squared_return"] - means["return"] ** 2
    unexplained = means["squared_error"] - means["error"] ** 2
    return ValueStats(
        loss=loss,
        clip_fraction=means["clipped"],
        value_mean=means["value"],
        return_mean=means["return"],
        # Returns that are all alike leave nothing to explain.
        explained_variance=1 - unexplained / variance if variance > 0 else 0.0,
    )


def summarise_values(applied: Sequence[tuple[ValueStats, float]], learning_rate: float) -> CriticStats:
    """One step: means over its updates, each given with its gradient norm."""
    stats = [item for item, _ in applied]
    return CriticStats(
        loss=fmean(item.loss for item in stats),
        grad_norm=fmean(grad_norm for _, grad_norm in applied),
        learning_rate=learning_rate,
        clip_fraction=fmean(item.clip_fraction for item in stats),
        value_mean=fmean(item.value_mean for item in stats),
        return_mean=fmean(item.return_mean for item in stats),
        explained_variance=fmean(item.explained_variance for item in stats),
    )


def _reduced(
    names: Sequence[str],
    reports: Sequence[MicroBatchReport] | Sequence[ValueReport],
    mini_batch: MiniBatch,
    topology: Topology,
) -> tuple[float, dict[str, float]]:
    """The mini-batch's loss, and the mean of every column over its loss tokens; the same on every rank."""
    sums = torch.zeros(1 + len(names), dtype=torch.float64, device=topology.device)
    for item in reports:
        sums += torch.cat([item.loss[None], item.sums])
    for group in (topology.data_group, topology.pipeline_group):
        dist.all_reduce(sums, dist.ReduceOp.SUM, group=group)
    loss, *totals = sums.tolist()
    num_tokens = max(mini_batch.num_loss_tokens, 1)
    return loss, {name: total / num_tokens for name, total in zip(names, totals, strict=True)}


def gather_tokens(columns: Sequence[Tensor], shape: tuple[int, int], topology: Topology) -> Tensor:
    """[data-parallel ranks, micro-batches, N] on every rank, from this rank's part (empty but on the last stage)."""
    gathered = torch.zeros((topology.data, *shape), dtype=torch.float32, device=topology.device)
    if topology.is_last_stage:
        dist.all_gather(list(gathered), torch.stack(list(columns)), group=topology.data_group)
    dist.broadcast(gathered, group_src=topology.pipeline - 1, group=topology.pipeline_group)
    return gathered


def summarise(
    applied: Sequence[tuple[MiniBatch, MiniBatchStats, float]], learning_rate: float, *, has_reference: bool
) -> UpdateStats:
    """One step: means over its updates, each given with its mini-batch and gradient norm."""
    stats = [item for _, item, _ in applied]
    mini_batches = [mini_batch for mini_batch, _, _ in applied]
    return UpdateStats(
        loss=fmean(item.loss for item in stats),
        grad_norm=fmean(grad_norm for _, _, grad_norm in applied),
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
        reference_kl=fmean(item.reference_kl for item in stats) if has_reference else None,
        num_loss_tokens=sum(mini_batch.num_loss_tokens for mini_batch in mini_batches),
        num_sequences=sum(mini_batch.num_sequences for mini_batch in mini_batches),
        num_micro_batches=sum(len(mini_batch.shares[0]) for mini_batch in mini_batches),
        engine_mismatch=_mean([item.engine_mismatch for item in stats]),
        policy_drift=_mean([item.policy_drift for item in stats]),
        behind_fraction=fmean(item.behind_fraction for item in stats),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    """Of those that are there."""
    found = [value for value in values if value is not None]
    return fmean(found) if found else None
