from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megarl.config.hub import PUBLIC_MODELS
from megarl.config.model import Family, ModelShape
from megarl.errors import WeightSyncError
from megarl.weights.algebra.plan import plan
from megarl.weights.algebra.slices import Holding, Layout, Link, Piece, Slice, TensorSpec, on_gpus, same_processes
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout
from megarl.weights.layouts.sglang import sglang_layout
from tests.weights.reference import (
    apply,
    assert_equal,
    empty,
    fill_from_canonical,
    make_shape,
    megatron_rank,
    numbered,
    parallels,
    shapes,
)


@settings(max_examples=40, deadline=None)
@given(shape=shapes(), before=parallels(), after=parallels())
def test_resuming_on_another_split_writes_every_element_once_and_right(
    shape: ModelShape, before: MegatronParallel, after: MegatronParallel
) -> None:
    model = numbered(shape)
    old = megatron_layout(shape, before, dtype="float32")
    new = megatron_layout(shape, after, dtype="float32")
    targets = {holding.rank: empty(holding) for holding in new.holdings}
    sources = {holding.rank: fill_from_canonical(holding, model) for holding in old.holdings}
    apply(plan(old, new, locations=same_processes(old, new)).moves, sources, targets)
    last = {"tensor": 0, "data": after.data - 1}
    expected = megatron_rank(shape, after, model, **last, stage=after.pipeline - 1)
    assert_equal(targets[after.rank(**last, pipeline=after.pipeline - 1)], expected)


@settings(max_examples=30, deadline=None)
@given(shape=shapes(), parallel=parallels(), tensor=st.sampled_from([1, 2, 4]))
def test_the_same_layouts_always_give_the_same_plan(shape: ModelShape, parallel: MegatronParallel, tensor: int) -> None:
    def make() -> Layout:
        return megatron_layout(shape, parallel, dtype="float32")

    target = sglang_layout(shape, tensor=tensor, dtype="float32")
    shuffled = replace(make(), holdings=tuple(reversed(make().holdings)))
    assert plan(make(), target).hash == plan(make(), target).hash
    assert plan(shuffled, target).hash == plan(make(), target).hash


def test_the_hash_tells_layouts_and_dtypes_apart() -> None:
    shape = make_shape()
    source = megatron_layout(shape, MegatronParallel(tensor=2), dtype="float32")
    hashes = {
        plan(source, sglang_layout(shape, tensor=tensor, dtype=dtype)).hash
        for tensor in (1, 2)
        for dtype in ("float32", "bfloat16")
    }
    assert len(hashes) == 4


@settings(max_examples=30, deadline=None)
@given(shape=shapes(), parallel=parallels(), num_engines=st.integers(1, 4))
def test_replicas_share_the_load(shape: ModelShape, parallel: MegatronParallel, num_engines: int) -> None:
    # Data-parallel ranks that divide the experts among them are no replicas.
    assume(shape.experts is None or (parallel.expert == 1 and parallel.expert_tensor in (None, parallel.tensor)))
    trainer = megatron_layout(shape, parallel, dtype="float32")
    result = plan(trainer, sglang_layout(shape, tensor=2, num_engines=num_engines, dtype="float32"))
    largest = 4 * max(move.slice.num_elements for move in result.moves)
    for stage in range(parallel.pipeline):
        for tensor in range(parallel.tensor):
            ranks = [parallel.rank(tensor=tensor, data=data, pipeline=stage) for data in range(parallel.data)]
            sent = [result.traffic.sent_bytes.get(rank, 0) for rank in ranks]
            assert max(sent) - min(sent) <= largest


