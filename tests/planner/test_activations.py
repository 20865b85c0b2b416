"""Memory of activations, and the part that recomputation saves."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from megarl.config.recipe import Recipe
from megarl.config.roles import ActorConfig
from megarl.config.section import LOGIT_CHUNK_BYTES
from megarl.families import PUBLIC_MODELS
from megarl.planner.activations import (
    ModelWork,
    activation_bytes,
    chunks_in_flight,
    forward_bytes,
    fp8_weight_bytes,
    head_bytes,
    recomputed_share,
    scoring_bytes,
)
from megarl.weights.layouts.canonical import canonical_tensors
from tests.planner.recipes import make_recipe

SHAPE = replace(PUBLIC_MODELS["qwen2.5-7b"], num_layers=8)


def work_of(*assignments: str) -> ModelWork:
    recipe: Recipe = make_recipe("roles.actor={pool: train, tensor: 4}", *assignments)
    return ModelWork.of(
        SHAPE, recipe.roles.actor, tokens_per_micro_batch=recipe.train.micro_batch_tokens, device=recipe.run.device
    )


def per_token(*options: str) -> float:
    return activation_bytes(work_of(*(f"roles.actor.megatron.recompute_{option}" for option in options)), 0) / 8192


@pytest.mark.parametrize(
    ("actor", "in_flight"),
    [
        ("{pipeline: 1}", [1]),
        ("{pipeline: 4}", [4, 3, 2, 1]),
        ("{pipeline: 2, virtual_pipeline: 2}", [5, 3]),
    ],
)
def test_early_stages_keep_more_micro_batches(actor: str, in_flight: list[int]) -> None:
    split = make_recipe(f"roles.actor={actor[:-1]}, pool: train}}").roles.actor
    assert [chunks_in_flight(split, stage) for stage in range(len(in_flight))] == in_flight


def test_activations_grow_with_tokens_and_shrink_with_the_sequence_split() -> None:
    plain = activation_bytes(work_of(), 0)
    assert activation_bytes(work_of("train.tokens_per_micro_batch=16384"), 0) == 2 * plain
    assert activation_bytes(work_of("roles.actor.is_sequence_parallel=true"), 0) < plain


def test_full_recomputation_keeps_the_inputs_of_layers_and_makes_one_layer_again() -> None:
    each = work_of().layer_bytes
    saved = 8 * each.total - (8 * 2 * SHAPE.hidden + each.total)
    assert per_token() - per_token("granularity=full", "method=uniform", "num_layers=1") == saved


def test_larger_units_keep_fewer_inputs_and_make_more_layers_again() -> None:
    each = work_of().layer_bytes
    ones = per_token("granularity=full", "method=uniform", "num_layers=1")
    fours = per_token("granularity=full", "method=uniform", "num_layers=4")
    assert fours - ones == 3 * each.total - 6 * 2 * SHAPE.hidden


def test_a_block_recomputes_its_layers_and_the_others_keep_all() -> None:
    each = work_of().layer_bytes
    found = per_token("granularity=full", "method=block", "num_layers=3")
    assert per_token() - found == 3 * (each.total - 2 * SHAPE.hidden) - each.total


@pytest.mark.parametrize(
    ("modules", "per_layer"),
    [
        ("[mlp]", 2 * 3 * SHAPE.ffn_hidden // 4),
        ("[layernorm]", 2 * 2 * SHAPE.hidden),
        ("[mlp, layernorm]", 2 * 3 * SHAPE.ffn_hidden // 4 + 2 * 2 * SHAPE.hidden),
        ("[core_attn]", 4 * (SHAPE.num_heads // 4 + 2)),
    ],
)
def test_selective_recomputation_saves_its_modules_in_all_layers_but_one(modules: str, per_layer: int) -> None:
    assert per_token() - per_token("granularity=selective", f"modules={modules}") == 7 * per_layer


def test_recomputation_costs_a_forward_pass_or_less() -> None:
    options = "roles.actor.megatron.recompute_"
    assert recomputed_share(work_of()) == 0
    full = (f"{options}granularity=full", f"{options}num_layers=2")
    assert recomputed_share(work_of(*full, f"{options}method=uniform")) == 1
    assert recomputed_share(work_of(*full, f"{options}method=block")) == 2 / 8
    share = recomputed_share(work_of(f"{options}granularity=selective", f"{options}modules=[mlp]"))
    layer = 28 * 128 * 3584 * 2 + 4 * 128 * 3584 * 2 + 3 * 3584 * 18944
    assert share == pytest.approx(3 * 3584 * 18944 / layer)


def test_a_pass_without_gradients_keeps_nothing() -> None:
    work = work_of()
    assert forward_bytes(work) == work.tokens * work.layer_bytes.total < activation_bytes(work, 0)


def test_a_critic_makes_no_logits() -> None:
    work = work_of()
    critic = replace(work, shape=SHAPE.as_critic())
    assert scoring_bytes(critic, has_gradients=True) == 2 * 2 * work.tokens * SHAPE.hidden
    assert scoring_bytes(critic, has_gradients=False) < scoring_bytes(work, has_gradients=False)


@pytest.mark.parametrize(
    ("name", "num_layers", "tokens", "measured_gb"),
    [("qwen2.5-7b", 14, 8192, 32.0), ("qwen2.5-1.5b", 28, 16384, 40.8)],
)
def test_the_estimate_is_near_the_peaks_seen_on_a_gpu(
    name: str, num_layers: int, tokens: int, measured_gb: float
) -> None:
    """Forward and backward on an H200 (docs/performance.md): bfloat16 weights, activations, one chunk of logits.

    At the peak the backward pass has begun: the output matrix has its gradient, the layers have none yet.
    """
    shape = replace(PUBLIC_MODELS[name], num_layers=num_layers)
    weight_bytes = 2 * sum(prod(spec.shape) for spec in canonical_tensors(shape).values())
    others = weight_bytes + 2 * shape.vocab * shape.hidden + LOGIT_CHUNK_BYTES
    work = ModelWork(shape=shape, split=ActorConfig(pool="train"), tokens=tokens, device="cuda")
    assert activation_bytes(work, 0) == pytest.approx(measured_gb * 1e9 - others, rel=0.15)


def test_inputs_of_fp8_products_are_kept_in_one_byte_and_weights_twice() -> None:
    plain, quantized = work_of(), work_of("roles.actor.precision=fp8")
    saved = 2 * SHAPE.hidden + SHAPE.ffn_hidden // 4
    assert plain.layer_bytes.total - quantized.layer_bytes.total == saved
    assert fp8_weight_bytes(plain, 0) == 0
    layer = 28 * 128 * 3584 * 2 + 4 * 128 * 3584 * 2 + 3 * 3584 * 18944
    assert fp8_weight_bytes(quantized, 0) == 2 * 6 * layer // 4
    assert (
        fp8_weight_bytes(work_of("roles.actor.precision=fp8", "roles.actor.fp8_scaling=delayed"), 0)
        == 2 * 8 * layer // 4
    )


def test_float32_has_twice_the_bytes_of_bfloat16() -> None:
    plain, precise = work_of(), work_of("roles.actor.precision=fp32")
    assert (plain.item_bytes, precise.item_bytes) == (2, 4)
    assert precise.layer_bytes.total > 1.8 * plain.layer_bytes.total


def test_each_rank_has_copies_of_its_own_experts() -> None:
    shape = PUBLIC_MODELS["qwen3-30b-a3b"]
    split = ActorConfig(pool="train", expert=8, precision="fp8")
    work = ModelWork.of(shape, split, tokens_per_micro_batch=8192, device="cuda")
    experts = 3 * 768 * 2048 * 128 // 8
    projections = 2 * 128 * (32 + 4) * 2048
    assert fp8_weight_bytes(work, 0) == 2 * 46 * (experts + projections)


def test_a_shared_expert_is_divided_like_a_dense_block() -> None:
    shape = PUBLIC_MODELS["qwen1.5-moe-a2.7b"]
    assert shape.experts is not None
    split = ActorConfig(pool="train", tensor=4, is_sequence_parallel=True, expert=4, expert_tensor=1, precision="fp8")
    work = ModelWork.of(shape, split, tokens_per_micro_batch=8192, device="cuda")
    without = replace(work, shape=replace(shape, experts=replace(shape.experts, shared=0)))
    assert fp8_weight_bytes(work, 0) - fp8_weight_bytes(without, 0) == 2 * 22 * 3 * 5632 * 2048 // 4
    # Gate and up in bfloat16, their product in FP8, and the output in front of the gate.
    kept = (2 * 2 + 1) * 5632 // 4 + 2 * 2048 // 4
    assert work.layer_bytes.total - without.layer_bytes.total == kept
    again = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    recomputed = replace(work, split=split.model_copy(update={"megatron": again}))
    feed_forward = 3 * (4 * 1408 + 5632)
    assert recomputed_share(recomputed) == pytest.approx(feed_forward / (feed_forward + 4 * 2048))


LONG = {"num_layers": 4, "vocab": 32_000, "max_context_tokens": 1 << 17}
MLP_AGAIN = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}


@pytest.mark.parametrize(
    ("name", "cut", "tokens", "keys", "measured_gb", "tolerance"),
    [
        ("qwen2.5-7b", {"num_layers": 14}, 8192, {}, 23.3, 0.05),
        ("qwen2.5-7b", {"num_layers": 14}, 8192, {"precision": "fp8"}, 26.3, 0.05),
        ("qwen2.5-1.5b", {}, 16384, {}, 37.7, 0.05),
        ("qwen2.5-1.5b", {}, 16384, {"precision": "fp8"}, 35.0, 0.05),
        ("qwen2.5-7b", LONG, 32_700, {}, 24.52, 0.08),
        ("qwen2.5-7b", LONG, 32_700, {"context": 2}, 11.96, 0.08),
        ("qwen2.5-7b", LONG, 32_700, {"context": 4}, 6.31, 0.08),
        ("qwen2.5-7b", LONG, 32_700, {"context": 4, "megatron": MLP_AGAIN}, 3.39, 0.08),
        ("qwen2.5-7b", LONG, 32_700, {"context": 2, "context_exchange": "ring"}, 11.76, 0.08),
        ("qwen2.5-7b", LONG, 32_700, {"context": 4, "context_exchange": "ring"}, 6.08, 0.08),
        ("qwen2.5-7b", LONG, 32_700, {"context": 2, "context_exchange": "all_to_all"}, 12.23, 0.08),
        ("qwen3-30b-a3b", {"num_layers": 4, "vocab": 32_000}, 16_700, {}, 11.37, 0.03),
    ],
)
def test_passes_take_what_was_seen_on_a_gpu(
    name: str, cut: dict[str, int], tokens: int, keys: dict[str, object], measured_gb: float, tolerance: float
) -> None:
    """Peaks on an H200 beyond weights and gradient buffers (docs/performance.md, `tests/gpu/test_context.py`)."""
    split = ActorConfig.model_validate({"pool": "train", **keys})
    shape = replace(PUBLIC_MODELS[name], **cut)  # type: ignore[arg-type]
    work = ModelWork.of(shape, split, tokens_per_micro_batch=tokens, device="cuda")
    planned = activation_bytes(work, 0) + head_bytes(work, 0) + fp8_weight_bytes(work, 0)
    assert planned == pytest.approx(measured_gb * 1e9, rel=tolerance)


def test_experts_in_fp8_take_what_was_seen_on_a_gpu() -> None:
    """The peak as above, but without the weights in FP8, which were there before: experts run as one grouped product.

    FP8 saves what it saved there, 11.37 - 10.55 GB; what the plan lacks, it lacks in bfloat16 as well.
    """
    shape = replace(PUBLIC_MODELS["qwen3-30b-a3b"], num_layers=4, vocab=32_000)
    wide, narrow = (
        ModelWork.of(shape, split, tokens_per_micro_batch=16_700, device="cuda")
        for split in (ActorConfig(pool="train"), ActorConfig(pool="train", precision="fp8"))
    )
    planned = activation_bytes(narrow, 0) + head_bytes(narrow, 0)
    assert planned == pytest.approx(10.55e9, rel=0.03)
    assert activation_bytes(wide, 0) - activation_bytes(narrow, 0) == pytest.approx(0.82e9, rel=0.01)
    # Two layers of four are in FP8: a byte less of each expert's input and product, and of the input of attention.
    assert activation_bytes(wide, 0) - activation_bytes(narrow, 0) == 2 * narrow.tokens * (8 * (2048 + 768) + 2048)


def test_the_head_counts_on_the_last_stage_and_beyond_a_layer_only() -> None:
    """Its backward pass is over when that of a layer begins."""
    small = replace(SHAPE, vocab=1024)
    for shape, has_excess in ((SHAPE, True), (small, False)):
        split = ActorConfig(pool="train", pipeline=2)
        work = ModelWork.of(shape, split, tokens_per_micro_batch=8192, device="cuda")
        assert head_bytes(work, 0) == 0
        assert (head_bytes(work, 1) > 0) is has_excess
