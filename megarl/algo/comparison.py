"""Compares the rewards of a group's rollouts: one number per rollout. Pure numpy over a whole step; knows no tokens."""

from __future__ import annotations

from typing import TypeAlias, assert_never

import numpy as np
import numpy.typing as npt

from megarl.config.algorithm import GroupConfig

_EPS = 1e-6
WHITEN_EPS = 1e-8

# Sums over a step are taken in double precision.
Wide: TypeAlias = npt.NDArray[np.float64]
Groups: TypeAlias = npt.NDArray[np.int64]


def compare(config: GroupConfig, rewards: Wide, groups: Groups, lengths: npt.NDArray[np.int64]) -> tuple[Wide, float]:
    """Return the advantage of each rollout, and by how much it grows with the rollout's reward."""
    match config.kind:
        case "rloo":
            return _rloo(rewards, groups), 1.0
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


def _rloo(rewards: Wide, groups: Groups) -> Wide:
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
