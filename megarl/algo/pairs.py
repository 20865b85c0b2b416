"""Learns from pairs of rollouts, one better than the other: DPO and its like, SPIN, and the reward model. Pure numpy.

The margins of pairs are those of the model before the step, so one update of `-A * logp` is one update of their loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megarl.algo.advantage import Credit, Float64Array, Groups, Outcomes, over_tokens
from megarl.config.algorithm import KlRewardConfig, PairConfig, PreferenceConfig, SpinConfig
from megarl.results import PreferenceStats
from megarl.tokens import num_true
from megarl.types import BoolArray, Estimates, FloatArray


def pair_credit(config: PairConfig, outcomes: Outcomes) -> Credit:
    """Return the credit of every token; tokens of rollouts outside the pairs have 0."""
    assert outcomes.implicit is not None, "pairs without implicit rewards"
    pairs = find_pairs(config, outcomes.rewards, outcomes.groups)
    per_rollout = pair_advantages(config, pairs, outcomes.implicit, outcomes.lengths)
    return over_tokens(per_rollout, outcomes.loss_masks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """P pairs of a step's rollouts, by their indices."""

    better: Groups  # [P]
    worse: Groups  # [P]


def find_pairs(config: PairConfig, rewards: Float64Array, groups: Groups) -> Pairs:
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


def members_of(groups: Groups) -> list[Groups]:
    """Return the rollouts of each group."""
    order = np.argsort(groups, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(groups[order])) + 1)


def implicit_rewards(config: PairConfig, estimates: Estimates, loss_masks: Sequence[BoolArray]) -> Float64Array:
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
) -> Float64Array:
    """[B], the log-probability of each rollout, less that of the reference where there is one."""
    assert logprobs is not None, "a preference without log-probabilities"
    totals = _masked_sums(logprobs, loss_masks)
    if not has_reference(config):
        return totals
    assert reference is not None, "a preference without a reference"
    return totals - _masked_sums(reference, loss_masks)


def pair_advantages(
    config: PairConfig, pairs: Pairs, implicit: Float64Array, lengths: npt.NDArray[np.int64]
) -> Float64Array:
    """[B], the negative gradient of the mean loss of the pairs by each token's log-probability; 0 outside the pairs.

    The trainer divides by the rollouts that have loss tokens; the factor makes it the mean over pairs.
    """
    pushes = _pushes(config, implicit[pairs.better] - implicit[pairs.worse])
    advantages = np.zeros_like(implicit)
    np.add.at(advantages, pairs.better, pushes)
    np.subtract.at(advantages, pairs.worse, pushes)
    return advantages * _per_token(config, lengths) * np.count_nonzero(lengths) / max(len(pushes), 1)


def measure_pairs(config: PairConfig, pairs: Pairs, implicit: Float64Array) -> PreferenceStats | None:
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


def _losses(config: PairConfig, margins: Float64Array) -> Float64Array:
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


def _pushes(config: PairConfig, margins: Float64Array) -> Float64Array:
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


def _sigmoid(numbers: Float64Array) -> Float64Array:
    # Without overflow at either end.
    result: Float64Array = np.exp(-np.logaddexp(0.0, -numbers))
    return result


def _per_token(config: PairConfig, lengths: npt.NDArray[np.int64]) -> Float64Array:
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


def _masked_sums(numbers: Sequence[FloatArray], loss_masks: Sequence[BoolArray]) -> Float64Array:
    pairs = zip(numbers, loss_masks, strict=True)
    return np.array([tokens[mask].sum(dtype=np.float64) for tokens, mask in pairs])
