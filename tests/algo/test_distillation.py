from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.algo.distillation import distil, forward_topk
from megarl.algo.loss import PolicyTokens, Segments
from megarl.algo.objective import actor_loss
from megarl.config.algorithm import DistillConfig, GpgLossConfig, ReverseKlConfig

VOCAB = 7


def top_of(teacher: Tensor, policy: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    likeliest, token_ids = teacher.topk(num_top, dim=-1)
    return likeliest, policy.gather(-1, token_ids)


def test_the_distance_over_the_likeliest_tokens_and_the_rest_is_that_of_the_formula() -> None:
    teacher, policy = torch.tensor([[0.5, 0.3]]).log(), torch.tensor([[0.4, 0.2]]).log()
    by_hand = 0.5 * math.log(0.5 / 0.4) + 0.3 * math.log(0.3 / 0.2) + 0.2 * math.log(0.2 / 0.4)
    assert forward_topk(teacher, policy).item() == pytest.approx(by_hand, abs=1e-6)
    assert by_hand == pytest.approx(0.0945819, abs=1e-7)


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
