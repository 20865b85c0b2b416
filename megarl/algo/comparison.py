"""Compares the rollouts of a group by their rewards, or in pairs: one number per rollout. Pure numpy over a whole step.

The margins of pairs are those of the model before the step, so one update of `-A * logp` is one update of their loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, assert_never

import numpy as np
import numpy.typing as npt

from megarl.config.algorithm import GroupConfig, KlRewardConfig, PairConfig, PreferenceConfig, SpinConfig
from megarl.results import PreferenceStats
from megarl.tokens import num_true
from megarl.types import BoolArray, Estimates, FloatArray

_EPS = 1e-6
WHITEN_EPS = 1e-8

# Sums over a step are taken in double precision.
Wide: TypeAlias = npt.NDArray[np.float64]
Groups: TypeAlias = npt.NDArray[np.int64]


def compare(config: GroupConfig, rewards: Wide, groups: Groups, lengths: npt.NDArray[np.int64]) -> tuple[Wide, float]:
    """Return the advantage of each rollout, and by how much it grows with the rollout's reward."""
    match config.kind:
        case "rloo":
            return rloo(rewards, groups), 1.0
        case "opo":
            return _opo(rewards, groups, lengths), 1.0
        case "gpg":
            return _gpg(rewards, groups), _gpg_scale(rewards)
        case "reinforce_pp_baseline":
            distances = _from_mean(rewards, groups)
            return whiten_rollouts(distances, lengths), 1 / _whitening(distances, lengths)[1]
        case "grpo_passk":
            return _grpo_passk(rewards, groups), 0.0  # the best of a group is so as a whole
        case _:
            assert_never(config.kind)


def grpo(rewards: Wide, groups: Groups, *, normalize_std: bool) -> Wide:
    """(R - mean of its group) / (unbiased std of its group + eps); 0 in a group of one."""
    distances = _from_mean(rewards, groups)
    return distances / (_group_std(rewards, groups)[groups] + _EPS) if normalize_std else distances


def grpo_scales(rewards: Wide, groups: Groups, *, normalize_std: bool) -> Wide:
    """[B], by how much the advantage of `grpo` grows with the reward; 0 in groups that have no signal."""
    if not normalize_std:
        return has_others(groups)
    stds = _group_std(rewards, groups)[groups]
    return np.where(stds > _EPS, has_others(groups) / (stds + _EPS), 0.0)


def has_others(groups: Groups) -> Wide:
    """[B], 1 where a rollout can be compared with others of its group, else 0."""
    return (np.bincount(groups)[groups] > 1).astype(np.float64)


def rloo(rewards: Wide, groups: Groups) -> Wide:
    """R - mean of the other rollouts of its group."""
    sizes = np.bincount(groups)
    return (sizes / np.maximum(sizes - 1, 1))[groups] * _from_mean(rewards, groups)


def _opo(rewards: Wide, groups: Groups, lengths: npt.NDArray[np.int64]) -> Wide:
    """R - mean of its group weighted by length, the baseline of least variance."""
    totals = np.bincount(groups, weights=lengths)
    baselines: Wide = np.bincount(groups, weights=lengths * rewards) / np.maximum(totals, 1)
    return rewards - baselines[groups]


def _gpg(rewards: Wide, groups: Groups) -> Wide:
    """R - mean of its group, scaled up by the share of rollouts without any reward."""
    return _gpg_scale(rewards) * _from_mean(rewards, groups)


def _gpg_scale(rewards: Wide) -> float:
    return len(rewards) / max(int(np.count_nonzero(rewards)), 1)


def _grpo_passk(rewards: Wide, groups: Groups) -> Wide:
    """The best of a group gets its lead over the second, divided by the std; all others, and ties for best, get 0."""
    sizes = np.bincount(groups)
    by_group_and_reward = np.lexsort((rewards, groups))
    last = np.cumsum(sizes) - 1
    best, second = by_group_and_reward[last], by_group_and_reward[np.where(sizes > 1, last - 1, last)]
    advantages = np.zeros_like(rewards)
    advantages[best] = (rewards[best] - rewards[second]) / (_group_std(rewards, groups) + _EPS)
    return advantages


def sppo(rewards: Wide, groups: Groups, *, eta: float) -> Wide:
    """Return eta * (R - log(mean of exp(eta R) over its group) / eta)."""
    targets = eta * rewards
    for members in members_of(groups):
        targets[members] -= np.logaddexp.reduce(targets[members]) - np.log(len(members))
    return targets


def members_of(groups: Groups) -> list[Groups]:
    """Return the rollouts of each group."""
    order = np.argsort(groups, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(groups[order])) + 1)


def _from_mean(rewards: Wide, groups: Groups) -> Wide:
    """[B], each reward less the mean of its group."""
    means: Wide = np.bincount(groups, weights=rewards) / np.bincount(groups)
    return rewards - means[groups]


def _group_std(rewards: Wide, groups: Groups) -> Wide:
    """[G], unbiased; 0 for a group of one."""
    squares = np.bincount(groups, weights=_from_mean(rewards, groups) ** 2)
    std: Wide = np.sqrt(squares / np.maximum(np.bincount(groups) - 1, 1))
    return std


def whiten_rollouts(per_rollout: Wide, lengths: npt.NDArray[np.int64]) -> Wide:
    """Scale to mean 0 and variance 1 over the step's tokens, each of which has the value of its rollout."""
    mean, deviation = _whitening(per_rollout, lengths)
    return (per_rollout - mean) / deviation


