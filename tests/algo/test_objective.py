"""The contract of every loss: neither value nor gradient changes with the split, the order or the padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from typing import Literal, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from torch import Tensor

from megarl.algo.loss import PolicyTokens
from megarl.algo.objective import MismatchMonitor, actor_loss
from megarl.algo.other_losses import ValueTokens, critic_loss
from megarl.config.algorithm import (
    Aggregation,
    AlgorithmConfig,
    CispoLossConfig,
    CorrectionConfig,
    DistillationConfig,
    ForwardTopkConfig,
    GaeConfig,
    GmpoLossConfig,
    GpgLossConfig,
    GrpoConfig,
    GspoLossConfig,
    IcepopConfig,
    KlEstimate,
    KlLossConfig,
    LossConfig,
    MaskConfig,
    MismatchBaselineConfig,
    MismatchConfig,
    PpoLossConfig,
    ReverseKlConfig,
    SapoLossConfig,
    SftConfig,
    SppoLossConfig,
    TisConfig,
)
from megarl.errors import NumericsError
from megarl.results import MonitorState
from tests.algo.packs import Sequences, one_sequence, pack, random_sequences

LOSSES: tuple[LossConfig, ...] = (
    PpoLossConfig(kind="ppo"),
    GspoLossConfig(kind="gspo", clip_low=0.2, clip_high=0.3),
    CispoLossConfig(kind="cispo"),
    GpgLossConfig(kind="gpg"),
    SapoLossConfig(kind="sapo"),
    GmpoLossConfig(kind="gmpo"),
    SppoLossConfig(kind="sppo"),
)
KLS: tuple[KlEstimate, ...] = get_args(KlEstimate)
AGGREGATIONS: tuple[Aggregation, ...] = get_args(get_args(Aggregation)[0])
CORRECTIONS: tuple[CorrectionConfig | None, ...] = (
    None,
    TisConfig(kind="tis"),
    TisConfig(kind="tis", level="sequence"),
    IcepopConfig(kind="icepop"),
    IcepopConfig(kind="icepop", level="sequence"),
    MaskConfig(kind="mask", highest=0.5),
    MaskConfig(kind="mask", level="sequence", measure="k1", lowest=-0.3, highest=0.3),
)
DISTILLATIONS: tuple[DistillationConfig | None, ...] = (
    None,
    ReverseKlConfig(kind="reverse_kl", coef=0.5),
    ForwardTopkConfig(kind="forward_topk", coef=0.5, top_k=2),
)


Part = Callable[[Sequences, PolicyTokens], Tensor]
"""A micro-batch's part of the loss."""
Split = tuple[list[int], list[list[int]]]


def loss_and_gradient(
    part: Part, sequences: Sequences, micro_batches: list[list[int]], padding: int
) -> tuple[Tensor, list[Tensor]]:
    leaves = [columns[0].clone().requires_grad_() for columns in sequences.columns]
    total = torch.zeros((), dtype=leaves[0].dtype)
    for members in micro_batches:
        total = total + part(sequences, pack(sequences, members, leaves, padding=padding))
    total.backward()  # type: ignore[no-untyped-call]
    return total.detach(), [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]


def actor_part(config: AlgorithmConfig, sequences: Sequences, tokens: PolicyTokens) -> Tensor:
    return actor_loss(
        config, tokens, num_loss_tokens=sequences.num_loss_tokens, num_sequences=sequences.num_sequences
    ).value


