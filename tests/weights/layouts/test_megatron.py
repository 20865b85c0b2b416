from __future__ import annotations

import pytest
from hypothesis import given
from megatron.core.parallel_state import RankGenerator

from megarl.errors import ConfigError
from megarl.families.shape import ModelShape
from megarl.weights.layouts.megatron import MegatronParallel, layout_name, megatron_layout, padded_vocab
from tests.weights.reference import (
    assert_equal,
    fill_from_canonical,
    make_shape,
    megatron_rank,
    numbered,
    parallels,
    shapes,
)


@pytest.mark.patient
@given(shape=shapes(), parallel=parallels())
def test_every_rank_holds_what_joining_and_cutting_whole_tensors_gives(
    shape: ModelShape, parallel: MegatronParallel
) -> None:
    model = numbered(shape)
    layout = megatron_layout(shape, parallel, dtype="float32")
    assert [holding.rank for holding in layout.holdings] == list(range(parallel.world_size))
    for stage in range(parallel.pipeline):
        for tensor in range(parallel.tensor):
            for data in range(parallel.data):
                expected = megatron_rank(shape, parallel, model, tensor=tensor, data=data, stage=stage)
                rank = parallel.rank(tensor=tensor, data=data, pipeline=stage)
                assert_equal(fill_from_canonical(layout.by_rank[rank], model), expected)


def test_ranks_are_in_megatrons_default_order() -> None:
    parallel = MegatronParallel(tensor=2, pipeline=2, data=3, context=2)
    generator = RankGenerator(tp=2, ep=1, dp=3, pp=2, cp=2, order="tp-cp-ep-dp-pp")
    for group in generator.get_ranks("tp"):
        assert [rank % 2 for rank in group] == [0, 1]
    for tensor in range(2):
        for pipeline in range(2):
            ranks = [parallel.rank(tensor=tensor, data=data, pipeline=pipeline) for data in range(3)]
            assert ranks in generator.get_ranks("dp")
    for tensor in range(2):
        for data in range(3):
            ranks = [parallel.rank(tensor=tensor, data=data, pipeline=pipeline) for pipeline in range(2)]
            assert ranks in generator.get_ranks("pp")
            ranks = [parallel.rank(tensor=tensor, data=data, context=context, pipeline=1) for context in range(2)]
            assert ranks in generator.get_ranks("cp")


def test_ranks_that_share_sequences_hold_the_same_parameters_as_data_parallel_ones() -> None:
    for family in ("qwen2", "qwen3_moe"):
        shape = make_shape(family, heads=8, kv_heads=2, ffn=64)
        expert = 2 if shape.experts else 1
        shared = megatron_layout(shape, MegatronParallel(tensor=2, context=2, data=2, expert=expert), dtype="float32")
        apart = megatron_layout(shape, MegatronParallel(tensor=2, data=4, expert=expert), dtype="float32")
        assert shared.holdings == apart.holdings


def test_experts_are_on_the_ranks_that_megatron_groups() -> None:
    parallel = MegatronParallel(tensor=4, pipeline=2, data=4, expert=4, expert_tensor=2)
    generator = RankGenerator(tp=2, ep=4, dp=2, pp=2, cp=1, order="tp-cp-ep-dp-pp")
    places = {
        parallel.rank(tensor=tensor, data=data, pipeline=stage): parallel.expert_place(tensor=tensor, data=data)
        for tensor in range(4)
        for data in range(4)
        for stage in range(2)
    }
    assert parallel.expert_data == 2
    for group in generator.get_ranks("tp"):
        assert [(places[rank].expert, places[rank].part) for rank in group] == [
            (places[group[0]].expert, part) for part in range(2)
        ]
    for group in generator.get_ranks("ep"):
        assert [places[rank].expert for rank in group] == [0, 1, 2, 3]
    for group in generator.get_ranks("dp"):
        assert len({(places[rank].expert, places[rank].part) for rank in group}) == 1


