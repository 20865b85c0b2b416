from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algo.advantage import Outcomes
from megarl.algo.estimators import choose_estimator
from megarl.algo.other_losses import OutcomeTokens
from megarl.config.algorithm import (
    EstimatorConfig,
    GaeConfig,
    GdpoConfig,
    GroupConfig,
    GrpoConfig,
    PrimeConfig,
    ReinforcePpConfig,
    RemaxConfig,
)
from megarl.types import BoolArray, FloatArray

LENGTHS = [2, 3, 4, 1]
GRPO = GrpoConfig(kind="grpo")
DR_GRPO = GrpoConfig(kind="grpo", normalize_std=False)
RLOO = GroupConfig(kind="rloo")
OPO = GroupConfig(kind="opo")
GPG = GroupConfig(kind="gpg")
PASS_K = GroupConfig(kind="grpo_passk")
PP = ReinforcePpConfig(kind="reinforce_pp")
PP_BASELINE = GroupConfig(kind="reinforce_pp_baseline")
REMAX = RemaxConfig(kind="remax")
GDPO = GdpoConfig(kind="gdpo", weights={"right": 1.0, "form": 1.0})
GROUPS = st.lists(st.lists(st.floats(-10, 10), min_size=1, max_size=6), min_size=1, max_size=5)
MASKS = st.lists(st.lists(st.booleans(), min_size=1, max_size=7), min_size=1, max_size=5)


def outcomes(groups: Sequence[Sequence[float]], lengths: Sequence[int] | None = None) -> Outcomes:
    rewards = [reward for group in groups for reward in group]
    return Outcomes(
        rewards=np.array(rewards, dtype=np.float64),
        groups=np.repeat(np.arange(len(groups)), [len(group) for group in groups]),
        loss_masks=tuple(np.ones(length, dtype=np.bool_) for length in lengths or [1] * len(rewards)),
        components={"right": np.array(rewards, dtype=np.float64), "form": np.array([1.0, 1.0, 0.0, 0.0])},
        baselines=np.full(len(rewards), 0.25),
    )


def values(config: EstimatorConfig, groups: Sequence[Sequence[float]]) -> list[float]:
    return [float(tokens[0]) for tokens in choose_estimator(config)(outcomes(groups)).advantages]


def slow_grpo(group: Sequence[float], *, normalize_std: bool) -> list[float]:
    """The definition, one rollout at a time."""
    mean = sum(group) / len(group)
    if len(group) == 1:
        return [0.0]
    std = (sum((reward - mean) ** 2 for reward in group) / (len(group) - 1)) ** 0.5
    return [(reward - mean) / (std + 1e-6) if normalize_std else reward - mean for reward in group]


