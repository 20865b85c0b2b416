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
    served_layout,
)
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout
from megarl.weights.layouts.pieces import replicate, whole
from megarl.weights.layouts.sglang import sglang_layout
from tests.weights.reference import (
    PADDING,
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


@pytest.mark.parametrize("tensor", [1, 2])
def test_the_layers_of_a_shared_expert_are_apart_in_engines(tensor: int) -> None:
    shape = make_shape("qwen2_moe", layers=1)
    lora = LoraShape(rank=3, modules=frozenset({"gate_proj", "up_proj", "down_proj"}))
    model = numbered_tensors(adapter_tensors(canonical_tensors(shape), lora))
    layout = served_layout(sglang_layout(shape, tensor=tensor, dtype="float32"), lora)
    source, local = "model.layers.0.mlp.shared_expert.", "model.layers.0.mlp.shared_expert."
    for holding in layout.holdings:
        expected = {
            f"{local}wo_ud.lora_a": np.split(model[canonical_a(f"{source}down_proj.weight")], tensor, axis=1)[
                holding.rank
            ],
            f"{local}wo_ud.lora_b": model[canonical_b(f"{source}down_proj.weight")],
        }
        for name, served in (("gate_proj", "q_b_proj"), ("up_proj", "kv_b_proj")):
            expected[f"{local}{served}.lora_a"] = model[canonical_a(f"{source}{name}.weight")]
            rows = np.split(model[canonical_b(f"{source}{name}.weight")], tensor)
            expected[f"{local}{served}.lora_b"] = rows[holding.rank]
        assert_equal(fill_from_canonical(holding, model), expected)


def test_engines_have_room_for_the_matrices_of_a_stack_that_have_no_adapter() -> None:
    shape = make_shape("qwen3", layers=1, heads=4, kv_heads=2)
    lora = LoraShape(rank=3, modules=frozenset({"q_proj", "v_proj", "gate_proj"}))
    model = numbered_tensors(adapter_tensors(canonical_tensors(shape), lora))
    (holding,) = served_layout(sglang_layout(shape, tensor=1, dtype="float32"), lora).holdings
    layer, nothing = "model.layers.0.", np.full((3, 8), PADDING)
    found = fill_from_canonical(holding, model)
    stack = [model[canonical_a(f"{layer}self_attn.{name}_proj.weight")] for name in "qv"]
    assert np.array_equal(found[f"{layer}self_attn.qkv_proj.lora_a"], np.concatenate([stack[0], nothing, stack[1]]))
    gate = model[canonical_a(f"{layer}mlp.gate_proj.weight")]
    assert np.array_equal(found[f"{layer}mlp.gate_up_proj.lora_a"], np.concatenate([gate, nothing]))
    assert adapter_layout(megatron_layout(shape, MegatronParallel(), dtype="float32"), lora).by_rank[0].tensors[
        "chunk0.decoder.layers.0.self_attention.linear_qkv.lora_a"
    ].shape == (6, 8), "a trainer has none"


@pytest.mark.patient
@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_an_engine_rank_has_the_part_that_goes_with_its_heads_and_rows(tensor: int) -> None:
    shape = make_shape(layers=1, heads=4, kv_heads=4)
    model = numbered_tensors(adapter_tensors(canonical_tensors(shape), LORA))
    layout = served_layout(sglang_layout(shape, tensor=tensor, dtype="float32"), LORA)
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


@pytest.mark.patient
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
        served_layout(sglang_layout(shape, tensor=tensor, num_engines=2, dtype="float32"), LORA),
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
