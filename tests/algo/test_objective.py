"""The contract of every loss: neither value nor gradient changes with the split, the order or the padding."""

from __future__ import annotations

from itertools import pairwise
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.algo.loss import PolicyTokens
from megarl.algo.objective import actor_loss
from megarl.config.algorithm import (
    Aggregation,
    AlgorithmConfig,
    CispoLossConfig,
    CorrectionConfig,
    GmpoLossConfig,
    GpgLossConfig,
    GrpoConfig,
    GspoLossConfig,
    IcepopConfig,
    LossConfig,
    MaskConfig,
    PpoLossConfig,
    SapoLossConfig,
    SftConfig,
    TisConfig,
)
from tests.algo.packs import Sequences, one_sequence, pack, random_sequences

LOSSES: tuple[LossConfig, ...] = (
    PpoLossConfig(kind="ppo"),
    GspoLossConfig(kind="gspo", clip_low=0.2, clip_high=0.3),
    CispoLossConfig(kind="cispo"),
    GpgLossConfig(kind="gpg"),
    SapoLossConfig(kind="sapo"),
    GmpoLossConfig(kind="gmpo"),
)
CORRECTIONS: tuple[CorrectionConfig | None, ...] = (
    None,
    TisConfig(kind="tis"),
    TisConfig(kind="tis", level="sequence"),
    IcepopConfig(kind="icepop"),
    IcepopConfig(kind="icepop", level="sequence"),
    MaskConfig(kind="mask", highest=0.5),
    MaskConfig(kind="mask", level="sequence", measure="k1", lowest=-0.3, highest=0.3),
)


def loss_and_gradient(
    config: AlgorithmConfig, sequences: Sequences, micro_batches: list[list[int]], padding: int
) -> tuple[Tensor, list[Tensor]]:
    leaves = [columns[0].clone().requires_grad_() for columns in sequences.columns]
    total = torch.zeros((), dtype=torch.float64)
    for members in micro_batches:
        total = total + part(config, sequences, pack(sequences, members, leaves, padding=padding))
    total.backward()  # type: ignore[no-untyped-call]
    return total.detach(), [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]


def part(config: AlgorithmConfig, sequences: Sequences, tokens: PolicyTokens) -> Tensor:
    return actor_loss(
        config, tokens, num_loss_tokens=sequences.num_loss_tokens, num_sequences=sequences.num_sequences
    ).value


@st.composite
def splits(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    """Lengths of some sequences, and micro-batches that hold each of them once, in any order."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    order = draw(st.permutations(range(len(lengths))))
    cuts = draw(st.sets(st.integers(1, max(len(lengths) - 1, 1)), max_size=4))
    bounds = sorted({0, len(lengths), *(cut for cut in cuts if cut < len(lengths))})
    return lengths, [list(order[start:end]) for start, end in pairwise(bounds)]


def assert_invariant(
    config: AlgorithmConfig, seed: int, split: tuple[list[int], list[list[int]]], padding: int
) -> None:
    lengths, micro_batches = split
    sequences = random_sequences(seed, lengths)
    whole = loss_and_gradient(config, sequences, [list(range(len(lengths)))], 0)
    torch.testing.assert_close(loss_and_gradient(config, sequences, micro_batches, padding), whole, rtol=0, atol=1e-9)


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.kind)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 1000), split=splits(), padding=st.integers(0, 5))
def test_every_loss_and_aggregation_is_invariant(
    loss: LossConfig, aggregation: Aggregation, seed: int, split: tuple[list[int], list[list[int]]], padding: int
) -> None:
    config = GrpoConfig(kind="grpo", loss=loss, aggregation=aggregation, horizon_tokens=7, entropy_coef=0.1)
    assert_invariant(config, seed, split, padding)


@pytest.mark.parametrize("correction", CORRECTIONS, ids=str)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 1000), split=splits(), padding=st.integers(0, 5))
def test_every_correction_is_invariant(
    correction: CorrectionConfig | None, seed: int, split: tuple[list[int], list[list[int]]], padding: int
) -> None:
    assert_invariant(GrpoConfig(kind="grpo", correction=correction), seed, split, padding)


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 1000), split=splits(), padding=st.integers(0, 5))
def test_imitation_is_invariant(seed: int, split: tuple[list[int], list[list[int]]], padding: int) -> None:
    assert_invariant(SftConfig(kind="sft"), seed, split, padding)


def test_imitation_minimises_the_negative_log_likelihood() -> None:
    tokens = one_sequence([-1.0, -2.5], [0.0, 0.0], [0.0, 0.0])
    found = actor_loss(SftConfig(kind="sft"), tokens, num_loss_tokens=2, num_sequences=1)
    assert found.value.item() == 1.75
    assert not found.is_clipped.any()


def test_the_entropy_bonus_is_subtracted_and_not_corrected() -> None:
    config = GrpoConfig(
        kind="grpo", entropy_coef=0.1, correction=MaskConfig(kind="mask", measure="k1", lowest=-9, highest=-5)
    )
    tokens = one_sequence([0.0, 0.0], [0.0, 0.0], [2.0, 2.0], entropy=[1.0, 3.0])
    found = actor_loss(config, tokens, num_loss_tokens=2, num_sequences=1)
    assert found.is_rejected.all()
    assert found.value.item() == pytest.approx(-0.2)


def test_the_correction_scales_the_gradient() -> None:
    tokens = one_sequence([0.0, 0.0], [0.0, 0.0], [1.0, 1.0])
    apart = PolicyTokens(
        logprobs=tokens.logprobs,
        entropy=tokens.entropy,
        old_logprobs=tokens.old_logprobs,
        rollout_logprobs=torch.tensor([-0.1, -5.0]),
        advantages=tokens.advantages,
        segments=tokens.segments,
    )
    config = GrpoConfig(kind="grpo", correction=TisConfig(kind="tis"), aggregation="token_sum")
    actor_loss(config, apart, num_loss_tokens=2, num_sequences=1).value.backward()  # type: ignore[no-untyped-call]
    assert apart.logprobs.grad is not None
    assert apart.logprobs.grad.tolist() == pytest.approx([-1.105171, -2.0], abs=1e-6)