@settings(max_examples=30, deadline=None)
@given(shape=shapes(), parallel=parallels(), num_engines=st.integers(1, 4))
def test_same_node_holders_come_first(shape: ModelShape, parallel: MegatronParallel, num_engines: int) -> None:
    trainer = megatron_layout(shape, parallel, dtype="float32")
    engines = sglang_layout(shape, tensor=2, num_engines=num_engines, dtype="float32")
    source_nodes = [holding.rank // 2 for holding in trainer.holdings]
    target_nodes = [holding.rank // 2 for holding in engines.holdings]
    locations = on_gpus(
        [(node, rank) for rank, node in enumerate(source_nodes)],
        [(node, -1 - rank) for rank, node in enumerate(target_nodes)],
    )
    result = plan(trainer, engines, locations=locations)
    holders = {
        (piece.slice.name, piece.slice.offsets, piece.slice.shape): set[int]()
        for holding in trainer.holdings
        for piece in holding.pieces
    }
    for holding in trainer.holdings:
        for piece in holding.pieces:
            holders[piece.slice.name, piece.slice.offsets, piece.slice.shape].add(holding.rank)
    for move in result.moves:
        if move.hop:
            continue
        held_by = next(
            ranks
            for (name, offsets, extent), ranks in holders.items()
            if name == move.slice.name
            and move.source_rank in ranks
            and all(a <= b < a + size for a, b, size in zip(offsets, move.slice.offsets, extent, strict=True))
        )
        near = {rank for rank in held_by if source_nodes[rank] == target_nodes[move.target_rank]}
        assert not near or move.source_rank in near
    assert set(result.traffic.bytes_by_link) <= {Link.NODE, Link.NETWORK}


def test_a_rank_that_has_the_box_itself_moves_nothing_over_a_link() -> None:
    layout = megatron_layout(make_shape(), MegatronParallel(tensor=2, data=2), dtype="float32")
    result = plan(layout, layout, locations=same_processes(layout, layout))
    assert set(result.traffic.bytes_by_link) == {Link.PROCESS}
    assert result.traffic.neediest_bytes == result.traffic.busiest_bytes == 0


def test_sizes_are_stated_in_the_targets_bytes_and_never_below_the_floor() -> None:
    shape = make_shape()
    trainer = megatron_layout(shape, MegatronParallel(tensor=2, data=2), dtype="float32")
    result = plan(trainer, sglang_layout(shape, tensor=2, num_engines=2, dtype="bfloat16"))
    num_bytes = sum(2 * move.slice.num_elements for move in result.moves)
    assert sum(result.traffic.bytes_by_link.values()) == num_bytes
    assert sum(result.traffic.sent_bytes.values()) == sum(result.traffic.received_bytes.values()) == num_bytes
    assert result.traffic.neediest_bytes == max(result.traffic.received_bytes.values())
    assert result.traffic.floor_bytes <= result.traffic.busiest_bytes <= 2 * result.traffic.floor_bytes


def one_tensor(rank: int, offsets: tuple[int, int], extent: tuple[int, int]) -> Holding:
    box = Slice(name="w", offsets=offsets, shape=extent)
    piece = Piece(slice=box, local_name="local", local_offsets=(0, 0))
    return Holding(rank=rank, tensors={"local": TensorSpec(shape=extent, dtype="float32")}, pieces=(piece,))


CANONICAL = {"w": TensorSpec(shape=(6, 4), dtype="float32")}


def test_overlapping_holders_of_different_boxes_still_write_once() -> None:
    source = Layout(
        canonical=CANONICAL,
        holdings=(one_tensor(0, (0, 0), (4, 4)), one_tensor(1, (2, 0), (4, 4)), one_tensor(2, (1, 1), (3, 2))),
    )
    target = Layout(canonical=CANONICAL, holdings=(one_tensor(0, (0, 0), (6, 4)),))
    written = {
        (row, column)
        for move in plan(source, target).moves
        for row in range(move.target_offsets[0], move.target_offsets[0] + move.slice.shape[0])
        for column in range(move.target_offsets[1], move.target_offsets[1] + move.slice.shape[1])
    }
    assert len(written) == 24 == sum(move.slice.num_elements for move in plan(source, target).moves)


def test_an_element_that_nobody_holds_is_named() -> None:
    source = Layout(canonical=CANONICAL, holdings=(one_tensor(0, (0, 0), (6, 3)),))
    target = Layout(canonical=CANONICAL, holdings=(one_tensor(0, (2, 0), (4, 4)),))
    with pytest.raises(WeightSyncError, match=r"no source holds w\[2:6, 3:4\]"):
        plan(source, target)


def test_models_of_different_shapes_are_refused() -> None:
    source = megatron_layout(make_shape(vocab=99), MegatronParallel(), dtype="float32")
    target = sglang_layout(make_shape(vocab=98), tensor=1, dtype="float32")
    with pytest.raises(WeightSyncError, match=r"model.embed_tokens.weight is \(99, 8\) at the source and \(98, 8\)"):
        plan(source, target)


def test_a_70b_model_is_planned_in_seconds() -> None:
    shape = replace(
        make_shape(Family.LLAMA, layers=80, heads=64, kv_heads=8, vocab=128256, ffn=28672),
        hidden=8192,
        head_dim=128,
        dtype="bfloat16",
    )
    start = time.process_time()
    trainer = megatron_layout(shape, MegatronParallel(tensor=8, pipeline=4, data=2), dtype="bfloat16")
    result = plan(trainer, sglang_layout(shape, tensor=8, num_engines=4, dtype="bfloat16"))
    assert time.process_time() - start < 20
    assert result.traffic.busiest_bytes < 1.5 * result.traffic.floor_bytes


def test_a_235b_mixture_is_planned_in_seconds() -> None:
    shape = PUBLIC_MODELS["qwen3-235b-a22b"]
    parallel = MegatronParallel(tensor=4, pipeline=8, data=4, expert=16, expert_tensor=1, last_stage_layers=10)
    start = time.process_time()
    trainer = megatron_layout(shape, parallel, dtype="bfloat16")
    result = plan(trainer, sglang_layout(shape, tensor=32, expert=32, dtype="bfloat16"))
    assert time.process_time() - start < 20
    assert result.traffic.busiest_bytes < 1.5 * result.traffic.floor_bytes
