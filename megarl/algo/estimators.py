"""The choice of an estimator, and those with one advantage per rollout: rloo, opo, gpg, grpo_passk, gdpo, sppo.

Pure numpy over a whole step. A new estimator is a function here and a `case` of `choose_estimator`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias, assert_never

import numpy as np
import numpy.typing as npt

from megarl.algo.advantage import (
    EPS,
    Credit,
    Float64Array,
    Groups,
    Outcomes,
    from_mean,
    group_std,
    grpo,
    grpo_credit,
    has_others,
    over_tokens,
)
from megarl.algo.early_rewards import without_earlier
from megarl.algo.pairs import members_of, pair_credit
from megarl.algo.token_credit import WHITEN_EPS, TokenCreditConfig, credit_per_token, rloo
from megarl.config.algorithm import (
    DistillConfig,
    EstimatorConfig,
    GdpoConfig,
    GroupConfig,
    GrpoConfig,
    PairConfig,
    SppoConfig,
)
from megarl.errors import DataError
from megarl.system.user_code import load_code

Estimator: TypeAlias = Callable[[Outcomes], Credit]


def choose_estimator(config: EstimatorConfig) -> Estimator:
    """Return the function that assigns credit to the tokens of a step."""
    if config.estimator is not None:
        return partial(_own_credit, config.estimator)
    if isinstance(config, TokenCreditConfig):
        return partial(credit_per_token, config)
    match config:
        case GrpoConfig():
            return partial(grpo_credit, normalize_std=config.normalize_std)
        case GroupConfig():
            return partial(_group_credit, config)
        case GdpoConfig():
            return partial(_gdpo_credit, config)
        case SppoConfig():
            return partial(_sppo_credit, config)
        case DistillConfig():
            return _no_credit
        case PairConfig():
            return partial(pair_credit, config)
        case _:
            assert_never(config)


def _group_credit(config: GroupConfig, outcomes: Outcomes) -> Credit:
    per_rollout, scale = _compare(config, outcomes.totals, outcomes.groups, outcomes.lengths)
    credit = over_tokens(per_rollout, outcomes.loss_masks)
    if outcomes.earlier_rewards is None:
        return credit
    advantages = without_earlier(
        credit.advantages, scale * has_others(outcomes.groups), outcomes.earlier_rewards, outcomes.loss_masks
    )
    return Credit(advantages=advantages)


def _compare(
    config: GroupConfig, rewards: Float64Array, groups: Groups, lengths: npt.NDArray[np.int64]
) -> tuple[Float64Array, float]:
    """Return the advantage of each rollout, and by how much it grows with the rollout's reward."""
    match config.kind:
        case "rloo":
            return rloo(rewards, groups), 1.0
        case "opo":
            return _opo(rewards, groups, lengths), 1.0
        case "gpg":
            return _gpg(rewards, groups), _gpg_scale(rewards)
        case "reinforce_pp_baseline":
            distances = from_mean(rewards, groups)
            return _whiten_rollouts(distances, lengths), 1 / _whitening(distances, lengths)[1]
        case "grpo_passk":
            return _grpo_passk(rewards, groups), 0.0  # the best of a group is so as a whole
        case _:
            assert_never(config.kind)


def _opo(rewards: Float64Array, groups: Groups, lengths: npt.NDArray[np.int64]) -> Float64Array:
    """R - mean of its group weighted by length, the baseline of least variance."""
    totals = np.bincount(groups, weights=lengths)
    baselines: Float64Array = np.bincount(groups, weights=lengths * rewards) / np.maximum(totals, 1)
    return rewards - baselines[groups]


def _gpg(rewards: Float64Array, groups: Groups) -> Float64Array:
    """R - mean of its group, scaled up by the share of rollouts without any reward."""
    return _gpg_scale(rewards) * from_mean(rewards, groups)


def _gpg_scale(rewards: Float64Array) -> float:
    return len(rewards) / max(int(np.count_nonzero(rewards)), 1)