@pytest.mark.parametrize(
    ("config", "golden"),
    [
        (GRPO, [1.499997, -0.499999, -0.499999, -0.499999]),
        (DR_GRPO, [0.75, -0.25, -0.25, -0.25]),
        (RLOO, [1, -0.333333, -0.333333, -0.333333]),
        (OPO, [0.8, -0.2, -0.2, -0.2]),
        (GPG, [3, -1, -1, -1]),
        (PASS_K, [1.999996, 0, 0, 0]),
        (PP, [1.897367, -0.474342, -0.474342, -0.474342]),
        (PP_BASELINE, [1.897367, -0.474342, -0.474342, -0.474342]),
        (REMAX, [0.75, -0.25, -0.25, -0.25]),
        (GDPO, [1.621037, 0.306341, -0.832219, -0.832219]),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_one_right_answer_of_four_gives_the_golden_numbers(config: EstimatorConfig, golden: list[float]) -> None:
    advantages = choose_estimator(config)(outcomes([[1, 0, 0, 0]], LENGTHS)).advantages
    assert [len(tokens) for tokens in advantages] == LENGTHS
    assert {tokens.dtype for tokens in advantages} == {np.dtype(np.float32)}
    for tokens, value in zip(advantages, golden, strict=True):
        np.testing.assert_allclose(tokens, value, atol=1e-5)


@given(groups=GROUPS, normalize_std=st.booleans())
def test_every_group_is_judged_on_its_own(groups: list[list[float]], normalize_std: bool) -> None:
    expected = [value for group in groups for value in slow_grpo(group, normalize_std=normalize_std)]
    np.testing.assert_allclose(values(GRPO if normalize_std else DR_GRPO, groups), expected, rtol=1e-5, atol=1e-5)


@given(groups=GROUPS)
def test_rloo_compares_with_the_mean_of_the_others(groups: list[list[float]]) -> None:
    expected = [
        reward - (sum(group) - reward) / (len(group) - 1) if len(group) > 1 else 0.0
        for group in groups
        for reward in group
    ]
    np.testing.assert_allclose(values(RLOO, groups), expected, rtol=1e-5, atol=1e-5)


@given(groups=GROUPS)
def test_only_the_best_of_a_group_counts_at_pass_k(groups: list[list[float]]) -> None:
    advantages = iter(values(PASS_K, groups))
    for group in groups:
        of_group = [next(advantages) for _ in group]
        ranked = sorted(group, reverse=True)
        if len(group) == 1 or ranked[0] == ranked[1]:
            assert of_group == [0] * len(group)
            continue
        lead = (ranked[0] - ranked[1]) / (float(np.std(group, ddof=1)) + 1e-6)
        expected = [lead if reward == ranked[0] else 0.0 for reward in group]
        np.testing.assert_allclose(of_group, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", [GRPO, DR_GRPO, RLOO, OPO, GPG, PASS_K], ids=lambda config: config.kind)
def test_a_group_of_one_or_of_equals_gets_nothing(config: EstimatorConfig) -> None:
    assert values(config, [[3.0], [0.1, 0.1, 0.1]]) == pytest.approx([0, 0, 0, 0], abs=1e-9)


@pytest.mark.parametrize(
    "config",
    [
        ReinforcePpConfig(kind="reinforce_pp", gamma=0.9),
        PP_BASELINE,
        GdpoConfig(kind="gdpo", weights={"right": 2.0, "form": 0.5}),
    ],
    ids=lambda config: config.kind,
)
def test_whitened_over_the_tokens_of_the_step(config: EstimatorConfig) -> None:
    tokens = np.concatenate(choose_estimator(config)(outcomes([[1, 0.5], [0, -2]], [5, 1, 7, 3])).advantages)
    assert tokens.mean() == pytest.approx(0, abs=1e-6)
    assert tokens.std(ddof=1) == pytest.approx(1, abs=1e-6)


def test_a_reward_is_discounted_by_the_policys_tokens_only() -> None:
    masks = (np.array([True, False, True, True, False]), np.array([True]))
    step = Outcomes(
        rewards=np.array([1.0, 2.0]), groups=np.array([0, 1]), loss_masks=masks, baselines=np.array([0.0, 0.5])
    )
    first, second = choose_estimator(RemaxConfig(kind="remax", gamma=0.5))(step).advantages
    assert first.tolist() == [0.25, 0, 0.5, 1, 0]
    assert second.tolist() == [1.5]


@pytest.mark.parametrize("config", [GRPO, RLOO, OPO, GPG, PP, REMAX, PASS_K, GDPO], ids=lambda config: config.kind)
def test_tokens_the_policy_did_not_choose_get_nothing(config: EstimatorConfig) -> None:
    masks = (np.array([True, False, True]), np.array([False, True]))
    rewards = np.array([1.0, 0.0])
    step = Outcomes(
        rewards=rewards,
        groups=np.array([0, 0]),
        loss_masks=masks,
        components={"right": rewards, "form": rewards},
        baselines=rewards + 1,
    )
    first, second = choose_estimator(config)(step).advantages
    assert first[1] == 0
    assert first[0] == first[2] != 0
    assert second[0] == 0


def test_a_reward_that_is_not_finite_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="not finite"):
        Outcomes(rewards=np.array([np.nan]), groups=np.array([0]), loss_masks=(np.array([True]),))


def slow_gae(
    rewards: FloatArray, value: FloatArray, mask: BoolArray, *, gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """The definition, backwards, one token at a time: raw advantages and returns."""
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    next_value = next_advantage = 0.0
    for t in reversed(range(len(mask))):
        if mask[t]:
            delta = float(rewards[t]) + gamma * next_value - float(value[t])
            next_advantage = delta + gamma * lam * next_advantage
            next_value = float(value[t])
            advantages[t], returns[t] = next_advantage, next_advantage + next_value
    return advantages, returns


def float32(*numbers: float) -> FloatArray:
    return np.array(numbers, dtype=np.float32)


def outcomes_of(
    rewards: tuple[FloatArray, ...], values: tuple[FloatArray, ...], loss_masks: tuple[BoolArray, ...]
) -> Outcomes:
    """Give rewards per token, as penalties of the opposite sign."""
    return Outcomes(
        rewards=np.zeros(len(rewards)),
        groups=np.arange(len(rewards)),
        loss_masks=loss_masks,
        penalties=tuple(-tokens for tokens in rewards),
        values=values,
    )


def gae(outcomes: Outcomes, *, gamma: float, lam: float) -> tuple[tuple[FloatArray, ...], tuple[FloatArray, ...]]:
    credit = choose_estimator(GaeConfig(kind="gae", gamma=gamma, lam=lam))(outcomes)
    assert credit.returns is not None
    return credit.advantages, credit.returns


def test_gae_has_the_golden_numbers() -> None:
    value = (float32(0.5, 0.6, 0.7),)
    outcomes = Outcomes(
        rewards=np.ones(1), groups=np.zeros(1, np.int64), loss_masks=(np.array([True] * 3),), values=value
    )
    advantages, returns = gae(outcomes, gamma=1.0, lam=0.95)
    np.testing.assert_allclose(advantages[0], [0.991344, 0.017092, -1.008436], atol=1e-5)
    np.testing.assert_allclose(returns[0], [0.96575, 0.985, 1], atol=1e-5)
    np.testing.assert_allclose(returns[0] - value[0], [0.46575, 0.385, 0.3], atol=1e-5)


@given(masks=MASKS, seed=st.integers(0, 1000), gamma=st.floats(0.5, 1), lam=st.floats(0, 1))
def test_gae_equals_a_plain_loop(masks: list[list[bool]], seed: int, gamma: float, lam: float) -> None:
    random = np.random.default_rng(seed)
    loss_masks = tuple(np.array(mask) for mask in masks)
    rewards, value = (tuple(random.standard_normal(len(mask)).astype(np.float32) for mask in masks) for _ in range(2))
    advantages, returns = gae(outcomes_of(rewards, value, loss_masks), gamma=gamma, lam=lam)
    slow = [slow_gae(*each, gamma=gamma, lam=lam) for each in zip(rewards, value, loss_masks, strict=True)]
    chosen = np.concatenate([np.array(raw)[mask] for (raw, _), mask in zip(slow, loss_masks, strict=True)])
    if len(chosen) > 1:
        std = np.sqrt(chosen.var(ddof=1) + 1e-8)
        for tokens, (raw, _), mask in zip(advantages, slow, loss_masks, strict=True):
            np.testing.assert_allclose(tokens, mask * (np.array(raw) - chosen.mean()) / std, rtol=1e-4, atol=1e-5)
    for tokens, (_, expected) in zip(returns, slow, strict=True):
        np.testing.assert_allclose(tokens, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lam", [0.0, 0.01, 0.5, 0.95, 0.9999, 1.0])
def test_long_rollouts_are_summed_without_overflow_or_loss(lam: float) -> None:
    random = np.random.default_rng(0)
    lengths = (9001, 1, 4096, 4097)
    masks = tuple(random.random(length) < 0.9 for length in lengths)
    step = Outcomes(
        rewards=random.standard_normal(len(lengths)),
        groups=np.arange(len(lengths)),
        loss_masks=masks,
        values=tuple(random.standard_normal(length).astype(np.float32) for length in lengths),
    )
    assert step.values is not None
    for returns, reward, value, mask in zip(
        gae(step, gamma=1.0, lam=lam)[1], step.rewards, step.values, masks, strict=True
    ):
        rewards = np.zeros(len(mask), dtype=np.float32)
        rewards[np.flatnonzero(mask)[-1:]] = reward
        np.testing.assert_allclose(returns, slow_gae(rewards, value, mask, gamma=1.0, lam=lam)[1], rtol=1e-5, atol=1e-5)


def test_prime_has_the_golden_numbers() -> None:
    """Outcome: 1 and 0 of two rollouts. Mean rewards of tokens: 0.3 and -0.1, each the other's baseline."""
    config = PrimeConfig(kind="prime", gamma=0.5, process_coef=2.0)
    credit = choose_estimator(config)(
        Outcomes(
            rewards=np.array([1.0, 0.0]),
            groups=np.array([0, 0]),
            loss_masks=(np.array([True, False, True]), np.array([True, True])),
            values=(float32(0.2, 9.0, 0.4), float32(-0.3, 0.1)),
            are_right=np.array([True, False]),
        ),
    )
    # 1 + 2 * (0.3 + 0.5 * 0.5), 1 + 2 * 0.5; -1 + 2 * (-0.6 + 0.5 * -0.2), -1 + 2 * -0.2
    np.testing.assert_allclose(credit.advantages[0], [2.1, 0, 2.0], atol=1e-6)
    np.testing.assert_allclose(credit.advantages[1], [-2.4, -1.4], atol=1e-6)
    assert credit.returns is not None
    # -log sigmoid(0.6) and log(1 - sigmoid(-0.2))
    np.testing.assert_allclose(credit.returns[0], [0.437488, 0, 0.437488], atol=1e-6)
    np.testing.assert_allclose(credit.returns[1], [-0.598139, -0.598139], atol=1e-6)


@pytest.mark.parametrize("is_right", [True, False])
@pytest.mark.parametrize("logit", [-400.0, -104.0, -20.0, -17.0, -0.5, 0.0, 3.0, 17.0, 38.0, 110.0])
def test_primes_reward_model_learns_the_cross_entropy_however_sure_it_is(logit: float, is_right: bool) -> None:
    """Loss, gradient and label are those of float64, also where the probability is 0 or 1 in float32."""
    outcomes = Outcomes(
        rewards=np.ones(1),
        groups=np.zeros(1, np.int64),
        loss_masks=(np.ones(2, np.bool_),),
        values=(float32(logit, 0.0),),
        are_right=np.array([is_right]),
    )
    returns = choose_estimator(PrimeConfig(kind="prime"))(outcomes).returns
    assert returns is not None
    found = OutcomeTokens.of(torch.from_numpy(returns[0].copy()))
    exact = torch.tensor(logit, dtype=torch.float64, requires_grad=True)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(exact, torch.tensor(float(is_right)).double())
    loss.backward()  # type: ignore[no-untyped-call]
    assert exact.grad is not None
    assert found.losses.tolist() == pytest.approx([loss.item()] * 2, rel=1e-6, abs=1e-38)
    assert found.residuals.tolist() == pytest.approx([-exact.grad.item()] * 2, rel=1e-6, abs=1e-15)
    assert found.labels.tolist() == [float(is_right)] * 2


def test_prime_credits_nothing_to_a_rollout_without_others() -> None:
    mask = (np.array([True]),)
    outcomes = Outcomes(rewards=np.ones(1), groups=np.zeros(1, np.int64), loss_masks=mask, values=(float32(0.3),))
    outcomes = replace(outcomes, are_right=np.array([True]))
    assert not choose_estimator(PrimeConfig(kind="prime"))(outcomes).advantages[0].any()
