"""Rewards that come earlier than at the end of a rollout: of turns and of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from megarl.errors import RewardError
from megarl.types import BoolArray, FloatArray, Rollout, Score

Float64Array: TypeAlias = npt.NDArray[np.float64]


def without_earlier(
    advantages: Sequence[FloatArray],
    scales: Float64Array,
    early_rewards: Sequence[Mapping[int, float]],
    loss_masks: Sequence[BoolArray],
) -> tuple[FloatArray, ...]:
    """Take from each token's advantage the rewards of earlier turns and tokens, which it did not cause.

    With the scale s of an estimator that is s * (R - baseline of the group), a token has s * (R to go - baseline): the
    baseline does not depend on the place, so the gradient stays unbiased.
    """
    left = []
    for whole, scale, by_token, mask in zip(advantages, scales, early_rewards, loss_masks, strict=True):
        earlier = np.zeros(len(mask) + 1)
        places, rewards = places_of(by_token)
        earlier[places + 1] = rewards
        received = earlier[:-1].cumsum()
        left.append((whole - scale * received * mask).astype(np.float32) if received.any() else whole)
    return tuple(left)


def places_of(by_token: Mapping[int, float]) -> tuple[npt.NDArray[np.int64], Float64Array]:
    """Return the tokens that have rewards of their own, and these rewards."""
    size = len(by_token)
    return np.fromiter(by_token, np.int64, size), np.fromiter(by_token.values(), np.float64, size)


def rewards_by_token(rollout: Rollout, score: Score, uid: str) -> dict[int, float]:
    """Return the rewards of turns, by the last token of each, and of tokens."""
    by_token = {turn.end - 1: turn.reward for turn in rollout.episode.turns if turn.reward}
    if score.tokens is None:
        return by_token
    chosen, rewards = np.flatnonzero(rollout.loss_mask), np.array(score.tokens)
    if len(rewards) == rollout.num_tokens and not rewards[~rollout.loss_mask].any():
        rewards = rewards[chosen]  # of all tokens of an episode
    if len(rewards) != len(chosen):
        raise RewardError(
            f"prompt {uid}: the score has {len(rewards)} rewards in `tokens`, and the policy chose {len(chosen)} "
            "tokens: return one for each"
        )
    for place in np.flatnonzero(rewards).tolist():
        token = int(chosen[place])
        by_token[token] = by_token.get(token, 0.0) + float(rewards[place])
    return by_token
