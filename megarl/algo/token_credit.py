"""Estimators that give the tokens of one rollout different advantages: GAE, PRIME, REINFORCE++, ReMax.

Credit is assigned in three steps, because the rollouts of a step may be on many ranks: raw credit of each rollout by
itself, the scales of the whole step from the moments of the raw credit, and the advantages from both. A new estimator
is a `case` of `credit_tokens`, and of `step_scales` and `scaled` where it is not normalised over the step's tokens.

`CreditTask` is the same for columns of tokens that stay on ranks: the driver has rewards, a rank has values and
log-probabilities of some rollouts. Each rank assigns raw credit and returns a few numbers of each rollout; from all of
them the driver computes the scales, by which the ranks normalise.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import TypeAlias, TypeVar, assert_never

import numpy as np
import numpy.typing as npt
import torch

from megarl.algo.advantage import Credit, Float64Array, Groups, Outcomes, from_mean, has_others, over_tokens
from megarl.algo.early_rewards import places_of
from megarl.algo.loss import kl
from megarl.algo.pairs import has_reference, log_ratios
from megarl.config.algorithm import (
    EstimatorConfig,
    GaeConfig,
    KlEstimate,
    PairConfig,
    PrimeConfig,
    ReinforcePpConfig,
    RemaxConfig,
)
from megarl.tokens import ColumnName, RolloutSums, SampleColumn, is_repeated, sample_column
from megarl.types import BoolArray, FloatArray

WHITEN_EPS = 1e-8
"""Added to a variance by which advantages are scaled."""
_BLOCK = 4096
"""Tokens summed at once; they fit into a core's cache."""
_MAX_LOG_POWER = 500.0
"""Powers of the discount stay above exp(-this), far from where a double underflows."""

_Number = TypeVar("_Number", np.float32, np.float64)

TokenCreditConfig: TypeAlias = GaeConfig | PrimeConfig | ReinforcePpConfig | RemaxConfig

TokenColumns: TypeAlias = Mapping[ColumnName, Mapping[int, FloatArray]]
"""Columns of [T_i] by sample."""

_SUM, *_MOMENTS = range(4)
"""The numbers that a rank returns per rollout: sum of estimates of KL (pairs: of log-ratios), moments of raw credit."""


def credit_per_token(config: TokenCreditConfig, outcomes: Outcomes) -> Credit:
    """Take the three steps for rollouts that are all here."""
    raw = credit_tokens(config, outcomes)
    of_rollouts = np.array([moments(tokens) for tokens in raw.tokens])
    rows = step_scales(config, outcomes.rewards, outcomes.groups, of_rollouts)
    advantages = (scaled(config, tokens, row) for tokens, row in zip(raw.tokens, rows, strict=True))
    return Credit(advantages=placed(advantages, outcomes.loss_masks), returns=raw.returns)


@dataclass(frozen=True, slots=True, kw_only=True)
class RawCredit:
    """The advantages of the tokens that the policy chose, before they are compared with others of the step."""

    tokens: Sequence[Float64Array]  # per rollout
    returns: tuple[FloatArray, ...] | None = None


def credit_tokens(config: TokenCreditConfig, outcomes: Outcomes) -> RawCredit:
    """Return the credit that the estimator gives each rollout by itself: those of one step may be in many places."""
    match config:
        case GaeConfig():
            return _gae(outcomes, gamma=config.gamma, lam=config.lam)
        case PrimeConfig():
            return _prime(outcomes)
        case ReinforcePpConfig():
            return RawCredit(tokens=_rewards_to_go(outcomes, gamma=config.gamma))
        case RemaxConfig():
            return RawCredit(tokens=_remax(outcomes, gamma=config.gamma))
        case _:
            assert_never(config)


def moments(tokens: Float64Array) -> tuple[float, float, float]:
    """Return the number of tokens, their mean, and the sum of the squared distances from it."""
    mean = float(tokens.mean()) if len(tokens) else 0.0
    return len(tokens), mean, float(np.square(tokens - mean).sum())