def _grpo_passk(rewards: Float64Array, groups: Groups) -> Float64Array:
    """The best of a group gets its lead over the second, divided by the std; all others, and ties for best, get 0."""
    sizes = np.bincount(groups)
    by_group_and_reward = np.lexsort((rewards, groups))
    last = np.cumsum(sizes) - 1
    best, second = by_group_and_reward[last], by_group_and_reward[np.where(sizes > 1, last - 1, last)]
    advantages = np.zeros_like(rewards)
    advantages[best] = (rewards[best] - rewards[second]) / (group_std(rewards, groups) + EPS)
    return advantages


def _gdpo_credit(config: GdpoConfig, outcomes: Outcomes) -> Credit:
    """Return the whitened sum of the components' weighted GRPO advantages: their scales do not matter."""
    if outcomes.earlier_rewards is not None and any(outcomes.earlier_rewards):
        raise DataError("gdpo weighs components of a score; rewards per turn or token are none: use another estimator")
    total = np.zeros_like(outcomes.rewards)
    for name, weight in config.weights.items():
        total += weight * grpo(outcomes.components[name], outcomes.groups, normalize_std=True)
    return over_tokens(_whiten_rollouts(total, outcomes.lengths), outcomes.loss_masks)


def _whiten_rollouts(per_rollout: Float64Array, lengths: npt.NDArray[np.int64]) -> Float64Array:
    """Scale to mean 0 and variance 1 over the step's tokens, each of which has the value of its rollout."""
    mean, deviation = _whitening(per_rollout, lengths)
    return (per_rollout - mean) / deviation


def _whitening(per_rollout: Float64Array, lengths: npt.NDArray[np.int64]) -> tuple[float, float]:
    """Return mean and deviation over the step's tokens."""
    num_tokens = int(lengths.sum())
    mean = float((lengths * per_rollout).sum() / max(num_tokens, 1))
    variance = (lengths * (per_rollout - mean) ** 2).sum() / max(num_tokens - 1, 1)
    return mean, float(np.sqrt(variance + WHITEN_EPS))


def _sppo_credit(config: SppoConfig, outcomes: Outcomes) -> Credit:
    return over_tokens(_sppo(outcomes.totals, outcomes.groups, eta=config.eta), outcomes.loss_masks)


def _sppo(rewards: Float64Array, groups: Groups, *, eta: float) -> Float64Array:
    """Return eta * (R - log(mean of exp(eta R) over its group) / eta)."""
    targets = eta * rewards
    for members in members_of(groups):
        targets[members] -= np.logaddexp.reduce(targets[members]) - np.log(len(members))
    return targets


def _no_credit(outcomes: Outcomes) -> Credit:
    """Return no credit for rewards: the teacher's part is added in the loss."""
    return over_tokens(np.zeros(len(outcomes.rewards)), outcomes.loss_masks)


def _own_credit(code: str, outcomes: Outcomes) -> Credit:
    """Return the credit that a user's function assigns, after a check of its shape."""
    result = load_code(code, key="algorithm.estimator")(outcomes)
    if isinstance(result, Credit):
        return result
    masks, name = outcomes.loss_masks, f"algorithm.estimator: {code}"
    try:
        parts = [np.asarray(part, dtype=np.float64) for part in result]  # type: ignore[attr-defined]
    except (TypeError, ValueError) as error:
        raise DataError(f"{name} returned a {type(result).__name__}; it must be numbers, one per rollout") from error
    if len(parts) != len(masks):
        raise DataError(f"{name} returned {len(parts)} advantages for {len(masks)} rollouts")
    for index, (part, mask) in enumerate(zip(parts, masks, strict=True)):
        if part.shape not in ((), mask.shape) or not np.isfinite(part).all():
            raise DataError(
                f"{name}: rollout {index}: {part.shape} with {mask.shape} tokens; it must be finite numbers"
            )
    return Credit(advantages=tuple((part * mask).astype(np.float32) for part, mask in zip(parts, masks, strict=True)))
