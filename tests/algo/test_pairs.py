"""Implicit rewards, losses of pairs and their gradients, against numbers by hand and against autograd."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megarl.algo.pairs import Pairs, find_pairs, implicit_rewards, measure_pairs, pair_advantages
from megarl.config.algorithm import DpoConfig, OnlineDpoConfig, PairConfig, SpinConfig
from megarl.results import PreferenceStats
from megarl.types import Estimates, FloatArray

MASKS = tuple(np.array(mask) for mask in ([False, True, True], [True, True, True, True]))
LOGPROBS = (np.array([9.0, -1.0, -2.0], np.float32), np.array([-1.0, -1.0, -1.5, -1.5], np.float32))
REFERENCE = (np.array([-9.0, -2.0, -2.5], np.float32), np.array([-1.0, -1.0, -1.0, -1.5], np.float32))
PAIR = Pairs(better=np.array([0]), worse=np.array([1]))
LENGTHS = np.array([2, 4])
SIMPO = {"preference": "simpo", "simpo": {"beta": 2.0, "gamma": 1.0}, "kl": None}


def config_of(**keys: object) -> PairConfig:
    return DpoConfig.model_validate({"kind": "dpo", **keys})


@pytest.mark.parametrize(
    ("keys", "rewards", "loss"),
    [
        # 0.1 * (-3 + 4.5) and 0.1 * (-5 + 4.5); -log sigmoid(0.2)
        ({}, (0.15, -0.05), 0.598139),
        # 0.8 * 0.598139 - 0.2 * log sigmoid(-0.2)
        ({"label_smoothing": 0.2}, (0.15, -0.05), 0.638139),
        # (2 - 1 / (2 * 0.1))^2
        ({"preference": "ipo"}, (0.15, -0.05), 9.0),
        # 2 * -3 / 2 and 2 * -5 / 4; -log sigmoid(-0.5 - 1)
        (SIMPO, (-3.0, -2.5), 1.701413),
    ],
    ids=["sigmoid", "smoothed", "ipo", "simpo"],
)
def test_a_pair_has_the_golden_numbers(keys: dict[str, object], rewards: tuple[float, float], loss: float) -> None:
    config = config_of(**keys)
    implicit = implicit_rewards(config, Estimates(logprobs=LOGPROBS, reference_logprobs=REFERENCE), MASKS)
    assert implicit == pytest.approx(rewards, abs=1e-6)
    stats = measure_pairs(config, PAIR, implicit)
    assert stats is not None
    assert stats.loss == pytest.approx(loss, abs=1e-6)
    assert stats.margin == pytest.approx(rewards[0] - rewards[1], abs=1e-6)
    assert (stats.chosen_reward, stats.rejected_reward) == pytest.approx(rewards, abs=1e-6)
    assert (stats.accuracy, stats.num_pairs) == (float(rewards[0] > rewards[1]), 1)


@pytest.mark.parametrize("keys", [{}, {"label_smoothing": 0.2}, {"preference": "ipo"}, SIMPO], ids=str)
def test_advantages_are_the_negative_gradient_of_the_loss(keys: dict[str, object]) -> None:
    """It holds at every token: the trainer sums -A * logp over tokens and divides by the number of rollouts."""
    config = config_of(**keys)
    leaves = [torch.tensor(array, dtype=torch.float64, requires_grad=True) for array in LOGPROBS]
    chosen, rejected = (leaf[torch.from_numpy(mask)] for leaf, mask in zip(leaves, MASKS, strict=True))
    bases = [float(array[mask].sum()) for array, mask in zip(REFERENCE, MASKS, strict=True)]
    margin = (chosen.sum() - bases[0]) - (rejected.sum() - bases[1])
    logsigmoid = torch.nn.functional.logsigmoid
    match keys.get("preference"):
        case "ipo":
            loss = (margin - 1 / (2 * 0.1)) ** 2
        case "simpo":
            loss = -logsigmoid(2.0 * (chosen.mean() - rejected.mean()) - 1.0)
        case _:
            share = float(str(keys.get("label_smoothing", 0.0)))
            loss = -(1 - share) * logsigmoid(0.1 * margin) - share * logsigmoid(-0.1 * margin)
    loss.backward()  # type: ignore[no-untyped-call]
    implicit = implicit_rewards(config, Estimates(logprobs=LOGPROBS, reference_logprobs=REFERENCE), MASKS)
    stats = measure_pairs(config, PAIR, implicit)
    assert stats is not None
    assert stats.loss == pytest.approx(loss.item(), rel=1e-9)
    advantages = pair_advantages(config, PAIR, implicit, LENGTHS)
    for leaf, mask, advantage in zip(leaves, MASKS, advantages, strict=True):
        assert leaf.grad is not None
        np.testing.assert_allclose(-leaf.grad.numpy(), np.where(mask, advantage / 2, 0.0), rtol=1e-6)


@pytest.mark.parametrize("num_empty", [0, 1, 3])
def test_the_mean_is_over_pairs_whatever_rollouts_have_no_loss_tokens(num_empty: int) -> None:
    """The trainer divides by the rollouts that have some, which the advantages must make the mean over pairs."""
    lengths = np.array([3, 3, 3, 3, 3, *[0] * num_empty])
    pairs = Pairs(better=np.array([0, 2]), worse=np.array([1, 3]))
    advantages = pair_advantages(config_of(), pairs, np.zeros(len(lengths)), lengths)
    # sigmoid(0) times beta 0.1, over 2 pairs.
    assert (advantages[:4] / 5).tolist() == pytest.approx([0.025, -0.025, 0.025, -0.025])


def test_extreme_margins_neither_overflow_nor_vanish_from_the_wrong_side() -> None:
    config = config_of()
    far = np.array([1e4, 0.0])
    assert measure_pairs(config, PAIR, far) == PreferenceStats(
        num_pairs=1, loss=0.0, accuracy=1.0, margin=1e4, chosen_reward=1e4, rejected_reward=0.0
    )
    wrong = measure_pairs(config, PAIR, -far)
    assert wrong is not None
    assert wrong.loss == 1e4
    assert pair_advantages(config, PAIR, -far, LENGTHS).tolist() == pytest.approx([0.2, -0.2])


def test_a_group_gives_its_best_and_its_worst_and_a_tie_gives_nothing() -> None:
    found = find_pairs(config_of(), np.array([0.0, 2.0, 1.0, 1.0, 1.0]), np.array([0, 0, 0, 1, 1]))
    assert (found.better.tolist(), found.worse.tolist()) == ([1], [0])
    nothing = find_pairs(config_of(), np.array([1.0, 1.0]), np.array([0, 0]))
    assert measure_pairs(OnlineDpoConfig(kind="online_dpo"), nothing, np.zeros(2)) is None
    assert not pair_advantages(config_of(), nothing, np.zeros(2), LENGTHS).any()


def test_spin_compares_the_demonstration_of_a_group_with_every_answer_of_the_policy() -> None:
    config = SpinConfig(kind="spin")
    found = find_pairs(config, np.array([1.0, 0.0, 1.0, 1.0, 1.0]), np.array([0, 0, 0, 1, 1]))
    assert (found.better.tolist(), found.worse.tolist()) == ([2, 2, 4], [0, 1, 3])
    # Log-ratios 2, 0, 1 and 0, 0 with beta 0.1: sigmoid(0.1), sigmoid(-0.1) and 1/2 push the demonstrations.
    implicit = np.array([0.2, 0.0, 0.1, 0.0, 0.0])
    advantages = pair_advantages(config, found, implicit, np.ones(5, np.int64)) * 3 / 5
    pushes = np.array([0.524979, 0.475021, 0.5]) * 0.1
    assert advantages == pytest.approx([-pushes[0], -pushes[1], pushes[0] + pushes[1], -pushes[2], pushes[2]], abs=1e-7)
    stats = measure_pairs(config, found, implicit)
    assert stats is not None
    assert stats.loss == pytest.approx((0.744397 + 0.644397 + 0.693147) / 3, abs=1e-6)


def test_statistics_of_parts_are_weighted_by_their_pairs() -> None:
    def stats(num_pairs: int, number: float) -> PreferenceStats:
        return PreferenceStats(
            num_pairs=num_pairs,
            loss=number,
            accuracy=number,
            margin=number,
            chosen_reward=number,
            rejected_reward=number,
        )

    assert PreferenceStats.merge([stats(1, 0.0), stats(3, 1.0)]) == stats(4, 0.75)


def test_what_the_policy_did_not_choose_does_not_count() -> None:
    def rewards(first: float) -> FloatArray:
        changed = (np.array([first, -1.0, -2.0], np.float32), LOGPROBS[1])
        found = implicit_rewards(config_of(), Estimates(logprobs=changed, reference_logprobs=REFERENCE), MASKS)
        return found.astype(np.float32)

    assert rewards(9.0).tolist() == rewards(-50.0).tolist()
