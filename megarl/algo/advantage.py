"""How much better each rollout was than expected: one estimator per function, one `match` to choose.

Pure numpy over a whole step: no micro-batch, no rank, no torch. `algorithm` turns the result into train samples.
A new estimator is one function and one `case`. Those that judge a rollout as a whole return one number each, those
that judge tokens return an array each, of the tokens the policy chose.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, assert_never

import numpy as np
import numpy.typing as npt

from megarl.types import BoolArray, FloatArray

EstimatorKind: TypeAlias = Literal[
    "gae", "grpo", "rloo", "opo", "gpg", "reinforce_pp", "reinforce_pp_baseline", "remax", "grpo_passk", "gdpo"
]

_EPS = 1e-6
_WHITEN_EPS = 1e-8

# Sums over a step are taken in double precision; what travels on is float32.
_Wide: TypeAlias = npt.NDArray[np.float64]
_Groups: TypeAlias = npt.NDArray[np.int64]


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


def estimate(
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
    lengths = outcomes.lengths
    if outcomes.penalties is not None:
        ends = np.cumsum(lengths)
        return np.split(_discounted_sums(_token_rewards(outcomes), ends, lengths, discount=gamma), ends[:-1])
    discounts = gamma ** np.arange(lengths.max(initial=0), dtype=np.float64)
    return [reward * discounts[:length][::-1] for reward, length in zip(outcomes.rewards, lengths, strict=True)]


def _token_rewards(outcomes: Outcomes) -> _Wide:
    """Of the tokens the policy chose, end to end: the reward on the last one of each rollout, penalties on all."""
    lengths = outcomes.lengths
    ends = np.cumsum(lengths)
    penalties = outcomes.penalties
    rewards = np.zeros(int(lengths.sum())) if penalties is None else -_chosen(penalties, outcomes.loss_masks)
    rewards[ends[lengths > 0] - 1] += outcomes.rewards[lengths > 0]
    return rewards


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
    lengths, masks = outcomes.lengths, outcomes.loss_masks
    values = _chosen(outcomes.values, masks)
    ends = np.cumsum(lengths)
    is_last = np.zeros(len(values), dtype=np.bool_)
    is_last[ends[lengths > 0] - 1] = True
    next_values = np.where(is_last, 0.0, np.append(values[1:], 0.0))
    deltas = _token_rewards(outcomes) + gamma * next_values - values
    raw = _discounted_sums(deltas, ends, lengths, discount=gamma * lam)
    return GaeResult(
        advantages=_placed(_whiten(np.split(raw, ends[:-1])), masks),
        returns=_placed(np.split(raw + values, ends[:-1]), masks),
    )


def _discounted_sums(
    flat: _Wide, ends: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], *, discount: float
) -> _Wide:
    """S_t = x_t + discount S_{t+1} within each rollout: one pass from the last token back, all rollouts at once."""
    longest_first = np.argsort(-lengths, kind="stable")
    ends, lengths = ends[longest_first], lengths[longest_first]
    num_longer = np.searchsorted(-lengths, -np.arange(lengths.max(initial=0)), side="left")
    sums, carried = np.zeros_like(flat), np.zeros(len(lengths))
    for distance, count in enumerate(num_longer):
        place = ends[:count] - 1 - distance
        carried[:count] = flat[place] + discount * carried[:count]
        sums[place] = carried[:count]
    return sums


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


def _whiten(chosen: list[_Wide]) -> list[_Wide]:
    """Mean 0 and variance 1 over the step's tokens."""
    num_tokens = sum(len(tokens) for tokens in chosen)
    mean = sum(float(tokens.sum()) for tokens in chosen) / max(num_tokens, 1)
    variance = sum(float(((tokens - mean) ** 2).sum()) for tokens in chosen) / max(num_tokens - 1, 1)
    return [(tokens - mean) / np.sqrt(variance + _WHITEN_EPS) for tokens in chosen]


def _over_tokens(per_rollout: _Wide, loss_masks: tuple[BoolArray, ...]) -> tuple[FloatArray, ...]:
    return tuple((mask * value).astype(np.float32) for value, mask in zip(per_rollout, loss_masks, strict=True))


def _chosen(arrays: tuple[FloatArray, ...], loss_masks: tuple[BoolArray, ...]) -> _Wide:
    """The tokens the policy chose, end to end."""
    parts = [array[mask] for array, mask in zip(arrays, loss_masks, strict=True)]
    return np.concatenate(parts).astype(np.float64)


def _placed(chosen: list[_Wide], loss_masks: tuple[BoolArray, ...]) -> tuple[FloatArray, ...]:
    """The other way round: 0 where the policy did not choose."""
    placed = tuple(np.zeros(len(mask), dtype=np.float32) for mask in loss_masks)
    for tokens, mask, values in zip(placed, loss_masks, chosen, strict=True):
        tokens[mask] = values
    return placed


def _lengths(loss_masks: tuple[BoolArray, ...]) -> npt.NDArray[np.int64]:
    """[B], tokens the policy chose."""
    return np.array([np.count_nonzero(mask) for mask in loss_masks], dtype=np.int64)
