from __future__ import annotations

import pytest

from megarl.config.model import TRAITS, Family
from megarl.weights.algebra.slices import Layout
from megarl.weights.layouts.canonical import canonical_tensors
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout
from megarl.weights.layouts.sglang import sglang_layout
from megarl.weights.recordings import LM_HEAD, LOGPROBS, hook_points, module_hooks
from tests.weights.reference import make_shape


@pytest.mark.parametrize("family", [family for family in Family if not TRAITS[family].has_experts])
@pytest.mark.parametrize("tied", [False, True])
def test_every_weight_belongs_to_a_site(family: Family, tied: bool) -> None:
    shape = make_shape(family, layers=2, tied=tied)
    owned = [weight for point in hook_points(shape) for weight in point.weights]
    # Tied embeddings are both the first and the last weight.
    assert len(owned) == len(set(owned)) + tied
    assert set(owned) == set(canonical_tensors(shape))


def test_sites_are_in_the_order_of_the_forward_pass() -> None:
    names = [point.name for point in hook_points(make_shape(layers=2))]
    assert names[:6] == [
        "model.embed_tokens",
        "model.layers.0.input_layernorm",
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.self_attn.k_proj",
        "model.layers.0.self_attn.v_proj",
        "model.layers.0.self_attn.attention",
    ]
    assert names[-4:] == ["model.layers.1.mlp.down_proj", "model.norm", LM_HEAD, LOGPROBS]


@pytest.mark.parametrize(
    "layout",
    [
        megatron_layout(make_shape(), MegatronParallel(tensor=2, pipeline=2, virtual_pipeline=2), dtype="float32"),
        megatron_layout(make_shape(kv_heads=1), MegatronParallel(tensor=4), dtype="float32"),
        sglang_layout(make_shape(Family.QWEN3, tied=True), tensor=2, dtype="float32", is_cpu_engine=True),
        sglang_layout(make_shape(kv_heads=1), tensor=4, dtype="bfloat16"),
    ],
    ids=["megatron", "megatron-split-groups", "sglang-cpu", "sglang-replicas"],
)
def test_the_ranks_of_a_layout_see_every_site_but_the_last_two(layout: Layout) -> None:
    seen = {
        columns.hook_point
        for holding in layout.holdings
        for hook in module_hooks(holding)
        for columns in (*hook.inputs, *hook.outputs)
    }
    layers = {name.split(".")[2] for name in layout.canonical if ".layers." in name}
    shape = make_shape(layers=len(layers))
    assert seen == {point.name for point in hook_points(shape)[:-2]}