def step_scales(
    config: TokenCreditConfig, rewards: Float64Array, groups: Groups, of_rollouts: Float64Array
) -> Float64Array:
    """[B, 3], what is taken from the raw credit of each rollout, the factor after it, and what is added.

    `of_rollouts` has the moments of each rollout, [B, 3].
    """
    match config:
        case GaeConfig() | ReinforcePpConfig():
            return _whitening_scales(of_rollouts)
        case PrimeConfig():
            return _prime_scales(rewards, groups, of_rollouts, process_coef=config.process_coef)
        case RemaxConfig():
            return np.tile([0.0, 1.0, 0.0], (len(of_rollouts), 1))
        case _:
            assert_never(config)


def _whitening_scales(of_rollouts: Float64Array) -> Float64Array:
    """[B, 3], to mean 0 and variance 1 over the step's tokens."""
    counts, means, squares = of_rollouts.T
    num_tokens = counts.sum()
    mean = float((counts * means).sum() / max(num_tokens, 1))
    variance = float((squares + counts * np.square(means - mean)).sum() / max(num_tokens - 1, 1))
    return np.tile([mean, 1 / float(np.sqrt(variance + WHITEN_EPS)), 0.0], (len(of_rollouts), 1))


def _prime_scales(
    rewards: Float64Array, groups: Groups, of_rollouts: Float64Array, *, process_coef: float
) -> Float64Array:
    """[B, 3], the mean of the others' rewards of tokens is taken, and RLOO of the outcome is added."""
    _, means, _ = of_rollouts.T
    has_other, sizes = has_others(groups), np.bincount(groups)
    taken = (np.bincount(groups, weights=means)[groups] - means) / np.maximum(sizes - 1, 1)[groups]
    return np.stack([taken, process_coef * has_other, rloo(rewards, groups) * has_other], axis=1)


def scaled(config: TokenCreditConfig, tokens: Float64Array, row: Float64Array) -> Float64Array:
    """Return the advantages of one rollout from its raw credit and its row of `step_scales`."""
    compared: Float64Array = tokens - row[0]
    to_go = _discounted_sum(compared, config.gamma) if isinstance(config, PrimeConfig) else compared
    return to_go * float(row[1]) + float(row[2])


def _remax(outcomes: Outcomes, *, gamma: float) -> list[Float64Array]:
    """Reward to go - reward of the greedy rollout of the same prompt, per token."""
    assert outcomes.baselines is not None, "remax without the rewards of greedy rollouts"
    to_go = _rewards_to_go(outcomes, gamma=gamma)
    return [tokens - baseline for tokens, baseline in zip(to_go, outcomes.baselines, strict=True)]


def _rewards_to_go(outcomes: Outcomes, *, gamma: float) -> list[Float64Array]:
    """The reward, less later penalties, each discounted once per later token that the policy chose."""
    if outcomes.penalties is not None or outcomes.earlier_rewards is not None:
        return [_discounted_sum(tokens, gamma) for tokens in _token_rewards(outcomes)]
    lengths = outcomes.lengths
    discounts = gamma ** np.arange(lengths.max(initial=0), dtype=np.float64)
    return [reward * discounts[:length][::-1] for reward, length in zip(outcomes.rewards, lengths, strict=True)]


def _token_rewards(outcomes: Outcomes) -> Iterator[Float64Array]:
    """Yield per rollout the rewards of the tokens the policy chose: penalties on all, earlier rewards at their places,
    the rest of the reward on the last.
    """
    for index, (reward, mask) in enumerate(zip(outcomes.rewards, outcomes.loss_masks, strict=True)):
        penalties = None if outcomes.penalties is None else outcomes.penalties[index][mask]
        tokens = np.zeros(np.count_nonzero(mask)) if penalties is None else -penalties.astype(np.float64)
        places, earlier = places_of({} if outcomes.earlier_rewards is None else outcomes.earlier_rewards[index])
        if len(places):
            tokens[np.cumsum(mask)[places] - 1] += earlier
        tokens[-1:] += reward - earlier.sum()
        yield tokens


def _prime(outcomes: Outcomes) -> RawCredit:
    """Return the rewards of tokens, and as returns what the reward model learns from (`other_losses.OutcomeTokens`).

    That is the cross-entropy of each answer, negative where the answer is wrong: unlike the probability of being right,
    which is 1 in float32 from a sum of rewards of 17 on, it has label and loss however sure the model is.
    """
    assert outcomes.values is not None, "prime without rewards of tokens"
    assert outcomes.are_right is not None, "prime without labels"
    masks = outcomes.loss_masks
    tokens = [values[mask].astype(np.float64) for values, mask in zip(outcomes.values, masks, strict=True)]
    logits = np.array([part.sum() for part in tokens])
    signs = np.where(outcomes.are_right, 1.0, -1.0)
    losses = np.copysign(np.logaddexp(0.0, -signs * logits), signs)
    return RawCredit(tokens=tokens, returns=over_tokens(losses, masks).advantages)


