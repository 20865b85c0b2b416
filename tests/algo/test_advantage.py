from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.algo.advantage import Outcomes, estimate


def outcomes(groups: Sequence[Sequence[float]], lengths: Sequence[int] | None = None) -> Outcomes:
    rewards = [reward for group in groups for reward in group]
    return Outcomes(
        rewards=np.array(rewards, dtype=np.float64),
        groups=np.repeat(np.arange(len(groups)), [len(group) for group in groups]),
        loss_masks=tuple(np.ones(length, dtype=np.bool_) for length in lengths or [1] * len(rewards)),
    )


def values(groups: Sequence[Sequence[float]], *, normalize_std: bool = True) -> list[float]:
    return [float(tokens[0]) for tokens in estimate("grpo", outcomes(groups), normalize_std=normalize_std)]


def slow_grpo(group: Sequence[float], *, normalize_std: bool) -> list[float]:
    """The definition, one rollout at a time."""
    mean = sum(group) / len(group)
    if len(group) == 1:
        return [0.0]
    std = (sum((reward - mean) ** 2 for reward in group) / (len(group) - 1)) ** 0.5
    return [(reward - mean) / (std + 1e-6) if normalize_std else reward - mean for reward in group]


@pytest.mark.parametrize(
    ("normalize_std", "golden"),
    [(True, [1.499997, -0.499999, -0.499999, -0.499999]), (False, [0.75, -0.25, -0.25, -0.25])],
)
def test_one_right_answer_of_four_gives_the_golden_numbers(normalize_std: bool, golden: list[float]) -> None:
    advantages = estimate("grpo", outcomes([[1, 0, 0, 0]], [2, 3, 4, 1]), normalize_std=normalize_std)
    assert [len(tokens) for tokens in advantages] == [2, 3, 4, 1]
    assert {tokens.dtype for tokens in advantages} == {np.dtype(np.float32)}
    for tokens, value in zip(advantages, golden, strict=True):
        np.testing.assert_allclose(tokens, value, atol=1e-6)


@given(
    groups=st.lists(st.lists(st.floats(-10, 10), min_size=1, max_size=6), min_size=1, max_size=5),
    normalize_std=st.booleans(),
)
def test_every_group_is_judged_on_its_own(groups: list[list[float]], normalize_std: bool) -> None:
    expected = [value for group in groups for value in slow_grpo(group, normalize_std=normalize_std)]
    np.testing.assert_allclose(values(groups, normalize_std=normalize_std), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("normalize_std", [True, False])
def test_a_group_of_one_or_of_equals_gets_nothing(normalize_std: bool) -> None:
    assert values([[3.0], [0.1, 0.1, 0.1]], normalize_std=normalize_std) == pytest.approx([0, 0, 0, 0], abs=1e-9)


def test_tokens_the_policy_did_not_choose_get_nothing() -> None:
    masks = (np.array([True, False, True]), np.array([False, True]))
    step = Outcomes(rewards=np.array([1.0, 0.0]), groups=np.array([0, 0]), loss_masks=masks)
    first, second = estimate("grpo", step, normalize_std=False)
    assert first.tolist() == [0.5, 0, 0.5]
    assert second.tolist() == [0, -0.5]


def test_a_reward_that_is_not_finite_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="not finite"):
        outcomes([[float("nan"), 0.0]])
