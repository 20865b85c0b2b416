from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megarl.errors import WeightSyncError
from megarl.families import PUBLIC_MODELS
from megarl.families.shape import ModelShape
from megarl.weights.algebra.plan import plan
from megarl.weights.algebra.slices import Holding, Layout, Link, Piece, Slice, TensorSpec, same_processes
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout
from megarl.weights.layouts.sglang import sglang_layout
from tests.weights.reference import (
    make_shape,
    parallels,
    shapes,
)


@settings(max_examples=10)
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


@settings(max_examples=12)
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


@pytest.mark.parametrize(
    ("model", "parallel", "tensor", "expert", "num_engines"),
    [
        ("llama-3.1-70b", MegatronParallel(tensor=8, pipeline=4, data=2), 8, 1, 4),
        pytest.param(
            "qwen3-235b-a22b",
            MegatronParallel(tensor=4, pipeline=8, data=4, expert=16, expert_tensor=1, last_stage_layers=10),
            32,
            32,
            1,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_large_model_is_planned_in_seconds(
    model: str, parallel: MegatronParallel, tensor: int, expert: int, num_engines: int
) -> None:
    shape = PUBLIC_MODELS[model]
    start = time.process_time()
    trainer = megatron_layout(shape, parallel, dtype="bfloat16")
    engines = sglang_layout(shape, tensor=tensor, expert=expert, num_engines=num_engines, dtype="bfloat16")
    traffic = plan(trainer, engines).traffic
    assert time.process_time() - start < 20
    assert traffic.busiest_bytes < 1.5 * traffic.floor_bytes
