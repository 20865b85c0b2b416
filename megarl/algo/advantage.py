"""Advantages: how much better each rollout was than expected. One function per estimator, one `match` to choose.

Pure numpy over a whole step: no micro-batch, no rank, no torch. A new estimator is one function and one `case` here.
Estimators of whole rollouts return one number per rollout, estimators of tokens one array per rollout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import TypeAlias, TypeVar, assert_never

import numpy as np
import numpy.typing as npt

from megarl.algo.comparison import (
    WHITEN_EPS,
    Groups,
    Wide,
    compare,
    find_pairs,
    grpo,
    grpo_scales,
    has_others,
    pair_advantages,
    rloo,
    sppo,
    whiten_rollouts,
)
from megarl.config.algorithm import (
    DistillConfig,
    EstimatorConfig,
    GaeConfig,
    GdpoConfig,
    GroupConfig,
    GrpoConfig,
    PairConfig,
    PrimeConfig,
    ReinforcePpConfig,
    RemaxConfig,
    SppoConfig,
)
from megarl.errors import DataError
from megarl.system.user_code import load_code
from megarl.tokens import is_repeated, num_true, repeated
from megarl.types import BoolArray, FloatArray

_BLOCK = 4096
"""Tokens summed at once; they fit into a core's cache."""
_MAX_LOG_POWER = 500.0
"""Powers of the discount stay above exp(-this), far from where a double underflows."""

_Number = TypeVar("_Number", np.float32, np.float64)

TokenCreditConfig: TypeAlias = GaeConfig | PrimeConfig | ReinforcePpConfig | RemaxConfig
"""Estimators that give tokens of one rollout different advantages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """The rollouts of one step, in the order of their groups. B rollouts, rollout i has T_i tokens."""

    rewards: Wide  # [B]
    groups: Groups  # [B], each rollout's group, 0 .. G-1
    loss_masks: tuple[BoolArray, ...]  # B of [T_i]
    components: Mapping[str, Wide] = field(default_factory=dict)  # [B] each; `gdpo` uses them
    baselines: Wide | None = None  # [B], reward of a greedy rollout of the same prompt, for `remax`
    penalties: tuple[FloatArray, ...] | None = None  # B of [T_i], subtracted from the reward per token
    penalty_sums: Wide | None = None  # [B], instead of `penalties` where their tokens are elsewhere
    values: tuple[FloatArray, ...] | None = None  # B of [T_i], the critic's estimates, for `gae`
    implicit: Wide | None = None  # [B], the rewards by which a preference algorithm compares pairs
    earlier_rewards: tuple[Mapping[int, float], ...] | None = None
    """Per rollout the parts of its reward that came earlier than at its end, by the token that they are credited to."""

    def __post_init__(self) -> None:
        num_rollouts = len(self.rewards)
        assert len(self.groups) == num_rollouts, f"{len(self.groups)} group numbers, {num_rollouts} rewards"
        assert len(self.loss_masks) == num_rollouts, f"{len(self.loss_masks)} loss masks, {num_rollouts} rewards"
        assert np.isfinite(self.rewards).all(), f"rewards are not finite: {self.rewards}"
        assert np.bincount(self.groups).all(), f"a group has no rollouts: {self.groups}"

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """[B], tokens the policy chose."""
        return np.array([num_true(mask) for mask in self.loss_masks], dtype=np.int64)

    @property
    def totals(self) -> Wide:
        """[B], each reward less all penalties of its tokens."""
        if self.penalty_sums is not None:
            return np.subtract(self.rewards, self.penalty_sums)
        if self.penalties is None:
            return self.rewards
        pairs = zip(self.penalties, self.loss_masks, strict=True)
        return np.subtract(self.rewards, [penalty[mask].sum(dtype=np.float64) for penalty, mask in pairs])


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """B of [T_i] each, 0 where the policy did not choose the token."""

    advantages: tuple[FloatArray, ...]
    returns: tuple[FloatArray, ...] | None = None
    """Targets of the critic; None without one."""


def estimate(config: EstimatorConfig, outcomes: Outcomes) -> Credit:
    """Return the credit of every token, as the recipe's estimator assigns it."""
    masks = outcomes.loss_masks
    if config.estimator is not None:
        return _of_user(config.estimator, outcomes)
    match config:
        case GaeConfig() | PrimeConfig() | ReinforcePpConfig() | RemaxConfig():
            raw = credit_tokens(config, outcomes)
            of_rollouts = np.array([moments(tokens) for tokens in raw.tokens])
            rows = step_scales(config, outcomes.rewards, outcomes.groups, of_rollouts)
            advantages = (scaled(config, tokens, row) for tokens, row in zip(raw.tokens, rows, strict=True))
            return Credit(advantages=placed(advantages, masks), returns=raw.returns)
        case GrpoConfig():
            per_rollout = grpo(outcomes.totals, outcomes.groups, normalize_std=config.normalize_std)
            scales = grpo_scales(outcomes.totals, outcomes.groups, normalize_std=config.normalize_std)
            return _to_go(_over_tokens(per_rollout, masks), scales, outcomes)
        case GroupConfig():
            per_rollout, scale = compare(config, outcomes.totals, outcomes.groups, outcomes.lengths)
            return _to_go(_over_tokens(per_rollout, masks), scale * has_others(outcomes.groups), outcomes)
        case _:
            return _over_tokens(_per_rollout(config, outcomes), masks)


