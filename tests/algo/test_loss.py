from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.algo.loss import PolicyTokens, kl_k3, masked_sum, policy_loss, ppo_loss, token_mean
from megarl.config.algorithm import AlgorithmConfig, GrpoConfig, SftConfig

TOLERANCE = 1e-5
ALGORITHMS: dict[str, AlgorithmConfig] = {
    "sft": SftConfig(kind="sft"),
    "grpo": GrpoConfig(kind="grpo", entropy_coef=0.1),
}


def tokens(logprobs: list[float], old: list[float], advantages: list[float]) -> PolicyTokens:
    return PolicyTokens(
        logprobs=torch.tensor(logprobs, requires_grad=True),
        entropy=torch.zeros(len(logprobs)),
        old_logprobs=torch.tensor(old),
        advantages=torch.tensor(advantages),
    )


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "is_clipped"),
    [
        (1.0, 1.5, -1.28, True),
        (1.0, 0.5, -0.5, False),
        (-1.0, 5.0, 3.0, True),
        (-1.0, 2.0, 2.0, False),
        (-1.0, 0.5, 0.8, True),
    ],
)
def test_ppo_with_dual_clip(advantage: float, ratio: float, loss: float, is_clipped: bool) -> None:
    log_ratio = torch.tensor(ratio).log().item()
    found = ppo_loss(tokens([log_ratio - 2], [-2.0], [advantage]), clip_low=0.2, clip_high=0.28, clip_dual=3.0)
    assert found.values.item() == pytest.approx(loss, abs=TOLERANCE)
    assert found.is_clipped.item() is is_clipped


def test_a_clipped_token_has_no_gradient() -> None:
    batch = tokens([0.5, -0.5, 0.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0])
    ppo_loss(batch, clip_low=0.2, clip_high=0.2, clip_dual=3.0).values.sum().backward()  # type: ignore[no-untyped-call]
    assert batch.logprobs.grad is not None
    clipped, free, even = batch.logprobs.grad.tolist()
    assert clipped == 0
    assert free < 0
    assert even == pytest.approx(-1.0)


def test_a_ratio_that_would_overflow_is_bounded() -> None:
    batch = tokens([0.0, -200.0], [-200.0, 0.0], [1.0, -1.0])
    values = ppo_loss(batch, clip_low=0.2, clip_high=0.2, clip_dual=3.0).values
    assert values.tolist() == pytest.approx([-1.2, 0.8])


def test_the_sft_loss_is_the_negative_log_likelihood() -> None:
    found = policy_loss(ALGORITHMS["sft"], tokens([-1.0, -2.5], [0.0, 0.0], [0.0, 0.0]))
    assert found.values.tolist() == [1.0, 2.5]
    assert not found.is_clipped.any()


def test_grpo_subtracts_the_entropy_bonus() -> None:
    batch = PolicyTokens(
        logprobs=torch.zeros(2),
        entropy=torch.tensor([1.0, 3.0]),
        old_logprobs=torch.zeros(2),
        advantages=torch.tensor([2.0, 2.0]),
    )
    assert policy_loss(ALGORITHMS["grpo"], batch).values.tolist() == pytest.approx([-2.1, -2.3])


def test_the_token_mean_has_the_golden_value() -> None:
    values = torch.tensor([1.0, 2.0, 0.0, 3.0, 4.0, 5.0])
    mask = torch.tensor([True, True, False, True, True, True])
    assert token_mean(values, mask, num_loss_tokens=5).item() == pytest.approx(3.0)


def test_what_is_masked_does_not_count_even_if_it_is_not_finite() -> None:
    values = torch.tensor([1.0, torch.nan, torch.inf], requires_grad=True)
    total = masked_sum(values, torch.tensor([True, False, False]))
    total.backward()  # type: ignore[no-untyped-call]
    assert total.item() == 1.0
    assert values.grad is not None
    assert values.grad.tolist() == [1.0, 0.0, 0.0]


def test_k3_has_the_golden_value() -> None:
    found = kl_k3(torch.tensor([0.5, 0.0, -50.0]), torch.tensor([0.0, 0.0, 0.0]))
    assert found.tolist() == pytest.approx([0.106531, 0.0, 10.0], abs=TOLERANCE)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@settings(max_examples=25)
@given(seed=st.integers(0, 1000), cuts=st.sets(st.integers(1, 29), max_size=8))
def test_loss_and_gradient_do_not_depend_on_the_split(algorithm: str, seed: int, cuts: set[int]) -> None:
    random = torch.Generator().manual_seed(seed)
    logprobs, old, advantages, entropy = torch.randn(4, 30, generator=random, dtype=torch.float64)
    loss_mask = torch.rand(30, generator=random) < 0.6

    def loss_and_gradient(bounds: list[int]) -> tuple[Tensor, Tensor]:
        policy = logprobs.clone().requires_grad_()
        total = torch.zeros((), dtype=torch.float64)
        for start, end in pairwise(bounds):
            part = slice(start, end)
            batch = PolicyTokens(
                logprobs=policy[part], entropy=entropy[part], old_logprobs=old[part], advantages=advantages[part]
            )
            values = policy_loss(ALGORITHMS[algorithm], batch).values
            total = total + token_mean(values, loss_mask[part], num_loss_tokens=int(loss_mask.sum()))
        total.backward()  # type: ignore[no-untyped-call]
        assert policy.grad is not None
        return total.detach(), policy.grad

    whole, split = loss_and_gradient([0, 30]), loss_and_gradient([0, *sorted(cuts), 30])
    torch.testing.assert_close(split, whole, rtol=1e-12, atol=1e-12)
