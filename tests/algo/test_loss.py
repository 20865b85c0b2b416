from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megarl.algo.loss import PolicyTokens, Segments, aggregate, kl, masked_sum
from megarl.algo.objective import policy_loss
from megarl.algo.other_losses import value_loss
from megarl.config.algorithm import (
    Aggregation,
    CispoLossConfig,
    GmpoLossConfig,
    GpgLossConfig,
    GspoLossConfig,
    KlEstimate,
    LossConfig,
    PpoLossConfig,
    SapoLossConfig,
    SppoLossConfig,
)
from tests.algo.packs import one_sequence

TOLERANCE = 1e-5
NAN = torch.nan
SEGMENTS = Segments.of(
    torch.tensor([True, True, False, False, True, False, False]), torch.tensor([0, 3, 5, 7], dtype=torch.int32)
)
VALUES = torch.tensor([1.0, 2.0, NAN, NAN, 5.0, NAN, NAN])
PPO = PpoLossConfig(kind="ppo", clip_low=0.2, clip_high=0.28)


WIDE_GSPO = GspoLossConfig(kind="gspo", clip_low=0.5, clip_high=0.5)
GSPO = GspoLossConfig(kind="gspo")
CISPO = CispoLossConfig(kind="cispo", clip_low=0.2, clip_high=0.28)
NO_LOWER_CLIP = CispoLossConfig(kind="cispo", clip_low=10.0, clip_high=0.2)
GPG = GpgLossConfig(kind="gpg")
SAPO = SapoLossConfig(kind="sapo")
GMPO = GmpoLossConfig(kind="gmpo", clip_low=0.2, clip_high=0.28)
LOG_15, LOG_05 = math.log(1.5), math.log(0.5)


