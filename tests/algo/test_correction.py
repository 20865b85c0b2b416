from __future__ import annotations

import math

import pytest
import torch

from megarl.algo.correction import correction_weights
from megarl.algo.loss import Segments
from megarl.algo.objective import mismatch
from megarl.config.algorithm import CorrectionConfig, IcepopConfig, MaskConfig, TisConfig

LOG_RATIOS = [0.9, -0.2, 0.1]


def corrected(config: CorrectionConfig, log_ratios: list[float] = LOG_RATIOS) -> list[float]:
    """The weights of one sequence, then of a second one that trainer and engine agree on."""
    num_tokens = len(log_ratios)
    rollout = torch.full((num_tokens + 2,), -3.0)
    old = rollout + torch.tensor([*log_ratios, 0.0, 0.0])
    segments = Segments.of(
        torch.ones(num_tokens + 2, dtype=torch.bool), torch.tensor([0, num_tokens, num_tokens + 2], dtype=torch.int32)
    )
    weights: list[float] = correction_weights(
        config, old_logprobs=old, rollout_logprobs=rollout, segments=segments
    ).tolist()
    return weights


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (TisConfig(kind="tis"), [2, 0.818731, 1.105171, 1, 1]),
        (TisConfig(kind="tis", level="sequence"), [2, 2, 2, 1, 1]),
        (TisConfig(kind="tis", level="sequence", max_weight=3), [2.225541] * 3 + [1, 1]),
        (IcepopConfig(kind="icepop", min_weight=0.9, max_weight=2), [0, 0, 1.105171, 1, 1]),
        (IcepopConfig(kind="icepop", level="sequence", max_weight=2), [0, 0, 0, 1, 1]),
        (IcepopConfig(kind="icepop", level="sequence", max_weight=3), [2.225541] * 3 + [1, 1]),
        (MaskConfig(kind="mask", measure="k3", highest=0.1), [0, 1, 1, 1, 1]),
        (MaskConfig(kind="mask", measure="k2", highest=0.01), [0, 0, 1, 1, 1]),
        (MaskConfig(kind="mask", measure="k1", lowest=-0.15, highest=0.15), [0, 0, 1, 1, 1]),
        (MaskConfig(kind="mask", level="sequence", measure="k3", highest=0.1945), [0, 0, 0, 1, 1]),
        (MaskConfig(kind="mask", level="sequence", measure="k3", highest=0.1946), [1] * 5),
    ],
    ids=str,
)
def test_weights_have_the_golden_values(config: CorrectionConfig, expected: list[float]) -> None:
    assert corrected(config) == pytest.approx(expected, abs=1e-5)


def test_one_token_that_is_far_off_condemns_its_sequence_by_as_much_as_it_is_off() -> None:
    log_ratios = [-10.0] + [0.0] * 1999  # the engine was 22,026 times as sure
    config = MaskConfig(kind="mask", level="sequence", measure="k3", highest=10.9)
    assert corrected(config, log_ratios)[0] == 1  # k3 of the other direction is 9.0
    far = MaskConfig(kind="mask", level="sequence", measure="k3", highest=12)
    assert corrected(config, [10.0] + [0.0] * 1999) == [0] * 2000 + [1, 1]  # (e^10 - 11) / 2000 = 11.008
    assert corrected(far, [10.0] + [0.0] * 1999) == [1] * 2002


def test_k1_is_positive_where_the_engine_was_surer() -> None:
    config = MaskConfig(kind="mask", measure="k1", highest=0.15)
    assert corrected(config) == [1, 0, 1, 1, 1]


def test_a_sequence_whose_product_would_overflow_has_a_bounded_weight() -> None:
    wide = IcepopConfig(kind="icepop", level="sequence", max_weight=1e9)
    assert corrected(wide, [60.0, 60.0])[:2] == pytest.approx([4.851652e8] * 2, rel=1e-5)


def test_weights_carry_no_gradient() -> None:
    old = torch.zeros(2, requires_grad=True)
    segments = Segments.of(torch.ones(2, dtype=torch.bool), torch.tensor([0, 2]))
    weights = correction_weights(
        TisConfig(kind="tis"), old_logprobs=old, rollout_logprobs=torch.zeros(2), segments=segments
    )
    assert not weights.requires_grad


def test_the_mismatch_has_the_golden_values() -> None:
    rollout = torch.full((3,), -3.0, dtype=torch.float64)
    measured = mismatch(rollout + torch.tensor(LOG_RATIOS, dtype=torch.float64), rollout)
    assert measured.k3.mean().item() == pytest.approx(0.194502, abs=1e-5)
    assert (measured.weight.sum() ** 2 / (3 * measured.weight.square().sum())).item() == pytest.approx(
        0.871109, abs=1e-5
    )
    assert measured.kl.mean().item() == pytest.approx(-0.8 / 3)
    ratios = torch.tensor(LOG_RATIOS, dtype=torch.float64).exp()
    assert measured.chi2.tolist() == pytest.approx((ratios**2 - 1).tolist())
    assert measured.distance.tolist() == pytest.approx(((ratios - 1).abs() * rollout.exp()).tolist())


def test_the_mismatch_is_not_flattened() -> None:
    measured = mismatch(torch.tensor([-1.0]), torch.tensor([-11.0]))
    assert measured.k3.item() == pytest.approx(math.exp(10) - 11, rel=1e-6)


def test_where_both_agree_nothing_is_amiss() -> None:
    logprobs = torch.tensor([-0.5, -2.0])
    measured = mismatch(logprobs, logprobs)
    assert [column.tolist() for column in (measured.distance, measured.kl, measured.k3, measured.chi2)] == [[0, 0]] * 4
    assert measured.weight.tolist() == [1, 1]