@dataclass(frozen=True, slots=True, kw_only=True)
class RawCredit:
    """The advantages of the tokens that the policy chose, before they are compared with others of the step."""

    tokens: Sequence[Wide]  # per rollout
    returns: tuple[FloatArray, ...] | None = None


def credit_tokens(config: TokenCreditConfig, outcomes: Outcomes) -> RawCredit:
    """Return the credit that the estimator gives each rollout by itself: those of one step may be in many places."""
    match config:
        case GaeConfig():
            return _gae(outcomes, gamma=config.gamma, lam=config.lam)
        case PrimeConfig():
            return _prime(outcomes, right_from=config.right_from)
        case ReinforcePpConfig():
            return RawCredit(tokens=_rewards_to_go(outcomes, gamma=config.gamma))
        case RemaxConfig():
            return RawCredit(tokens=_remax(outcomes, gamma=config.gamma))
        case _:
            assert_never(config)


def moments(tokens: Wide) -> tuple[float, float, float]:
    """Return the number of tokens, their mean, and the sum of the squared distances from it."""
    mean = float(tokens.mean()) if len(tokens) else 0.0
    return len(tokens), mean, float(np.square(tokens - mean).sum())


def step_scales(config: TokenCreditConfig, rewards: Wide, groups: Groups, of_rollouts: Wide) -> Wide:
    """[B, 3], what is taken from the raw credit of each rollout, the factor after it, and what is added.

    `of_rollouts` has the moments of each rollout, [B, 3]. GAE and REINFORCE++: to mean 0 and variance 1 over the step's
    tokens. `prime`: the others' mean is taken from rewards of tokens, and RLOO of the outcome is added.
    """
    counts, means, squares = of_rollouts.T
    num_tokens, taken, factors, added = counts.sum(), 0.0 * means, 0.0 * means + 1, 0.0 * means
    if isinstance(config, PrimeConfig):
        has_other, sizes = has_others(groups), np.bincount(groups)
        taken = (np.bincount(groups, weights=means)[groups] - means) / np.maximum(sizes - 1, 1)[groups]
        factors, added = config.process_coef * has_other, rloo(rewards, groups) * has_other
    elif not isinstance(config, RemaxConfig):
        taken += float((counts * means).sum() / max(num_tokens, 1))
        variance = float((squares + counts * np.square(means - taken)).sum() / max(num_tokens - 1, 1))
        factors /= float(np.sqrt(variance + WHITEN_EPS))
    return np.stack([taken, factors, added], axis=1)


