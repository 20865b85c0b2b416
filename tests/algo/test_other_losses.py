from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.algo.loss import PolicyTokens, Segments
from megarl.algo.objective import actor_loss, mismatch
from megarl.algo.other_losses import correction_weights, distil, forward_topk
from megarl.config.algorithm import (
    CorrectionConfig,
    DistillConfig,
    GpgLossConfig,
    IcepopConfig,
    MaskConfig,
    ReverseKlConfig,
    TisConfig,
)

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


VOCAB = 7


def top_of(teacher: Tensor, policy: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    likeliest, token_ids = teacher.topk(num_top, dim=-1)
    return likeliest, policy.gather(-1, token_ids)


def test_the_distance_over_the_likeliest_tokens_and_the_rest_is_that_of_the_formula() -> None:
    teacher, policy = torch.tensor([[0.5, 0.3]]).log(), torch.tensor([[0.4, 0.2]]).log()
    by_hand = 0.5 * math.log(0.5 / 0.4) + 0.3 * math.log(0.3 / 0.2) + 0.2 * math.log(0.2 / 0.4)
    assert forward_topk(teacher, policy).item() == pytest.approx(by_hand, abs=1e-6)
    assert by_hand == pytest.approx(0.0945819, abs=1e-7)


@pytest.mark.patient
@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10_000), num_top=st.integers(1, VOCAB - 1))
def test_the_distance_is_between_zero_and_that_over_the_whole_vocabulary(seed: int, num_top: int) -> None:
    logits = torch.randn(2, 5, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    teacher, policy = logits.log_softmax(-1)
    whole = (teacher.exp() * (teacher - policy)).sum(-1)
    found = forward_topk(*top_of(teacher, policy, num_top))
    assert (found >= -1e-9).all()
    assert (found <= whole + 1e-9).all()
    assert torch.allclose(forward_topk(teacher, policy), whole, atol=1e-4)


def test_a_policy_that_equals_its_teacher_has_neither_distance_nor_gradient() -> None:
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(1), requires_grad=True)
    policy = (logits / 0.7).log_softmax(-1)
    distances = forward_topk(*top_of(policy.detach(), policy, 3))
    assert distances.tolist() == [0.0] * 5
    distances.sum().backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert logits.grad.abs().max() < 1e-6


def test_a_token_that_the_teacher_excludes_adds_nothing() -> None:
    policy = torch.tensor([[0.5, 0.3, 0.1]]).log().requires_grad_()
    distances = forward_topk(torch.tensor([[0.6, 0.3, 0.0]]).log(), policy)
    distances.sum().backward()  # type: ignore[no-untyped-call]
    assert distances.tolist() == pytest.approx([0.6 * math.log(0.6 / 0.5)], abs=1e-6)
    assert policy.grad is not None
    assert policy.grad.isfinite().all()


def test_the_reverse_distance_is_an_advantage_whose_policy_gradient_is_that_of_the_kl() -> None:
    """Every token of the vocabulary is sampled once, with its probability in place of the mean over loss tokens."""
    random = torch.Generator().manual_seed(2)
    logits = torch.randn(VOCAB, generator=random, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(VOCAB, generator=random, dtype=torch.float64).log_softmax(-1)
    policy = logits.log_softmax(-1)
    (expected,) = torch.autograd.grad((policy.exp() * (policy - teacher)).sum(), logits, retain_graph=True)
    tokens = PolicyTokens(
        logprobs=policy,
        entropy=torch.zeros_like(policy),
        old_logprobs=policy.detach(),
        rollout_logprobs=policy.detach(),
        advantages=torch.zeros_like(policy),
        segments=Segments.of(torch.ones(VOCAB, dtype=torch.bool), torch.tensor([0, VOCAB])),
        teacher=teacher[:, None],
    )
    taught = distil(ReverseKlConfig(kind="reverse_kl", coef=2.0), tokens)
    assert taught.added is None
    values = -taught.tokens.advantages * policy  # gpg
    (found,) = torch.autograd.grad((policy.detach().exp() * values).sum(), logits, retain_graph=True)
    torch.testing.assert_close(found, 2.0 * expected)

    config = DistillConfig(
        kind="distill", distillation=ReverseKlConfig(kind="reverse_kl", coef=2.0), loss=GpgLossConfig(kind="gpg")
    )
    loss = actor_loss(config, tokens, num_loss_tokens=VOCAB, num_sequences=1)
    assert loss.value.item() == pytest.approx(values.mean().item())
    assert loss.teacher_kl is not None
    torch.testing.assert_close(loss.teacher_kl, (policy - teacher).detach())