def test_a_split_of_experts_that_cannot_be_is_refused() -> None:
    shape = make_shape("qwen3_moe")
    with pytest.raises(ConfigError) as caught:
        megatron_layout(shape, MegatronParallel(tensor=2, data=2, expert=3), dtype="float32")
    text = str(caught.value)
    assert "expert: 3 does not divide the model's 4 experts" in text
    assert "expert: expert 3 * expert_tensor 2 = 6 does not divide the 4 gpus of a pipeline stage" in text
    with pytest.raises(ConfigError, match="expert_tensor: 128 does not divide the model's 64 intermediate size"):
        megatron_layout(shape, MegatronParallel(data=128, expert_tensor=128), dtype="float32")


def test_uneven_stages_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="with 1 of the model's 8 layers given, 2 other stages cannot have 7 in equal parts"
    ):
        megatron_layout(make_shape(layers=8), MegatronParallel(pipeline=3, first_stage_layers=1), dtype="float32")
    with pytest.raises(ConfigError, match="first_stage_layers: needs pipeline > 1"):
        megatron_layout(make_shape(), MegatronParallel(first_stage_layers=4), dtype="float32")


def test_tied_embeddings_are_on_the_first_and_on_the_last_stage() -> None:
    shape = make_shape(tied=True)
    one = megatron_layout(shape, MegatronParallel(), dtype="float32").by_rank[0].tensors
    assert "chunk0.output_layer.weight" not in one
    two = megatron_layout(shape, MegatronParallel(pipeline=2, virtual_pipeline=2), dtype="float32")
    assert "chunk0.embedding.word_embeddings.weight" in two.by_rank[0].tensors
    assert "chunk1.output_layer.weight" in two.by_rank[1].tensors
    assert "chunk1.output_layer.weight" not in two.by_rank[0].tensors


def test_padded_vocabulary_gives_every_rank_the_same_number_of_rows() -> None:
    assert padded_vocab(99, 1) == 128
    assert padded_vocab(99, 4) == 256
    assert padded_vocab(256, 4) == 256


def test_an_impossible_split_is_refused_with_all_its_problems() -> None:
    shape = make_shape(layers=3, heads=4, kv_heads=2)
    with pytest.raises(ConfigError) as caught:
        megatron_layout(shape, MegatronParallel(tensor=3, pipeline=2), dtype="float32")
    text = str(caught.value)
    assert "3 does not divide the model's 4 attention heads" in text
    assert "3 does not divide the model's 64 intermediate size" in text
    assert "pipeline 2 * virtual_pipeline 1 = 2 does not divide the model's 3 layers" in text
    with pytest.raises(ConfigError, match="3 is neither a divisor nor a multiple of the model's 2 key/value heads"):
        megatron_layout(make_shape(heads=6, kv_heads=2), MegatronParallel(tensor=3), dtype="float32")


FUSED = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def in_transformer_engine(name: str, shape: ModelShape) -> str:
    """Return the name that Transformer Engine's layers in Megatron give to a parameter of the local ones."""
    layer, _, leaf = name.partition("mlp.experts.local_experts.")
    if leaf:
        index, matrix, _ = leaf.split(".")
        return f"{layer}mlp.experts.{matrix}.weight{index}"
    for own, fused in FUSED.items():
        if name.endswith(own) and not (shape.experts and own.startswith("pre_mlp")):
            return name.removesuffix(own) + fused
    return name


@given(shape=shapes(), parallel=parallels())
def test_parameters_of_transformer_engine_have_the_places_of_the_local_ones(
    shape: ModelShape, parallel: MegatronParallel
) -> None:
    for holding in megatron_layout(shape, parallel, dtype="float32").holdings:
        theirs = {in_transformer_engine(name, shape): name for name in holding.tensors}
        assert len(theirs) == len(holding.tensors)
        assert {layout_name(name): name for name in theirs} == {own: name for name, own in theirs.items()}
        assert all(layout_name(own) == own for own in holding.tensors)
