from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.errors import ConfigError
from megarl.families.shape import ModelShape
from megarl.weights.layouts.sglang import sglang_layout
from tests.weights.reference import assert_equal, fill_from_canonical, make_shape, numbered, sglang_rank, shapes


@pytest.mark.patient
@given(shape=shapes(), tensor=st.sampled_from([1, 2, 4, 8]), num_engines=st.integers(1, 2), data=st.data())
def test_every_rank_holds_what_joining_and_cutting_whole_tensors_gives(
    shape: ModelShape, tensor: int, num_engines: int, data: st.DataObject
) -> None:
    model = numbered(shape)
    expert = data.draw(st.sampled_from([1, 2, 4][: tensor.bit_length()])) if shape.experts else 1
    layout = sglang_layout(shape, tensor=tensor, expert=expert, num_engines=num_engines, dtype="float32")
    assert [holding.rank for holding in layout.holdings] == list(range(tensor * num_engines))
    for holding in layout.holdings:
        expected = sglang_rank(shape, model, tensor=holding.rank % tensor, size=tensor, expert=expert)
        assert_equal(fill_from_canonical(holding, model), expected)


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_cpu_engine_is_the_same_where_the_ranks_divide_everything(tensor: int) -> None:
    shape = make_shape(ffn=128)
    assert sglang_layout(shape, tensor=tensor, dtype="float32") == sglang_layout(
        shape, tensor=tensor, dtype="float32", is_cpu_engine=True
    )


def test_a_cpu_engine_pads_heads_and_feed_forward_rows() -> None:
    shape = make_shape(heads=4, kv_heads=1, ffn=96)
    first, second = sglang_layout(shape, tensor=2, dtype="float32", is_cpu_engine=True).holdings
    attention = "model.layers.0.self_attn."
    # One KV head becomes two, each with four queries: the second rank has only padding.
    assert first.tensors[f"{attention}qkv_proj.weight"].shape == ((4 + 1 + 1) * 2, 8)
    assert first.tensors == second.tensors
    assert not [piece for piece in second.pieces if piece.local_name.startswith((f"{attention}qkv", f"{attention}o_"))]
    gate_up = [piece for piece in second.pieces if piece.local_name == "model.layers.0.mlp.gate_up_proj.weight"]
    assert [(piece.slice.offsets[0], piece.slice.shape[0], piece.local_offsets[0]) for piece in gate_up] == [
        (64, 32, 0),
        (64, 32, 64),
    ]


@pytest.mark.parametrize(
    ("tensor", "expert", "what"), [(2, 4, "the 2 gpus of an engine"), (3, 3, "the model's 4 experts")]
)
def test_experts_that_do_not_divide_are_refused(tensor: int, expert: int, what: str) -> None:
    shape = make_shape("qwen3_moe", heads=6, kv_heads=6)
    with pytest.raises(ConfigError, match=f"expert: {expert} does not divide {what}"):
        sglang_layout(shape, tensor=tensor, expert=expert, dtype="float32", is_cpu_engine=True)


def test_a_split_that_sglang_cannot_make_is_refused_with_all_its_problems() -> None:
    with pytest.raises(ConfigError) as caught:
        sglang_layout(make_shape(), tensor=3, dtype="float32")
    text = str(caught.value)
    assert "3 does not divide the model's 4 attention heads" in text
    assert "3 does not divide the model's vocabulary of 99, padded to 128" in text