@pytest.mark.parametrize(
    ("config", "old", "log_ratios", "advantages", "golden", "clipped", "gradients"),
    [
        # With the dual clip; a token that is clipped has no gradient.
        (PPO, -2.0, [LOG_15, LOG_05, 0.0], [1, 1, 1], [-1.28, -0.5, -1], [1, 0, 0], [0, -0.5, -1]),
        (PPO, -2.0, [math.log(5), math.log(2), LOG_05], [-1, -1, -1], [3, 2, 0.8], [1, 0, 1], [0, 2, 0]),
        # Ratios that would overflow.
        (PPO, 0.0, [200.0, -200.0], [1, -1], [-1.28, 0.8], [1, 1], None),
        # Every token has the ratio of its sequence; sequences are clipped whole, without a dual clip.
        (WIDE_GSPO, 0.0, [0.1, 0.3], [1, 1], [-1.221403] * 2, [0, 0], [-1.221403] * 2),
        (GSPO, 0.0, [0.1, 0.3], [1, 1], [-1.0004] * 2, [1, 1], [0, 0]),
        (GSPO, 0.0, [2.0, 2.0], [-1, -1], [math.exp(2)] * 2, [0, 0], None),
        # A token that is clipped still learns.
        (
            CISPO,
            -1.0,
            [LOG_15, 0.0, LOG_05],
            [2, 2, 2],
            [-2.56 * (LOG_15 - 1), 2.0, -1.6 * (LOG_05 - 1)],
            [1, 0, 1],
            [-2.56, -2.0, -1.6],
        ),
        # verl's CISPO example: a lower clip of 10 is none.
        (NO_LOWER_CLIP, -1.0, [-9.0, LOG_15], [2, 2], None, [0, 1], [-2 * math.exp(-9), -2.4]),
        # The plain policy gradient, wherever the policy has moved.
        (GPG, -9.0, [7.0], [0.5], [1.0], [0], [-0.5]),
        (SAPO, 0.0, [LOG_15, LOG_15], [1, -1], [-2.489837, 2.393585], [0, 0], None),
        # The policy gradient where nothing has moved.
        (SAPO, -1.0, [0.0, 0.0], [2, -3], None, [0, 0], [-2.0, 3.0]),
        (GMPO, 0.0, [0.5, -0.1], [1, 1], [-1.094174] * 2, [1, 0], None),
        (GMPO, 0.0, [0.5, -0.1], [-1, -1], [1.221403] * 2, [0, 0], None),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_losses_have_the_golden_values(
    config: LossConfig,
    old: float,
    log_ratios: list[float],
    advantages: list[float],
    golden: list[float] | None,
    clipped: list[int],
    gradients: list[float] | None,
) -> None:
    """Gradients are those of the sum of the token losses."""
    tokens = one_sequence([old + each for each in log_ratios], [old] * len(log_ratios), advantages)
    found = policy_loss(config, tokens)
    assert golden is None or found.values.tolist() == pytest.approx(golden, abs=TOLERANCE)
    assert found.is_clipped.tolist() == [bool(each) for each in clipped]
    if gradients is not None:
        found.values.sum().backward()  # type: ignore[no-untyped-call]
        assert tokens.logprobs.grad is not None
        assert tokens.logprobs.grad.tolist() == pytest.approx(gradients, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("kind", "golden"),
    [
        ("token_mean", 3.0),
        ("token_sum", 15.0),
        ("seq_mean_token_sum", 7.5),
        ("seq_mean_token_mean", 2.75),
        ("seq_mean_token_sum_norm", 2.5),
    ],
)
def test_the_aggregations_have_the_golden_values(kind: Aggregation, golden: float) -> None:
    values = torch.tensor([1.0, 2.0, torch.nan, 3.0, 4.0, 5.0])
    segments = Segments.of(torch.tensor([True, True, False, True, True, True]), torch.tensor([0, 3, 6]))
    found = aggregate(kind, values, segments, num_loss_tokens=5, num_sequences=2, horizon_tokens=3)
    assert found.item() == pytest.approx(golden)


def test_an_update_without_loss_tokens_has_no_loss() -> None:
    segments = Segments.of(torch.zeros(2, dtype=torch.bool), torch.tensor([0, 2]))
    kinds: tuple[Aggregation, ...] = ("token_mean", "seq_mean_token_mean")
    for kind in kinds:
        assert aggregate(kind, torch.ones(2), segments, num_loss_tokens=0, num_sequences=0).item() == 0


def test_what_is_masked_does_not_count_even_if_it_is_not_finite() -> None:
    values = torch.tensor([1.0, torch.nan, torch.inf], requires_grad=True)
    total = masked_sum(values, torch.tensor([True, False, False]))
    total.backward()  # type: ignore[no-untyped-call]
    assert total.item() == 1.0
    assert values.grad is not None
    assert values.grad.tolist() == [1.0, 0.0, 0.0]


def kl_and_gradient(kind: KlEstimate, delta: float) -> tuple[float, float]:
    logprobs = torch.tensor([delta], requires_grad=True)
    found: Tensor = kl(kind, logprobs, torch.zeros(1))
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    return found.item(), logprobs.grad.item()


@pytest.mark.parametrize(
    ("kind", "value", "slope"),
    [
        ("k1", 0.5, 1.0),
        ("abs", 0.5, 1.0),
        ("k2", 0.125, 0.5),
        ("k3", 0.106531, 1 - math.exp(-0.5)),
        ("k1+", 0.5, 0.5),
        ("abs+", 0.5, 0.5),
        ("k3+", 0.106531, 0.5),
    ],
)
def test_kl_has_the_golden_values_and_with_a_plus_the_gradient_of_k2(
    kind: KlEstimate, value: float, slope: float
) -> None:
    assert kl_and_gradient(kind, 0.5) == pytest.approx((value, slope), abs=TOLERANCE)


def test_k3_is_bounded_where_it_would_overflow() -> None:
    assert kl("k3", torch.tensor([-500.0, 0.0]), torch.zeros(2)).tolist() == [10.0, 0.0]


@pytest.mark.parametrize(
    ("value", "old", "target", "golden"),
    [
        (2.0, 1.0, 0.0, 2.0),
        (0.2, 1.0, 2.0, 1.62),
        (1.2, 1.0, 2.0, 0.32),
        (2.0, 1.0, 3.0, 1.125),
        (0.2, 1.0, 0.0, 0.125),
    ],
)
def test_the_value_loss_has_the_golden_values(value: float, old: float, target: float, golden: float) -> None:
    found = value_loss(torch.tensor([value]), torch.tensor([old]), torch.tensor([target]), clip=0.5)
    assert found.item() == pytest.approx(golden, abs=TOLERANCE)


def test_sums_and_means_are_over_loss_tokens_whatever_the_others_hold() -> None:
    assert SEGMENTS.sums(VALUES).tolist() == [3, 5, 0]
    assert SEGMENTS.means(VALUES).tolist() == [1.5, 5, 0]
    assert SEGMENTS.spread(torch.tensor([7.0, 8.0, 9.0])).tolist() == [7, 7, 7, 8, 8, 9, 9]
    values = VALUES.clone().requires_grad_()
    (SEGMENTS.spread(SEGMENTS.means(values)) * torch.arange(1.0, 8.0)).sum().backward()  # type: ignore[no-untyped-call]
    assert values.grad is not None
    assert values.grad.tolist() == [3, 3, 0, 0, 9, 0, 0]


def test_long_sequences_are_summed_without_drift() -> None:
    values = torch.rand(200_000, generator=torch.Generator().manual_seed(0))
    segments = Segments.of(torch.ones(200_000, dtype=torch.bool), torch.tensor([0, 200_000]))
    assert segments.sums(values).item() == values.double().sum().float().item()


def test_sppo_is_the_squared_distance_of_a_sequences_log_ratio_from_its_target() -> None:
    """By hand: log-ratios .1 + .3 against .5, and -.2 against 0."""
    logprobs = torch.tensor([0.1, 0.3, -0.2], requires_grad=True)
    tokens = PolicyTokens(
        logprobs=logprobs,
        entropy=torch.zeros(3),
        old_logprobs=torch.zeros(3),
        rollout_logprobs=torch.zeros(3),
        advantages=torch.tensor([0.5, 0.5, 0.0]),
        segments=Segments.of(torch.ones(3, dtype=torch.bool), torch.tensor([0, 2, 3])),
    )
    loss = policy_loss(SppoLossConfig(kind="sppo"), tokens)
    assert loss.values.tolist() == pytest.approx([0.01, 0.01, 0.04], rel=1e-5)
    aggregate("seq_mean_token_mean", loss.values, tokens.segments, num_loss_tokens=3, num_sequences=2).backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-0.1, -0.1, -0.2], rel=1e-5)
