"""Memory held at all times, against slow, obvious sums."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

from megarl.config.draft import ModelDraftConfig, NgramDraftConfig
from megarl.config.lora import LoraConfig
from megarl.config.roles import RolloutRoleConfig
from megarl.families import PUBLIC_MODELS
from megarl.planner.hardware import GPUS
from megarl.planner.memory import (
    ENGINE_CONTEXT_BYTES,
    adapter_slots,
    bare_weights,
    engine_memory,
    planned_cached_tokens,
    stage_memory,
)
from megarl.tools.quickstart.tiny_model import TinyShape, write_tiny_model
from megarl.weights.layouts.canonical import num_parameters
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout
from megarl.weights.layouts.sglang import sglang_layout
from tests.planner.recipes import make_recipe

SHAPE = replace(PUBLIC_MODELS["qwen2.5-7b"], num_layers=8)
H100 = GPUS["h100"]


@pytest.mark.parametrize(
    "parallel",
    [
        MegatronParallel(),
        MegatronParallel(tensor=4, data=3),
        MegatronParallel(tensor=2, pipeline=2, data=2),
        MegatronParallel(pipeline=2, virtual_pipeline=2, data=5),
    ],
)
@pytest.mark.parametrize("is_tied", [False, True])
def test_weights_gradients_and_optimizer_are_those_of_the_full_layout(
    parallel: MegatronParallel, is_tied: bool
) -> None:
    shape = replace(SHAPE, has_tied_embeddings=is_tied)
    layout = megatron_layout(shape, parallel, dtype="bfloat16")
    for stage in stage_memory(shape, parallel, dtype="bfloat16"):
        rank = parallel.rank(tensor=0, data=0, pipeline=stage.stage)
        parameters = sum(prod(spec.shape) for spec in layout.by_rank[rank].tensors.values())
        padding = 2 * len(layout.by_rank[rank].tensors) * 64 + 4 * 128 * parallel.data
        assert 2 * parameters <= stage.weight_bytes <= 2 * (parameters + padding)
        assert stage.gradient_bytes == 2 * stage.weight_bytes
        assert stage.optimizer_bytes == 6 * stage.weight_bytes // parallel.data


def test_adapters_of_policies_are_counted_beside_one_base() -> None:
    parallel, lora = MegatronParallel(), LoraConfig(rank=8)
    one, four = (stage_memory(SHAPE, parallel, dtype="bfloat16", lora=lora, num_adapters=num)[0] for num in (1, 4))
    base = bare_weights(SHAPE, parallel, dtype="bfloat16")[0].num_bytes
    assert four.weight_bytes - base == 4 * (one.weight_bytes - base)
    assert four.gradient_bytes == 4 * one.gradient_bytes
    assert four.optimizer_bytes == 4 * one.optimizer_bytes
    recipe = make_recipe()
    assert adapter_slots(recipe) == 2
    assert adapter_slots(recipe.model_copy(update={"policies": {"a": {}, "b": {}, "c": {}}})) == 6


def test_slots_have_room_for_the_matrices_of_a_stack_that_have_no_adapter() -> None:
    rollout, lora = RolloutRoleConfig(pool="all", tensor=1), LoraConfig(rank=8, modules=("q_proj", "v_proj"))
    heads = SHAPE.num_heads + 2 * SHAPE.num_kv_heads
    each = 2 * 8 * SHAPE.num_layers * (3 * SHAPE.hidden + heads * SHAPE.head_dim)
    assert engine_memory(SHAPE, rollout, H100.memory_bytes, lora=lora, num_adapters=2).adapter_bytes == 3 * each


@pytest.mark.parametrize(
    "parallel",
    [
        MegatronParallel(tensor=2, data=4, expert=4),
        MegatronParallel(tensor=4, data=4, expert=8, expert_tensor=1),
        MegatronParallel(tensor=2, pipeline=3, data=2, expert=4, expert_tensor=1, first_stage_layers=1),
    ],
)
def test_experts_are_divided_and_sharded_over_their_own_replicas(parallel: MegatronParallel) -> None:
    shape = replace(PUBLIC_MODELS["qwen3-30b-a3b"], num_layers=9 if parallel.pipeline == 3 else 4)
    layout = megatron_layout(shape, parallel, dtype="bfloat16")
    for stage in stage_memory(shape, parallel, dtype="bfloat16"):
        tensors = layout.by_rank[parallel.rank(tensor=0, data=0, pipeline=stage.stage)].tensors
        expert = sum(prod(spec.shape) for name, spec in tensors.items() if ".experts." in name)
        dense = sum(prod(spec.shape) for name, spec in tensors.items()) - expert
        assert stage.weight_bytes == pytest.approx(2 * (dense + expert), rel=1e-5)
        optimizer_bytes = 12 * (dense / parallel.data + expert / parallel.expert_data)
        assert stage.optimizer_bytes == pytest.approx(optimizer_bytes, rel=1e-4)


def test_buffers_are_padded_as_megatron_pads_them() -> None:
    # One parameter per layer is no multiple of 64 elements; a bucket ends at a multiple of lcm(data, 128).
    shape = replace(SHAPE, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=2, hidden=10, ffn_hidden=3, vocab=5)
    (stage,) = stage_memory(shape, MegatronParallel(data=3), dtype="float32")
    vocabulary = 64 * 10  # rows come in multiples of 64
    norms, output, qkv, qkv_bias, gate_up, down = [10, 10], 10 * 2, 6 * 10, 6, 6 * 10, 3 * 10
    layer = [*norms, output, qkv, qkv_bias, gate_up, down]
    total = sum(-(-size // 64) * 64 for size in (vocabulary, *layer, 10, vocabulary))
    assert stage.gradient_bytes == 4 * (-(-total // 384) * 384)


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_engine_weights_are_those_of_the_full_layout(tensor: int) -> None:
    recipe = make_recipe(f"roles.rollout.tensor={tensor}", "roles.rollout.max_cached_tokens=5000")
    assert recipe.roles.rollout is not None
    layout = sglang_layout(SHAPE, tensor=tensor, dtype="bfloat16")
    engine = engine_memory(SHAPE, recipe.roles.rollout, H100.memory_bytes)
    assert engine.weight_bytes == max(holding.num_bytes for holding in layout.holdings)
    assert engine.cached_tokens == 5000


@pytest.mark.parametrize(("split", "num_bytes"), [(1, 31_174_545_408), (4, 7_812_827_136)])
def test_engines_hold_experts_in_fp8_in_the_shapes_of_sglang(split: int, num_bytes: int) -> None:
    """Blocks of 128 x 128 have a scale in float32; a rank has whole experts, and rows or columns of the rest."""
    shape = PUBLIC_MODELS["qwen3-30b-a3b"]
    rollout = RolloutRoleConfig(pool="rollout", precision="fp8", tensor=split, expert=split)
    engine = engine_memory(shape, rollout, H100.memory_bytes)
    experts = 128 // split * (3 * 768 * 2048 + 4 * (12 * 16 + 16 * 6))
    attention = (5120 + 4096) // split * 2048 + 4 * (40 + 32) // split * 16
    in_bf16 = 128 * 2048 + 2 * 2048 + 2 * 128  # router and norms
    assert engine.expert_bytes == 48 * experts
    vocabulary = 2 * 2 * 151_936 // split * 2048
    assert engine.weight_bytes == 48 * (experts + attention + 2 * in_bf16) + vocabulary + 2 * 2048 == num_bytes


def test_the_cache_takes_what_the_fraction_leaves() -> None:
    recipe = make_recipe()
    assert recipe.roles.rollout is not None
    engine = engine_memory(SHAPE, recipe.roles.rollout, H100.memory_bytes)
    assert engine.cache_bytes_per_token == 2 * 8 * 2 * 128 * 2
    limit = 0.6 * (H100.memory_bytes - ENGINE_CONTEXT_BYTES)
    assert limit - engine.cache_bytes_per_token < engine.weight_bytes + engine.cache_bytes <= limit
    assert planned_cached_tokens(SHAPE, recipe.roles.rollout, H100) == engine.cached_tokens


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_draft_takes_weights_and_cache_of_its_own(tensor: int, tmp_path: Path) -> None:
    small = TinyShape(vocab=SHAPE.vocab)
    write_tiny_model(tmp_path, small, seed=0)
    plain = RolloutRoleConfig(pool="all", tensor=tensor)
    drafting = plain.model_copy(update={"draft": ModelDraftConfig(kind="model", path=tmp_path)})
    one, other = (engine_memory(SHAPE, each, H100.memory_bytes) for each in (plain, drafting))
    assert other.draft_bytes == other.weight_bytes - one.weight_bytes
    assert other.draft_bytes == 2 * num_parameters(small.as_model()) // tensor
    cached = 2 * 2 * 2 * 2 * 16 // tensor  # keys and values of two layers with two heads each, two bytes
    assert other.cache_bytes_per_token == one.cache_bytes_per_token + cached
    assert other.cached_tokens < one.cached_tokens
    ngram = plain.model_copy(update={"draft": NgramDraftConfig(kind="ngram")})
    assert engine_memory(SHAPE, ngram, H100.memory_bytes) == one


@pytest.mark.parametrize(
    "parallel", [MegatronParallel(tensor=4, data=3), MegatronParallel(pipeline=2, virtual_pipeline=2)]
)
def test_bare_weights_are_those_of_the_full_layout(parallel: MegatronParallel) -> None:
    layout = megatron_layout(SHAPE, parallel, dtype="bfloat16")
    for stage, found in enumerate(bare_weights(SHAPE, parallel, dtype="bfloat16")):
        holding = layout.by_rank[parallel.rank(tensor=0, data=0, pipeline=stage)]
        assert found.num_bytes == holding.num_bytes
        assert found.largest_bytes == max(spec.num_bytes for spec in holding.tensors.values())