def _whitening(per_rollout: Wide, lengths: npt.NDArray[np.int64]) -> tuple[float, float]:
    """Return mean and deviation over the step's tokens."""
    num_tokens = int(lengths.sum())
    mean = float((lengths * per_rollout).sum() / max(num_tokens, 1))
    variance = (lengths * (per_rollout - mean) ** 2).sum() / max(num_tokens - 1, 1)
    return mean, float(np.sqrt(variance + WHITEN_EPS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """P pairs of a step's rollouts, by their indices."""

    better: Groups  # [P]
    worse: Groups  # [P]


def find_pairs(config: PairConfig, rewards: Wide, groups: Groups) -> Pairs:
    """Return the best and the worst rollout of each group that has both; for `spin` the demonstration, the last of its
    group, with each of the others."""
    better: list[int] = []
    worse: list[int] = []
    for members in members_of(groups):
        if isinstance(config, SpinConfig):
            better += [int(members[-1])] * (len(members) - 1)
            worse += members[:-1].tolist()
            continue
        best, worst = (int(members[find(rewards[members])]) for find in (np.argmax, np.argmin))
        if rewards[best] > rewards[worst]:
            better.append(best)
            worse.append(worst)
    return Pairs(better=np.array(better, np.int64), worse=np.array(worse, np.int64))


def implicit_rewards(config: PairConfig, estimates: Estimates, loss_masks: Sequence[BoolArray]) -> Wide:
    """[B], the reward that the model gives each rollout, by which pairs are compared.

    beta * log-ratio to the reference; for `simpo` beta * mean log-probability; for a reward model its score.
    """
    totals = None if estimates.sums is None else estimates.sums.ratios
    if totals is None:
        totals = log_ratios(config, estimates.logprobs, estimates.reference_logprobs, loss_masks)
    lengths = np.array([num_true(mask) for mask in loss_masks], np.int64)
    return totals * _per_token(config, lengths)


def log_ratios(
    config: PairConfig,
    logprobs: Sequence[FloatArray] | None,
    reference: Sequence[FloatArray] | None,
    loss_masks: Sequence[BoolArray],
) -> Wide:
    """[B], the log-probability of each rollout, less that of the reference where there is one."""
    assert logprobs is not None, "a preference without log-probabilities"
    totals = _masked_sums(logprobs, loss_masks)
    if not has_reference(config):
        return totals
    assert reference is not None, "a preference without a reference"
    return totals - _masked_sums(reference, loss_masks)


def pair_advantages(config: PairConfig, pairs: Pairs, implicit: Wide, lengths: npt.NDArray[np.int64]) -> Wide:
    """[B], the negative gradient of the mean loss of the pairs by each token's log-probability; 0 outside the pairs.

    The trainer divides by all rollouts; the factor makes it the mean over pairs.
    """
    pushes = _pushes(config, implicit[pairs.better] - implicit[pairs.worse])
    advantages = np.zeros_like(implicit)
    np.add.at(advantages, pairs.better, pushes)
    np.subtract.at(advantages, pairs.worse, pushes)
    return advantages * _per_token(config, lengths) * len(implicit) / max(len(pushes), 1)


def measure_pairs(config: PairConfig, pairs: Pairs, implicit: Wide) -> PreferenceStats | None:
    """Return the means over the pairs; None without any."""
    if not len(pairs.better):
        return None
    better, worse = implicit[pairs.better], implicit[pairs.worse]
    return PreferenceStats(
        num_pairs=len(better),
        loss=float(_losses(config, better - worse).mean()),
        accuracy=float((better > worse).mean()),
        margin=float((better - worse).mean()),
        chosen_reward=float(better.mean()),
        rejected_reward=float(worse.mean()),
    )


def _losses(config: PairConfig, margins: Wide) -> Wide:
    """[P], of implicit rewards that differ by these margins."""
    if not isinstance(config, PreferenceConfig):
        return np.logaddexp(0.0, -margins)
    match config.preference:
        case "ipo":
            return ((margins - 0.5) / _beta(config)) ** 2
        case "simpo":
            return np.logaddexp(0.0, config.simpo.gamma - margins)
        case "sigmoid":
            smoothing = config.label_smoothing
            return (1 - smoothing) * np.logaddexp(0.0, -margins) + smoothing * np.logaddexp(0.0, margins)


def _pushes(config: PairConfig, margins: Wide) -> Wide:
    """[P], the negative derivative of `_losses` by the margin."""
    if not isinstance(config, PreferenceConfig):
        return _sigmoid(-margins)
    match config.preference:
        case "ipo":
            return (1 - 2 * margins) / _beta(config) ** 2
        case "simpo":
            return _sigmoid(config.simpo.gamma - margins)
        case "sigmoid":
            return _sigmoid(-margins) - config.label_smoothing


def _sigmoid(numbers: Wide) -> Wide:
    # Without overflow at either end.
    result: Wide = np.exp(-np.logaddexp(0.0, -numbers))
    return result


def _per_token(config: PairConfig, lengths: npt.NDArray[np.int64]) -> Wide:
    """[B], the derivative of a rollout's implicit reward by the log-probability of one of its tokens."""
    if not isinstance(config, PreferenceConfig):
        return np.ones(len(lengths))
    if config.preference == "simpo":
        return config.simpo.beta / np.maximum(lengths, 1)
    return np.full(len(lengths), _beta(config))


def has_reference(config: PairConfig) -> bool:
    return isinstance(config, PreferenceConfig) and config.preference != "simpo"


def _beta(config: PreferenceConfig) -> float:
    assert isinstance(config.kl, KlRewardConfig), "a preference without a reference"
    return config.kl.coef


def _masked_sums(numbers: Sequence[FloatArray], loss_masks: Sequence[BoolArray]) -> Wide:
    pairs = zip(numbers, loss_masks, strict=True)
    return np.array([tokens[mask].sum(dtype=np.float64) for tokens, mask in pairs])