@st.composite
def splits(draw: st.DrawFn) -> Split:
    """Lengths of some sequences, and micro-batches that hold each of them once, in any order."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    order = draw(st.permutations(range(len(lengths))))
    cuts = draw(st.sets(st.integers(1, max(len(lengths) - 1, 1)), max_size=4))
    bounds = sorted({0, len(lengths), *(cut for cut in cuts if cut < len(lengths))})
    return lengths, [list(order[start:end]) for start, end in pairwise(bounds)]


def assert_invariant(
    part: Part, seed: int, split: Split, padding: int, *, dtype: torch.dtype = torch.float64, tolerance: float = 1e-9
) -> None:
    lengths, micro_batches = split
    sequences = random_sequences(seed, lengths, dtype=dtype)
    whole = loss_and_gradient(part, sequences, [list(range(len(lengths)))], 0)
    found = loss_and_gradient(part, sequences, micro_batches, padding)
    # Of numbers above 1 the error is relative: it is one of rounding.
    torch.testing.assert_close(found, whole, rtol=tolerance, atol=tolerance)


def configs() -> st.SearchStrategy[GrpoConfig]:
    """Any loss with any aggregation, correction, entropy bonus and KL term."""
    penalties = st.builds(KlLossConfig, kind=st.just("loss"), estimate=st.sampled_from(KLS), coef=st.just(0.3))
    return st.builds(
        GrpoConfig,
        kind=st.just("grpo"),
        loss=st.sampled_from(LOSSES),
        aggregation=st.sampled_from(AGGREGATIONS),
        horizon_tokens=st.just(7),
        entropy_coef=st.sampled_from([0.0, 0.1]),
        correction=st.sampled_from(CORRECTIONS),
        kl=st.none() | penalties,
        distillation=st.sampled_from(DISTILLATIONS),
    )


@pytest.mark.patient
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-6)], ids=["float64", "float32"]
)
@settings(max_examples=50)
@given(config=configs(), seed=st.integers(0, 1000), split=splits(), padding=st.integers(0, 5))
def test_whatever_is_combined_is_invariant(
    dtype: torch.dtype, tolerance: float, config: GrpoConfig, seed: int, split: Split, padding: int
) -> None:
    assert_invariant(partial(actor_part, config), seed, split, padding, dtype=dtype, tolerance=tolerance)


FIXED: Split = ([3, 9, 1, 5, 4], [[4, 0], [2], [1, 3]])
"""Lengths of sequences, and micro-batches of them in another order."""


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_critics_loss_is_invariant(aggregation: Aggregation) -> None:
    config = GaeConfig(kind="gae", aggregation=aggregation, horizon_tokens=7)

    def part(sequences: Sequences, tokens: PolicyTokens) -> Tensor:
        values = ValueTokens(
            values=tokens.logprobs,
            old_values=tokens.old_logprobs,
            returns=tokens.advantages,
            segments=tokens.segments,
        )
        return critic_loss(
            config,
            values,
            clip=0.5,
            num_loss_tokens=sequences.num_loss_tokens,
            num_sequences=sequences.num_sequences,
        ).value

    assert_invariant(part, 1, FIXED, 3)


def every_kind() -> dict[str, AlgorithmConfig]:
    """Return each kind of algorithm as a recipe has it that names the kind and nothing else."""
    needed = {"gdpo": {"weights": {"right": 1.0}}}
    union = TypeAdapter[AlgorithmConfig](AlgorithmConfig)
    mapping: dict[str, object] = union.json_schema()["discriminator"]["mapping"]
    return {kind: union.validate_python({"kind": kind, **needed.get(kind, {})}) for kind in mapping}


def one_part_each() -> dict[str, AlgorithmConfig]:
    """Return the kinds, and GRPO with each estimate of KL, each correction, and each loss in each aggregation."""
    parts: dict[str, dict[str, object]] = {}
    for estimate in KLS:
        parts[f"kl {estimate}"] = {"kl": KlLossConfig(kind="loss", estimate=estimate, coef=0.3)}
    for distillation in DISTILLATIONS:
        parts[f"distillation {distillation}"] = {"distillation": distillation}
    for correction in CORRECTIONS:
        parts[f"correction {correction}"] = {"correction": correction}
    for loss, aggregation in product(LOSSES, AGGREGATIONS):
        parts[f"{loss.kind} {aggregation}"] = {
            "loss": loss,
            "aggregation": aggregation,
            "horizon_tokens": 7,
            "entropy_coef": 0.1,
        }
    configs = {name: GrpoConfig.model_validate({"kind": "grpo", **keys}) for name, keys in parts.items()}
    return {**every_kind(), **configs}


PARTS = one_part_each()


@pytest.mark.parametrize("name", PARTS)
def test_every_part_is_invariant(name: str) -> None:
    """Each alone on one split; the property above combines them on any."""
    for seed in (1, 2):
        assert_invariant(partial(actor_part, PARTS[name]), seed, FIXED, 3)


@pytest.mark.parametrize("nothing", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", PARTS)
def test_what_is_not_finite_outside_the_loss_changes_neither_loss_nor_gradient(name: str, nothing: float) -> None:
    sequences = random_sequences(3, [6, 5])
    assert not all(mask.all() for mask in sequences.loss_masks)
    expected = loss_and_gradient(partial(actor_part, PARTS[name]), sequences, [[0, 1]], 0)
    for columns, mask in zip(sequences.columns, sequences.loss_masks, strict=True):
        columns[1:, ~mask] = nothing  # all but the log-probabilities, whose gradients are compared
    loss, gradients = loss_and_gradient(partial(actor_part, PARTS[name]), sequences, [[0, 1]], 0)
    assert loss == expected[0]
    for gradient, other in zip(gradients, expected[1], strict=True):
        assert torch.equal(gradient, other)


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
    apart = replace(tokens, rollout_logprobs=torch.tensor([-0.1, -5.0]))
    config = GrpoConfig(kind="grpo", correction=TisConfig(kind="tis"), aggregation="token_sum")
    actor_loss(config, apart, num_loss_tokens=2, num_sequences=1).value.backward()  # type: ignore[no-untyped-call]
    assert apart.logprobs.grad is not None
    assert apart.logprobs.grad.tolist() == pytest.approx([-1.105171, -2.0], abs=1e-6)


def test_the_kl_term_is_added_with_its_gradient_and_not_corrected() -> None:
    config = GrpoConfig(
        kind="grpo",
        kl=KlLossConfig(kind="loss", estimate="k1", coef=0.5),
        correction=MaskConfig(kind="mask", measure="k1", lowest=-9, highest=-5),
    )
    tokens = replace(one_sequence([0.0, 0.0], [0.0, 0.0], [2.0, 2.0]), reference_logprobs=torch.tensor([-1.0, -2.0]))
    found = actor_loss(config, tokens, num_loss_tokens=2, num_sequences=1)
    assert found.value.item() == pytest.approx(0.5 * (1.0 + 2.0) / 2)
    found.value.backward()  # type: ignore[no-untyped-call]
    assert tokens.logprobs.grad is not None
    assert tokens.logprobs.grad.tolist() == pytest.approx([0.25, 0.25])


def monitor(
    action: Literal["warn", "correct", "stop"], *, is_relative: bool = False, state: MonitorState | None = None
) -> MismatchMonitor:
    baseline = MismatchBaselineConfig(steps=2, warn_times=3, act_times=10) if is_relative else None
    algorithm = GrpoConfig(kind="grpo", mismatch=MismatchConfig(baseline=baseline, action=action))
    return MismatchMonitor(algorithm, "bfloat16", state)


ACTING = "above algorithm.mismatch.act_above 0.05; "
OF_BASELINE = "the run's baseline 0.02)"


@pytest.mark.parametrize(
    ("action", "is_relative", "means", "expected"),
    [
        (
            "warn",
            False,
            (0.009, 0.021, 0.022, 0.06, 0.07, 0.021),
            {1: "is 0.021, above algorithm.mismatch.warn_above 0.02", 3: f"{ACTING}consider algorithm.correction"},
        ),
        ("correct", False, (0.051, 0.001), {0: f"{ACTING}correcting with tis from the next step on"}),
        # The first two steps are what the others are compared with, however large they are.
        (
            "warn",
            True,
            (0.01, 0.03, 0.05, 0.07, 0.1, 0.3, 0.5),
            {
                3: f"is 0.07, above 0.06 (algorithm.mismatch.baseline.warn_times 3 x {OF_BASELINE}",
                5: f"above 0.2 (algorithm.mismatch.baseline.act_times 10 x {OF_BASELINE}",
            },
        ),
    ],
)
def test_each_threshold_is_reported_once(
    action: Literal["warn", "correct", "stop"], is_relative: bool, means: tuple[float, ...], expected: dict[int, str]
) -> None:
    watching = monitor(action, is_relative=is_relative)
    for place, mean in enumerate(means):
        warnings = watching.observe(mean)
        assert len(warnings) == (place in expected)
        assert all(expected[place] in warning for warning in warnings), warnings
    assert isinstance(watching.algorithm, GrpoConfig)
    assert watching.algorithm.correction == (TisConfig(kind="tis") if action == "correct" else None)


def test_only_stop_stops_and_only_above_its_threshold() -> None:
    for action in ("warn", "correct"):
        monitor(action).stop_above(0.5)
    monitor("stop").stop_above(0.05)
    with pytest.raises(
        NumericsError, match=r"is 0\.06, above algorithm\.mismatch\.act_above 0\.05; this update was not"
    ):
        monitor("stop").stop_above(0.06)


def test_imitation_has_no_engine_to_disagree_with() -> None:
    watching = MismatchMonitor(SftConfig(kind="sft"), "bfloat16")
    watching.stop_above(1.0)
    assert watching.observe(1.0) == ()


def test_rounding_errors_are_no_measure_and_nothing_stops_a_run_without_one() -> None:
    watching = monitor("stop", is_relative=True)
    watching.stop_above(100.0)
    for mean in (1e-9, 0.0, 2e-4, 3e-4):
        watching.stop_above(mean)
        assert watching.observe(mean) == ()
    with pytest.raises(NumericsError, match=r"act_times 10 x the run's baseline 0\.0001"):
        watching.stop_above(2e-3)


@pytest.mark.parametrize("num_before", [1, 2, 3, 4])
def test_a_baseline_survives_a_resume(num_before: int) -> None:
    means = (0.01, 0.03, 0.05, 0.3, 0.3)
    whole = monitor("correct", is_relative=True)
    expected = [whole.observe(mean) for mean in means]
    first = monitor("correct", is_relative=True)
    said = [first.observe(mean) for mean in means[:num_before]]
    second = monitor("correct", is_relative=True, state=first.state)
    said += [second.observe(mean) for mean in means[num_before:]]
    assert said == expected
    assert second.state == whole.state
    assert second.algorithm == whole.algorithm
    assert second.state.has_switched_correction_on