def scaled(config: TokenCreditConfig, tokens: Wide, row: Wide) -> Wide:
    """Return the advantages of one rollout from its raw credit and its row of `step_scales`."""
    compared: Wide = tokens - row[0]
    to_go = _discounted_sum(compared, config.gamma) if isinstance(config, PrimeConfig) else compared
    return to_go * float(row[1]) + float(row[2])


def _per_rollout(config: DistillConfig | GdpoConfig | PairConfig | SppoConfig, outcomes: Outcomes) -> Wide:
    """Return the advantage that all tokens of a rollout have. [B]"""
    match config:
        case DistillConfig():
            return np.zeros(len(outcomes.rewards))
        case GdpoConfig():
            return _gdpo(outcomes, config.weights)
        case PairConfig():
            assert outcomes.implicit is not None, "pairs without implicit rewards"
            pairs = find_pairs(config, outcomes.rewards, outcomes.groups)
            return pair_advantages(config, pairs, outcomes.implicit, outcomes.lengths)
        case SppoConfig():
            return sppo(outcomes.totals, outcomes.groups, eta=config.eta)
        case _:
            assert_never(config)


def _of_user(code: str, outcomes: Outcomes) -> Credit:
    """Return the credit that a user's function assigns, after a look at its shape."""
    found = load_code(code, key="algorithm.estimator")(outcomes)
    if isinstance(found, Credit):
        return found
    masks, name = outcomes.loss_masks, f"algorithm.estimator: {code}"
    try:
        parts = [np.asarray(part, dtype=np.float64) for part in found]  # type: ignore[attr-defined]
    except (TypeError, ValueError) as error:
        raise DataError(f"{name} returned a {type(found).__name__}; it must be numbers, one per rollout") from error
    if len(parts) != len(masks):
        raise DataError(f"{name} returned {len(parts)} advantages for {len(masks)} rollouts")
    for index, (part, mask) in enumerate(zip(parts, masks, strict=True)):
        if part.shape not in ((), mask.shape) or not np.isfinite(part).all():
            raise DataError(
                f"{name}: rollout {index}: {part.shape} with {mask.shape} tokens; it must be finite numbers"
            )
    return Credit(advantages=tuple((part * mask).astype(np.float32) for part, mask in zip(parts, masks, strict=True)))


def _to_go(credit: Credit, scales: Wide, outcomes: Outcomes) -> Credit:
    """Take from each token's advantage the rewards of earlier turns and tokens, which it did not cause.

    With the scale s of an estimator that is s * (R - baseline of the group), a token has s * (R to go - baseline): the
    baseline does not depend on the place, so the gradient stays unbiased.
    """
    if outcomes.earlier_rewards is None:
        return credit
    advantages = []
    each = zip(credit.advantages, scales, outcomes.earlier_rewards, outcomes.loss_masks, strict=True)
    for whole, scale, by_token, mask in each:
        earlier = np.zeros(len(mask) + 1)
        places, rewards = _places(by_token)
        earlier[places + 1] = rewards
        received = earlier[:-1].cumsum()
        advantages.append((whole - scale * received * mask).astype(np.float32) if received.any() else whole)
    return Credit(advantages=tuple(advantages))


def _gdpo(outcomes: Outcomes, weights: Mapping[str, float]) -> Wide:
    """Whitened weighted sum of each component's GRPO advantage, so that the components' scales do not matter."""
    if outcomes.earlier_rewards is not None and any(outcomes.earlier_rewards):
        raise DataError("gdpo weighs components of a score; rewards per turn or token are none: use another estimator")
    total = np.zeros_like(outcomes.rewards)
    for name, weight in weights.items():
        total += weight * grpo(outcomes.components[name], outcomes.groups, normalize_std=True)
    return whiten_rollouts(total, outcomes.lengths)


