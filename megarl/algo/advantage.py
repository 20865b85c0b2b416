"""How much better each rollout was than expected: one estimator per function, one `match` to choose.

Pure numpy over a whole step: no micro-batch, no rank, no torch. `algorithm` turns the result into train samples.
A new estimator is one function and one `case`. Those that judge a rollout as a whole return one number each, those
that judge tokens return an array each, of the tokens the policy chose.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, TypeAlias, TypeVar, assert_never

import numpy as np
import numpy.typing as npt

from megarl.types import BoolArray, FloatArray

EstimatorKind: TypeAlias = Literal[
    "gae", "grpo", "rloo", "opo", "gpg", "reinforce_pp", "reinforce_pp_baseline", "remax", "grpo_passk", "gdpo"
]

_EPS = 1e-6
_WHITEN_EPS = 1e-8
_BLOCK = 4096
"""Tokens that are summed at once: a core's cache holds them."""
_MAX_LOG_POWER = 500.0
"""A power of the discount stays above exp(-this), far from where a double underflows."""

# Sums over a step are taken in double precision; what travels on is float32.
_Wide: TypeAlias = npt.NDArray[np.float64]
_Groups: TypeAlias = npt.NDArray[np.int64]
_Number = TypeVar("_Number", np.float32, np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """The rollouts of one step, in the order of their groups. B rollouts, rollout i has T_i tokens."""

    rewards: _Wide  # [B]
    groups: _Groups  # [B], which group each rollout belongs to, 0 .. G-1
    loss_masks: tuple[BoolArray, ...]  # B of [T_i]
    components: Mapping[str, _Wide] = field(default_factory=dict)  # [B] each; what `gdpo` judges by
    baselines: _Wide | None = None  # [B], the reward of a greedy rollout of the same prompt; what `remax` compares with
    penalties: tuple[FloatArray, ...] | None = None  # B of [T_i], taken off the reward token by token
    values: tuple[FloatArray, ...] | None = None  # B of [T_i], what the critic expects; what `gae` compares with

    def __post_init__(self) -> None:
        num_rollouts = len(self.rewards)
        assert len(self.groups) == num_rollouts, f"{len(self.groups)} group numbers, {num_rollouts} rewards"
        assert len(self.loss_masks) == num_rollouts, f"{len(self.loss_masks)} loss masks, {num_rollouts} rewards"
        assert np.isfinite(self.rewards).all(), f"rewards are not finite: {self.rewards}"
        assert np.bincount(self.groups).all(), f"a group has no rollouts: {self.groups}"

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """[B], tokens the policy chose."""
        return _lengths(self.loss_masks)

    @property
    def totals(self) -> _Wide:
        """[B], what is left of each reward after all penalties of its tokens."""
        if self.penalties is None:
            return self.rewards
        pairs = zip(self.penalties, self.loss_masks, strict=True)
        totals: _Wide = self.rewards - np.array([penalty[mask].sum(dtype=np.float64) for penalty, mask in pairs])
        return totals


def estimate(  # noqa: C901
    kind: EstimatorKind,
    outcomes: Outcomes,
    *,
    normalize_std: bool = True,
    gamma: float = 1.0,
    lam: float = 1.0,
    component_weights: Mapping[str, float] | None = None,
) -> tuple[FloatArray, ...]:
    """The advantage of every token, B of [T_i]; 0 where the policy did not choose the token.

    `normalize_std` is grpo's, `gamma` that of gae, reinforce_pp and remax, `lam` gae's, `component_weights` gdpo's.
    """
    rewards, groups, masks = outcomes.totals, outcomes.groups, outcomes.loss_masks
    match kind:
        case "gae":
            return gae(outcomes, gamma=gamma, lam=lam).advantages
        case "grpo":
            return _over_tokens(_grpo(rewards, groups, normalize_std=normalize_std), masks)
        case "rloo":
            return _over_tokens(_rloo(rewards, groups), masks)
        case "opo":
            return _over_tokens(_opo(rewards, groups, outcomes.lengths), masks)
        case "gpg":
            return _over_tokens(_gpg(rewards, groups), masks)
        case "reinforce_pp":
            return _placed(_whiten(_rewards_to_go(outcomes, gamma=gamma)), masks)
        case "reinforce_pp_baseline":
            return _over_tokens(_whiten_rollouts(_from_mean(rewards, groups), outcomes.lengths), masks)
        case "remax":
            return _placed(_remax(outcomes, gamma=gamma), masks)
        case "grpo_passk":
            return _over_tokens(_grpo_passk(rewards, groups), masks)
        case "gdpo":
            return _over_tokens(_gdpo(outcomes, component_weights or {}), masks)
        case _:
            assert_never(kind)


def _grpo(rewards: _Wide, groups: _Groups, *, normalize_std: bool) -> _Wide:
    """(R - mean of its group) / (unbiased std of its group + eps); a group of one knows nothing and gets 0."""
    distances = _from_mean(rewards, groups)
    return distances / (_group_std(rewards, groups)[groups] + _EPS) if normalize_std else distances


def _rloo(rewards: _Wide, groups: _Groups) -> _Wide:
    """R - mean of the others of its group."""
    sizes = np.bincount(groups)
    return (sizes / np.maximum(sizes - 1, 1))[groups] * _from_mean(rewards, groups)


def _opo(rewards: _Wide, groups: _Groups, lengths: npt.NDArray[np.int64]) -> _Wide:
    """R - mean of its group weighted by length: the baseline of least variance."""
    totals = np.bincount(groups, weights=lengths)
    baselines: _Wide = np.bincount(groups, weights=lengths * rewards) / np.maximum(totals, 1)
    return rewards - baselines[groups]


def _gpg(rewards: _Wide, groups: _Groups) -> _Wide:
    """R - mean of its group, scaled up by the share of rollouts without any reward."""
    return len(rewards) / max(int(np.count_nonzero(rewards)), 1) * _from_mean(rewards, groups)


def _grpo_passk(rewards: _Wide, groups: _Groups) -> _Wide:
    """Only the best of a group counts, by its lead over the second; a tie for best gives nothing to anyone."""
    sizes = np.bincount(groups)
    by_group_and_reward = np.lexsort((rewards, groups))
    last = np.cumsum(sizes) - 1
    best, second = by_group_and_reward[last], by_group_and_reward[np.where(sizes > 1, last - 1, last)]
    advantages = np.zeros_like(rewards)
    advantages[best] = (rewards[best] - rewards[second]) / (_group_std(rewards, groups) + _EPS)
    return advantages


def _gdpo(outcomes: Outcomes, weights: Mapping[str, float]) -> _Wide:
    """Each component judged within its group, so that none drowns in another's scale; the weighted sum whitened."""
    assert weights, "gdpo without weights"
    total = np.zeros_like(outcomes.rewards)
    for name, weight in weights.items():
        total += weight * _grpo(outcomes.components[name], outcomes.groups, normalize_std=True)
    return _whiten_rollouts(total, outcomes.lengths)


def _remax(outcomes: Outcomes, *, gamma: float) -> list[_Wide]:
    """Reward to go - reward of the greedy rollout of the same prompt."""
    assert outcomes.baselines is not None, "remax without the rewards of greedy rollouts"
    to_go = _rewards_to_go(outcomes, gamma=gamma)
    return [tokens - baseline for tokens, baseline in zip(to_go, outcomes.baselines, strict=True)]


def _rewards_to_go(outcomes: Outcomes, *, gamma: float) -> list[_Wide]:
    """The reward, discounted by every later token the policy chose, and by no other; so every later penalty."""
    if outcomes.penalties is not None:
        return [_discounted_sum(tokens, gamma) for tokens in _token_rewards(outcomes)]
    lengths = outcomes.lengths
    discounts = gamma ** np.arange(lengths.max(initial=0), dtype=np.float64)
    return [reward * discounts[:length][::-1] for reward, length in zip(outcomes.rewards, lengths, strict=True)]


def _token_rewards(outcomes: Outcomes) -> Iterator[_Wide]:
    """Of the tokens the policy chose in each rollout: the reward on the last one, penalties on all."""
    for index, (reward, mask) in enumerate(zip(outcomes.rewards, outcomes.loss_masks, strict=True)):
        penalties = None if outcomes.penalties is None else outcomes.penalties[index][mask]
        tokens = np.zeros(np.count_nonzero(mask)) if penalties is None else -penalties.astype(np.float64)
        tokens[-1:] += reward
        yield tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class GaeResult:
    """B of [T_i] each, 0 where the policy did not choose the token."""

    advantages: tuple[FloatArray, ...]
    """Whitened over the step."""
    returns: tuple[FloatArray, ...]
    """What the critic learns to predict."""


def gae(outcomes: Outcomes, *, gamma: float, lam: float) -> GaeResult:
    """Generalised advantage estimation over the tokens the policy chose; all others are stepped over.

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
    return GaeResult(advantages=_placed(_whiten(raw), masks), returns=returns)


def _discounted_sum(tokens: _Wide, discount: float) -> _Wide:
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
def _powers(base: float) -> _Wide:
    """From 0 on, as many as are of use: at most a block, and none so small that precision is lost."""
    count = _BLOCK if base == 1 else max(1, min(_BLOCK, int(_MAX_LOG_POWER / -np.log(base))))
    powers: _Wide = base ** np.arange(count + 1, dtype=np.float64)
    return powers


def _from_mean(rewards: _Wide, groups: _Groups) -> _Wide:
    """For each rollout, its distance from the mean of its group."""
    means: _Wide = np.bincount(groups, weights=rewards) / np.bincount(groups)
    return rewards - means[groups]


def _group_std(rewards: _Wide, groups: _Groups) -> _Wide:
    """[G], unbiased; 0 for a group of one."""
    squares = np.bincount(groups, weights=_from_mean(rewards, groups) ** 2)
    std: _Wide = np.sqrt(squares / np.maximum(np.bincount(groups) - 1, 1))
    return std


def _whiten_rollouts(per_rollout: _Wide, lengths: npt.NDArray[np.int64]) -> _Wide:
    """Mean 0 and variance 1 over the step's tokens, each of which has the value of its rollout."""
    num_tokens = int(lengths.sum())
    distances = per_rollout - (lengths * per_rollout).sum() / max(num_tokens, 1)
    variance = (lengths * distances**2).sum() / max(num_tokens - 1, 1)
    whitened: _Wide = distances / np.sqrt(variance + _WHITEN_EPS)
    return whitened


def _whiten(chosen: Sequence[_Wide]) -> Iterator[_Wide]:
    """Mean 0 and variance 1 over the step's tokens."""
    num_tokens = sum(len(tokens) for tokens in chosen)
    mean = sum(float(tokens.sum()) for tokens in chosen) / max(num_tokens, 1)
    variance = sum(float(np.square(tokens - mean).sum()) for tokens in chosen) / max(num_tokens - 1, 1)
    scale = 1 / np.sqrt(variance + _WHITEN_EPS)
    return ((tokens - mean) * scale for tokens in chosen)


def _over_tokens(per_rollout: _Wide, loss_masks: tuple[BoolArray, ...]) -> tuple[FloatArray, ...]:
    spread = _arrays([len(mask) for mask in loss_masks], np.float32)
    for value, mask, row in zip(per_rollout.astype(np.float32), loss_masks, spread, strict=True):
        np.multiply(mask, value, out=row)
    return spread


def _placed(chosen: Iterable[_Wide], loss_masks: tuple[BoolArray, ...]) -> tuple[FloatArray, ...]:
    """Of all tokens, from those the policy chose: 0 where it did not."""
    placed = _arrays([len(mask) for mask in loss_masks], np.float32)
    for tokens, mask, row in zip(chosen, loss_masks, placed, strict=True):
        row[mask] = tokens
    return placed


def _arrays(sizes: Iterable[int], dtype: type[_Number]) -> tuple[npt.NDArray[_Number], ...]:
    """Zeros for every rollout of the step. Allocated at once: a large array gets large pages, and is given back."""
    ends = np.cumsum(list(sizes))
    return tuple(np.split(np.zeros(ends[-1], dtype), ends[:-1]))


def _lengths(loss_masks: tuple[BoolArray, ...]) -> npt.NDArray[np.int64]:
    """[B], tokens the policy chose."""
    return np.array([np.count_nonzero(mask) for mask in loss_masks], dtype=np.int64)
