"""Credit from columns of tokens that stay where ranks computed them.

The driver has rewards; a rank has values and log-probabilities of some rollouts. Each rank assigns raw credit to its
rollouts and returns a few numbers of each. From all of them the driver computes the scale of the step, by which the
ranks normalise the credit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch

from megarl.algo.advantage import Float64Array, Groups, Outcomes
from megarl.algo.loss import kl
from megarl.algo.pairs import has_reference, log_ratios
from megarl.algo.token_credit import RawCredit, TokenCreditConfig, credit_tokens, moments, placed, scaled, step_scales
from megarl.config.algorithm import EstimatorConfig, KlEstimate, PairConfig
from megarl.tokens import ColumnName, RolloutSums, SampleColumn, is_repeated, sample_column
from megarl.types import BoolArray, FloatArray

TokenColumns: TypeAlias = Mapping[ColumnName, Mapping[int, FloatArray]]
"""Columns of [T_i] by sample."""

_SUM, *_MOMENTS = range(4)
"""The numbers that a rank returns per rollout: sum of estimates of KL (pairs: of log-ratios), moments of raw credit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditTask:
    """How to assign credit to the B rollouts of a step, or of a rank's part of it, that have a score."""

    config: EstimatorConfig
    kl: KlEstimate | None
    """None without a penalty."""
    kl_coef: float
    sample_ids: tuple[int, ...]  # B, indices into the step's samples
    rewards: Float64Array  # [B]
    groups: Groups  # [B]
    masks: tuple[BoolArray | int, ...]  # B of [T_i]; a number of tokens where the policy chose all
    baselines: Float64Array | None
    earlier_rewards: tuple[Mapping[int, float], ...] | None

    @property
    def token_config(self) -> TokenCreditConfig | None:
        """The estimator, if it gives tokens of one rollout different advantages: these stay with the ranks."""
        return self.config if isinstance(self.config, TokenCreditConfig) else None

    @property
    def columns(self) -> tuple[ColumnName, ...]:
        """The columns of tokens that it needs."""
        if isinstance(self.config, PairConfig):
            return ("old_logprobs", "reference_logprobs") if has_reference(self.config) else ("old_logprobs",)
        values: tuple[ColumnName, ...] = ("values",) if self.config.needs.has_critic else ()
        return values if self.kl is None else (*values, "old_logprobs", "reference_logprobs")

    @classmethod
    def of(
        cls,
        config: EstimatorConfig,
        outcomes: Outcomes,
        sample_ids: Sequence[int],
        *,
        kl: KlEstimate | None,
        kl_coef: float,
    ) -> CreditTask:
        return cls(
            config=config,
            kl=kl,
            kl_coef=kl_coef,
            sample_ids=tuple(sample_ids),
            rewards=outcomes.rewards,
            groups=outcomes.groups,
            # All elements of a repeated one would be sent.
            masks=tuple(len(mask) if is_repeated(mask) and mask[0] else mask for mask in outcomes.loss_masks),
            baselines=outcomes.baselines,
            earlier_rewards=outcomes.earlier_rewards,
        )

    def among(self, sample_ids: Collection[int]) -> CreditTask:
        """Return the task of those rollouts alone."""
        places = [place for place, sample_id in enumerate(self.sample_ids) if sample_id in sample_ids]
        earlier = self.earlier_rewards
        return replace(
            self,
            sample_ids=tuple(self.sample_ids[place] for place in places),
            rewards=self.rewards[places],
            groups=self.groups[places],
            masks=tuple(self.masks[place] for place in places),
            baselines=None if self.baselines is None else self.baselines[places],
            earlier_rewards=None if earlier is None else tuple(earlier[place] for place in places),
        )

    def compute(self, columns: TokenColumns) -> PartCredit:
        """Assign raw credit from these columns; samples without a score get none."""
        masks = tuple(np.ones(mask, np.bool_) if isinstance(mask, int) else mask for mask in self.masks)
        distances = self._distances(columns)
        sums = np.zeros(len(masks))
        if distances is not None:
            sums[:] = [each[mask].sum(dtype=np.float64) for each, mask in zip(distances, masks, strict=True)]
        if isinstance(self.config, PairConfig):
            logprobs = [columns["old_logprobs"][i] for i in self.sample_ids]
            of_reference = columns.get("reference_logprobs")
            reference_logprobs = None if of_reference is None else [of_reference[i] for i in self.sample_ids]
            sums = log_ratios(self.config, logprobs, reference_logprobs, masks)
        config = self.token_config
        raw = None if config is None else credit_tokens(config, self._outcomes(masks, distances, columns))
        spread = [(mask.sum(), 0.0, 0.0) for mask in masks] if raw is None else map(moments, raw.tokens)
        lengths = {sample_id: len(array) for sample_id, array in next(iter(columns.values())).items()}
        return PartCredit(
            config=config,
            sample_ids=self.sample_ids,
            masks=masks,
            raw=raw,
            lengths=lengths,
            rows=np.array([(total, *row) for total, row in zip(sums, spread, strict=True)]).reshape(-1, 4),
        )

    def sums(self, rows: Float64Array) -> RolloutSums:
        """Return the sums of all rollouts from the rows of all ranks, [B, 4]."""
        return RolloutSums(
            counts=rows[:, _MOMENTS[0]],
            kl=None if self.kl is None else rows[:, _SUM],
            ratios=rows[:, _SUM] if isinstance(self.config, PairConfig) else None,
        )

    def scales(self, rows: Float64Array) -> Float64Array | None:
        """Return by which numbers the ranks normalise the credit of tokens, [B, 3]; None where there is none."""
        config = self.token_config
        return None if config is None else step_scales(config, self.rewards, self.groups, rows[:, _MOMENTS])

    def _distances(self, columns: TokenColumns) -> list[FloatArray] | None:
        if self.kl is None:
            return None
        policy, reference = columns["old_logprobs"], columns["reference_logprobs"]
        return [
            kl(self.kl, torch.from_numpy(policy[i]), torch.from_numpy(reference[i])).numpy() for i in self.sample_ids
        ]

    def _outcomes(
        self,
        masks: tuple[BoolArray, ...],
        distances: list[FloatArray] | None,
        columns: TokenColumns,
    ) -> Outcomes:
        values = columns.get("values")
        return Outcomes(
            rewards=self.rewards,
            groups=np.arange(len(masks)),  # the others of a group may be elsewhere
            loss_masks=masks,
            baselines=self.baselines,
            penalties=None
            if distances is None
            else tuple((self.kl_coef * distance).astype(np.float32) for distance in distances),
            values=None if values is None else tuple(values[i] for i in self.sample_ids),
            earlier_rewards=self.earlier_rewards,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCredit:
    """The raw credit of a rank's rollouts."""

    config: TokenCreditConfig | None
    sample_ids: tuple[int, ...]
    masks: tuple[BoolArray, ...]
    raw: RawCredit | None  # None where all tokens of a rollout have one advantage, which the driver knows
    lengths: Mapping[int, int]
    """Tokens of each sample of the rank, those without a score included."""
    rows: Float64Array  # [S, 4]

    def normalise(self, rows: Float64Array) -> tuple[dict[ColumnName, SampleColumn], Float64Array]:
        """Return the columns of an update, and the size of each rollout's advantages, [S]; `rows` are its `scales`.

        The columns are advantages, and returns where there are some. Samples without a score have 0.
        """
        assert self.config is not None, "no credit of tokens"
        assert self.raw is not None, "no credit of tokens"
        tokens = [scaled(self.config, raw, row) for raw, row in zip(self.raw.tokens, rows, strict=True)]
        columns: dict[ColumnName, Sequence[FloatArray]] = {"advantages": placed(tokens, self.masks)}
        if self.raw.returns is not None:
            columns["returns"] = self.raw.returns
        sizes = np.array([np.sqrt(np.square(each).mean()) if len(each) else 0.0 for each in tokens])
        return {name: self._column(arrays) for name, arrays in columns.items()}, sizes

    def _column(self, arrays: Sequence[FloatArray]) -> SampleColumn:
        scored = dict(zip(self.sample_ids, arrays, strict=True))
        return sample_column({i: scored.get(i, np.zeros(length, np.float32)) for i, length in self.lengths.items()})
