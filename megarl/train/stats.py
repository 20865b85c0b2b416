"""Statistics of updates: token columns, averaged over loss tokens, micro-batches and ranks, then over a step's updates.

A statistic is a field of `results.UpdateStats` and its formula in `ACTOR` below; those of the critic are in `critic`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.algo.loss import PolicyTokens, kl, masked_sum
from megarl.algo.objective import ActorLoss, Mismatch, mismatch
from megarl.results import UpdateStats
from megarl.train.topology import Topology
from megarl.types import MiniBatch

Seen = TypeVar("Seen")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The part of one micro-batch."""

    sums: Tensor  # [1 + means], float64: part of the loss, then the sum of each column over loss tokens
    maxima: Sequence[Tensor]  # [] each


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatchStats:
    """Statistics over all loss tokens of a mini-batch; equal on every rank."""

    loss: float
    values: Mapping[str, float | None]
    """By field of `Statistics.result`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics(Generic[Seen, Result]):
    """Formulas by field of `result`; names that begin with an underscore are columns for the formulas only."""

    result: Callable[..., Result]
    means: Mapping[str, Callable[[Seen], Tensor]]
    """[N], averaged over the loss tokens of a mini-batch."""
    maxima: Mapping[str, Callable[[Seen], Tensor]]
    """[N], the largest of which over loss tokens is taken; never negative."""
    formulas: Mapping[str, Callable[[Mapping[str, float]], float | None]]
    """Applied to the means; None where undefined."""

    @torch.no_grad()
    def report(self, seen: Seen, loss: Tensor, loss_mask: Tensor) -> Report:
        """Return the part of one micro-batch; `loss` is its part of the mini-batch's loss."""
        sums = [masked_sum(column(seen).double(), loss_mask) for column in self.means.values()]
        return Report(
            sums=torch.stack([loss.double(), *sums]),
            maxima=[torch.where(loss_mask, column(seen), 0.0).max() for column in self.maxima.values()],
        )

    def reduce(self, reports: Sequence[Report], mini_batch: MiniBatch, topology: Topology) -> MiniBatchStats:
        """Reduce over micro-batches, replicas and pipeline stages, of which only the last has reports."""
        sums = torch.zeros(1 + len(self.means), dtype=torch.float64, device=topology.device)
        maxima = [torch.zeros((), dtype=torch.float64, device=topology.device) for _ in self.maxima]
        for report in reports:
            sums += report.sums
            maxima = [torch.maximum(*pair) for pair in zip(maxima, report.maxima, strict=True)]
        for group in (topology.replica_group, topology.pipeline_group):
            dist.all_reduce(sums, dist.ReduceOp.SUM, group=group)
            for maximum in maxima:
                dist.all_reduce(maximum, dist.ReduceOp.MAX, group=group)
        loss, *totals = sums.tolist()
        num_tokens = max(mini_batch.num_loss_tokens, 1)
        means = {name: total / num_tokens for name, total in zip(self.means, totals, strict=True)}
        values: dict[str, float | None] = {name: mean for name, mean in means.items() if not name.startswith("_")}
        values |= {name: maximum.item() for name, maximum in zip(self.maxima, maxima, strict=True)}
        values |= {name: formula(means) for name, formula in self.formulas.items()}
        return MiniBatchStats(loss=loss, values=values)

    def summarise(
        self,
        applied: Sequence[tuple[MiniBatchStats, float]],
        learning_rate: float,
        fixed: Mapping[str, float | None],
    ) -> Result:
        """Return the result of a step from its updates, each given with its gradient norm.

        A field is the largest or the mean of its values that are not None. `fixed` fields are taken as they are.
        """
        updates = [stats for stats, _ in applied]
        fields: dict[str, float | None] = {
            "loss": fmean(update.loss for update in updates),
            "grad_norm": fmean(grad_norm for _, grad_norm in applied),
            "learning_rate": learning_rate,
        }
        for name in updates[0].values:
            numbers = [value for update in updates if (value := update.values[name]) is not None]
            over_updates = max if name in self.maxima else fmean
            fields[name] = over_updates(numbers) if numbers else None
        return self.result(**{**fields, **fixed})


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorTokens:
    """One micro-batch of the actor as its statistics see it."""

    tokens: PolicyTokens
    loss: ActorLoss
    mismatch: Mismatch
    is_behind: Tensor  # [N], True where an earlier policy chose the token

    @classmethod
    def of(
        cls, tokens: PolicyTokens, loss: ActorLoss, *, is_from_engine: bool, is_behind: Tensor | None
    ) -> ActorTokens:
        """A demonstration is not from an engine: its mismatch is 0."""
        return cls(
            tokens=tokens,
            loss=loss,
            mismatch=mismatch(tokens.old_logprobs, tokens.rollout_logprobs if is_from_engine else tokens.old_logprobs),
            is_behind=torch.zeros_like(tokens.segments.loss_mask) if is_behind is None else is_behind,
        )


ACTOR: Statistics[ActorTokens, UpdateStats] = Statistics(
    result=UpdateStats,
    means={
        "entropy": lambda seen: seen.tokens.entropy,
        "clip_fraction": lambda seen: seen.loss.is_clipped,
        "rejected_fraction": lambda seen: seen.loss.is_rejected,
        "approx_kl": lambda seen: kl("k3", seen.tokens.old_logprobs, seen.tokens.logprobs),
        "mismatch_mean": lambda seen: seen.mismatch.distance,
        "mismatch_kl": lambda seen: seen.mismatch.kl,
        "mismatch_k3": lambda seen: seen.mismatch.k3,
        "mismatch_chi2": lambda seen: seen.mismatch.chi2,
        "_weight": lambda seen: seen.mismatch.weight,
        "_squared_weight": lambda seen: seen.mismatch.weight.square(),
        "reference_kl": lambda seen: (
            torch.zeros_like(seen.tokens.logprobs) if seen.loss.reference_kl is None else seen.loss.reference_kl
        ),
        "teacher_kl": lambda seen: (
            torch.zeros_like(seen.tokens.logprobs) if seen.loss.teacher_kl is None else seen.loss.teacher_kl
        ),
        "behind_fraction": lambda seen: seen.is_behind,
        "_behind_distance": lambda seen: torch.where(seen.is_behind, seen.mismatch.distance, 0.0),
    },
    maxima={"mismatch_max": lambda seen: seen.mismatch.distance},
    formulas={
        "effective_sample_ratio": lambda mean: (
            mean["_weight"] ** 2 / mean["_squared_weight"] if mean["_squared_weight"] else 0.0
        ),
        "engine_mismatch": lambda mean: (
            (mean["mismatch_mean"] - mean["_behind_distance"]) / (1 - mean["behind_fraction"])
            if mean["behind_fraction"] < 1
            else None
        ),
        "policy_drift": lambda mean: (
            mean["_behind_distance"] / mean["behind_fraction"] if mean["behind_fraction"] > 0 else None
        ),
    },
)