def rloo(rewards: Float64Array, groups: Groups) -> Float64Array:
    """R - mean of the other rollouts of its group."""
    sizes = np.bincount(groups)
    return (sizes / np.maximum(sizes - 1, 1))[groups] * from_mean(rewards, groups)


def _gae(outcomes: Outcomes, *, gamma: float, lam: float) -> RawCredit:
    """Generalised advantage estimation over the tokens the policy chose; others are skipped.

    delta = r + gamma V' - V, A = delta + gamma lam A', where V' and A' belong to the policy's next token.
    """
    assert outcomes.values is not None, "gae without values"
    masks = outcomes.loss_masks
    raw, returns = _arrays(outcomes.lengths, np.float64), _arrays([len(mask) for mask in masks], np.float32)
    each = zip(_token_rewards(outcomes), outcomes.values, masks, raw, returns, strict=True)
    for deltas, of_tokens, mask, sums, row in each:
        values = of_tokens[mask].astype(np.float64)
        deltas -= values
        deltas[:-1] += gamma * values[1:]
        sums[:] = _discounted_sum(deltas, gamma * lam)
        row[mask] = sums + values
    return RawCredit(tokens=raw, returns=returns)


def _discounted_sum(tokens: Float64Array, discount: float) -> Float64Array:
    """S_t = x_t + discount S_{t+1}, without a loop over tokens: S_t discount^t is the sum of the later x_k discount^k.

    Summed from the end, where the terms are smallest; in blocks, because the power would underflow.
    """
    if discount == 0:
        return tokens
    powers = _powers(discount)
    block = len(powers) - 1
    sums, carried = np.empty_like(tokens), 0.0
    for first in range((len(tokens) - 1) // block * block, -1, -block):
        part = tokens[first : first + block]
        scales = powers[: len(part)]
        scaled = (part * scales)[::-1].cumsum()[::-1]
        sums[first : first + block] = (scaled + carried * powers[len(part)]) / scales
        carried = sums[first]
    return sums


@lru_cache(maxsize=4)
def _powers(base: float) -> Float64Array:
    """Powers from 0 on: at most a block, and none so small that precision is lost."""
    count = _BLOCK if base == 1 else max(1, min(_BLOCK, int(_MAX_LOG_POWER / -np.log(base))))
    powers: Float64Array = base ** np.arange(count + 1, dtype=np.float64)
    return powers


def placed(chosen: Iterable[Float64Array], loss_masks: tuple[BoolArray, ...]) -> tuple[FloatArray, ...]:
    """Spread values of the tokens the policy chose over all tokens, with 0 elsewhere."""
    placed = _arrays([len(mask) for mask in loss_masks], np.float32)
    for tokens, mask, row in zip(chosen, loss_masks, placed, strict=True):
        row[mask] = tokens
    return placed


def _arrays(sizes: Iterable[int], dtype: type[_Number]) -> tuple[npt.NDArray[_Number], ...]:
    """Return zeros per rollout, views of one array: a large allocation gets large pages and is freed as a whole."""
    ends = np.cumsum([0, *sizes])
    whole = np.zeros(ends[-1], dtype)
    return tuple(whole[start:end] for start, end in pairwise(ends.tolist()))


def kl_distances(
    estimate: KlEstimate, policy: Sequence[FloatArray], reference: Sequence[FloatArray]
) -> list[FloatArray]:
    """Return the estimates of the KL to the reference at each token of each rollout."""
    pairs = zip(policy, reference, strict=True)
    return [kl(estimate, torch.from_numpy(of_policy), torch.from_numpy(other)).numpy() for of_policy, other in pairs]


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
    are_right: BoolArray | None
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
            are_right=outcomes.are_right,
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
            are_right=None if self.are_right is None else self.are_right[places],
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
        return kl_distances(self.kl, [policy[i] for i in self.sample_ids], [reference[i] for i in self.sample_ids])

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
            are_right=self.are_right,
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
