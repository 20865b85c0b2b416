from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.families.shape import ModelShape
from megarl.weights.algebra.plan import plan
from megarl.weights.algebra.slices import Layout
from megarl.weights.layouts.canonical import canonical_tensors
from megarl.weights.layouts.lora import (
    LoraShape,
    adapter_layout,
    adapter_tensors,
    canonical_a,
    canonical_b,
    served_tensors,
)
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout
from megarl.weights.layouts.pieces import replicate, whole
from megarl.weights.layouts.sglang import sglang_layout
from tests.weights.reference import (
    Array,
    apply,
    assert_equal,
    empty,
    fill_from_canonical,
    make_shape,
    numbered_tensors,
    parallels,
    shapes,
)

ALL = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})
LORA = LoraShape(rank=3, modules=ALL)


def test_an_adapter_has_the_names_and_shapes_of_its_file() -> None:
    shape = make_shape("qwen3", layers=1, heads=4, kv_heads=2)
    adapters = adapter_tensors(canonical_tensors(shape), LoraShape(rank=3, modules=frozenset({"k_proj"})))
    assert {name: spec.shape for name, spec in adapters.items()} == {
        "base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight": (3, 8),
        "base_model.model.model.layers.0.self_attn.k_proj.lora_B.weight": (4, 3),
    }


def test_of_the_experts_of_a_mixture_the_shared_one_has_an_adapter() -> None:
    shape = make_shape("qwen2_moe", layers=1)
    assert shape.experts is not None
    width, lora = shape.experts.shared, LoraShape(rank=3, modules=frozenset({"gate_proj", "up_proj", "down_proj"}))
    prefix = "base_model.model.model.layers.0.mlp.shared_expert."
    found = served_tensors(canonical_tensors(shape), lora, dtype="float32")
    assert {name: spec.shape for name, spec in found.items()} == {
        f"{prefix}q_b_proj.lora_A.weight": (3, 8),
        f"{prefix}q_b_proj.lora_B.weight": (width, 3),
        f"{prefix}kv_b_proj.lora_A.weight": (3, 8),
        f"{prefix}kv_b_proj.lora_B.weight": (width, 3),
        f"{prefix}wo_ud.lora_A.weight": (3, width),
        f"{prefix}wo_ud.lora_B.weight": (8, 3),
    }


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_an_engine_rank_has_the_part_that_goes_with_its_heads_and_rows(tensor: int) -> None:
    shape = make_shape(layers=1, heads=4, kv_heads=4)
    model = numbered_tensors(adapter_tensors(canonical_tensors(shape), LORA))
    layout = adapter_layout(sglang_layout(shape, tensor=tensor, dtype="float32"), LORA)
    layer = "model.layers.0."

    def a(name: str) -> Array:
        return model[canonical_a(f"{layer}{name}.weight")]

    def b(name: str, rank: int) -> Array:
        return np.split(model[canonical_b(f"{layer}{name}.weight")], tensor)[rank]

    for holding in layout.holdings:
        rank = holding.rank
        heads = [f"self_attn.{letter}_proj" for letter in "qkv"]
        halves = ["mlp.gate_proj", "mlp.up_proj"]
        expected = {
            f"{layer}self_attn.qkv_proj.lora_a": np.concatenate([a(name) for name in heads]),
            f"{layer}self_attn.qkv_proj.lora_b": np.concatenate([b(name, rank) for name in heads]),
            f"{layer}self_attn.o_proj.lora_a": np.split(a("self_attn.o_proj"), tensor, axis=1)[rank],
            f"{layer}self_attn.o_proj.lora_b": model[canonical_b(f"{layer}self_attn.o_proj.weight")],
            f"{layer}mlp.gate_up_proj.lora_a": np.concatenate([a(name) for name in halves]),
            f"{layer}mlp.gate_up_proj.lora_b": np.concatenate([b(name, rank) for name in halves]),
            f"{layer}mlp.down_proj.lora_a": np.split(a("mlp.down_proj"), tensor, axis=1)[rank],
            f"{layer}mlp.down_proj.lora_b": model[canonical_b(f"{layer}mlp.down_proj.weight")],
        }
        assert_equal(fill_from_canonical(holding, model), expected)


@settings(max_examples=15)
@given(shape=shapes(), parallel=parallels(), tensor=st.sampled_from([1, 2, 4]))
def test_adapters_go_from_files_to_ranks_to_engines_and_back(
    shape: ModelShape, parallel: MegatronParallel, tensor: int
) -> None:
    model = numbered_tensors(adapter_tensors(canonical_tensors(shape), LORA))
    canonical = adapter_tensors(canonical_tensors(shape), LORA)
    file = [whole(name, name, spec) for name, spec in canonical.items()]
    folder = Layout(canonical=canonical, holdings=tuple(replicate([0], file, dtype="float32")))
    stops = [
        folder,
        adapter_layout(megatron_layout(shape, parallel, dtype="float32"), LORA),
        adapter_layout(sglang_layout(shape, tensor=tensor, num_engines=2, dtype="float32"), LORA),
        folder,
    ]
    held = {0: dict(model)}
    for source, target in pairwise(stops):
        received = {holding.rank: empty(holding) for holding in target.holdings}
        apply(plan(source, target).moves, held, received)
        held = received
    assert_equal(held[0], model)


def test_replicas_of_a_matrix_are_replicas_of_its_adapter() -> None:
    base = megatron_layout(make_shape(), MegatronParallel(tensor=2, data=2), dtype="bfloat16")
    adapters = adapter_layout(base, LORA)
    first, second = adapters.by_rank[0], adapters.by_rank[2]
    assert first.pieces is second.pieces
    assert {spec.dtype for spec in first.tensors.values()} == {"bfloat16"}