def _remax(outcomes: Outcomes, *, gamma: float) -> list[Wide]:
    """Reward to go - reward of the greedy rollout of the same prompt, per token."""
    assert outcomes.baselines is not None, "remax without the rewards of greedy rollouts"
    to_go = _rewards_to_go(outcomes, gamma=gamma)
    return [tokens - baseline for tokens, baseline in zip(to_go, outcomes.baselines, strict=True)]


def _rewards_to_go(outcomes: Outcomes, *, gamma: float) -> list[Wide]:
    """The reward, less later penalties, each discounted once per later token that the policy chose."""
    if outcomes.penalties is not None or outcomes.earlier_rewards is not None:
        return [_discounted_sum(tokens, gamma) for tokens in _token_rewards(outcomes)]
    lengths = outcomes.lengths
    discounts = gamma ** np.arange(lengths.max(initial=0), dtype=np.float64)
    return [reward * discounts[:length][::-1] for reward, length in zip(outcomes.rewards, lengths, strict=True)]


def _token_rewards(outcomes: Outcomes) -> Iterator[Wide]:
    """Yield per rollout the rewards of the tokens the policy chose: penalties on all, earlier rewards at their places,
    the rest of the reward on the last.
    """
    for index, (reward, mask) in enumerate(zip(outcomes.rewards, outcomes.loss_masks, strict=True)):
        penalties = None if outcomes.penalties is None else outcomes.penalties[index][mask]
        tokens = np.zeros(np.count_nonzero(mask)) if penalties is None else -penalties.astype(np.float64)
        places, earlier = _places({} if outcomes.earlier_rewards is None else outcomes.earlier_rewards[index])
        if len(places):
            tokens[np.cumsum(mask)[places] - 1] += earlier
        tokens[-1:] += reward - earlier.sum()
        yield tokens


def _places(by_token: Mapping[int, float]) -> tuple[npt.NDArray[np.int64], Wide]:
    """Return the tokens that have rewards of their own, and these rewards."""
    size = len(by_token)
    return np.fromiter(by_token, np.int64, size), np.fromiter(by_token.values(), np.float64, size)


def _prime(outcomes: Outcomes, *, right_from: float) -> RawCredit:
    """Return the rewards of tokens, and as returns what the reward model learns from: label - probability of right."""
    assert outcomes.values is not None, "prime without rewards of tokens"
    masks = outcomes.loss_masks
    tokens = [values[mask].astype(np.float64) for values, mask in zip(outcomes.values, masks, strict=True)]
    logits = np.array([part.sum() for part in tokens])
    residuals = (outcomes.rewards >= right_from) - np.exp(-np.logaddexp(0.0, -logits))
    return RawCredit(tokens=tokens, returns=_over_tokens(residuals, masks).advantages)


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


def _discounted_sum(tokens: Wide, discount: float) -> Wide:
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
def _powers(base: float) -> Wide:
    """Powers from 0 on: at most a block, and none so small that precision is lost."""
    count = _BLOCK if base == 1 else max(1, min(_BLOCK, int(_MAX_LOG_POWER / -np.log(base))))
    powers: Wide = base ** np.arange(count + 1, dtype=np.float64)
    return powers


def _over_tokens(per_rollout: Wide, loss_masks: tuple[BoolArray, ...]) -> Credit:
    """Give every token the policy chose the advantage of its rollout."""
    pairs = zip(per_rollout.astype(np.float32), loss_masks, strict=True)
    return Credit(
        advantages=tuple(
            # One number in memory, however many tokens have it.
            repeated(value * mask[0], len(mask)) if is_repeated(mask) else np.multiply(mask, value)
            for value, mask in pairs
        )
    )


def placed(chosen: Iterable[Wide], loss_masks: tuple[BoolArray, ...]) -> tuple[FloatArray, ...]:
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
