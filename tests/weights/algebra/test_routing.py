"""The cut of tensors into boxes, and the order of GPUs in a shared pool."""

from __future__ import annotations

import time
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.families import PUBLIC_MODELS
from megarl.weights.algebra.plan import plan
from megarl.weights.algebra.routing import Box, _best_tp_ranks, atoms, bundles, nearest_order
from megarl.weights.algebra.slices import Gpu, Holding, Layout, Link, Piece, Slice, TensorSpec, on_gpus
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout
from megarl.weights.layouts.sglang import sglang_layout
from tests.weights.reference import make_shape


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    offsets = tuple(draw(st.integers(0, 6)) for _ in range(2))
    return offsets, tuple(draw(st.integers(1, 8 - offset)) for offset in offsets)


@given(given_boxes=st.lists(boxes(), min_size=1, max_size=6))
def test_atoms_are_disjoint_and_say_which_boxes_are_around_them(given_boxes: list[Box]) -> None:
    grid = np.zeros((8, 8), dtype=np.int64)
    for (offsets, shape), around in atoms(given_boxes):
        rows, columns = (slice(at, at + size) for at, size in zip(offsets, shape, strict=True))
        grid[rows, columns] += 1
        for box in set(given_boxes):
            inside = np.zeros((8, 8), dtype=bool)
            inside[tuple(slice(at, at + size) for at, size in zip(*box, strict=True))] = True
            assert inside[rows, columns].all() == (box in around)
            assert inside[rows, columns].any() == (box in around)
    covered = np.zeros((8, 8), dtype=np.int64)
    for offsets, shape in given_boxes:
        covered[tuple(slice(at, at + size) for at, size in zip(offsets, shape, strict=True))] = 1
    assert (grid == covered).all()


def test_a_large_model_is_a_few_hundred_bundles() -> None:
    shape = PUBLIC_MODELS["llama-3.1-70b"]
    source = megatron_layout(shape, MegatronParallel(tensor=8, pipeline=4, data=16), dtype="bfloat16")
    all_bundles = list(bundles(source, sglang_layout(shape, tensor=4, num_engines=64, dtype="bfloat16")))
    assert len(all_bundles) < 300
    assert max(len(bundle.targets) for bundle in all_bundles) == 256


def test_a_target_with_two_copies_of_a_tensor_gets_both() -> None:
    canonical = {"w": TensorSpec(shape=(4,), dtype="float32")}
    box = Slice(name="w", offsets=(0,), shape=(4,))

    def holding(rank: int, *names: str) -> Holding:
        pieces = tuple(Piece(slice=box, local_name=name, local_offsets=(0,)) for name in names)
        return Holding(rank=rank, tensors=dict.fromkeys(names, canonical["w"]), pieces=pieces)

    source = Layout(canonical=canonical, holdings=(holding(0, "a"),))
    target = Layout(canonical=canonical, holdings=(holding(0, "first", "second"), holding(1, "only")))
    assert [(bundle.copy, bundle.targets) for bundle in bundles(source, target)] == [(0, (0, 1)), (1, (0,))]


SHAPE = make_shape(heads=8, kv_heads=4)


def bytes_on_device(parallel: MegatronParallel, tensor: int, trainers: list[Gpu], engines: list[Gpu]) -> int:
    source = megatron_layout(SHAPE, parallel, dtype="float32")
    target = sglang_layout(SHAPE, tensor=tensor, num_engines=len(engines) // tensor, dtype="float32")
    return plan(source, target, locations=on_gpus(trainers, engines)).traffic.bytes_by_link.get(Link.DEVICE, 0)


@pytest.mark.parametrize(
    ("parallel", "tensor"),
    [
        (MegatronParallel(tensor=2, pipeline=2), 4),
        (MegatronParallel(tensor=4), 2),
        (MegatronParallel(tensor=2, data=2), 4),
        (MegatronParallel(pipeline=2, data=2), 2),
    ],
)
def test_no_other_order_of_a_nodes_gpus_keeps_more_bytes_in_place(parallel: MegatronParallel, tensor: int) -> None:
    gpus = [(0, number) for number in range(4)]
    order = nearest_order(
        megatron_layout(SHAPE, parallel, dtype="float32"),
        sglang_layout(SHAPE, tensor=tensor, dtype="float32"),
        gpus,
        gpus,
    )
    assert sorted(order) == [0, 1, 2, 3]
    best = max(
        bytes_on_device(parallel, tensor, gpus, [gpus[place] for place in other]) for other in permutations(range(4))
    )
    assert bytes_on_device(parallel, tensor, gpus, [gpus[place] for place in order]) == best


def test_an_engine_stays_on_its_node() -> None:
    gpus = [(node, number) for node in range(2) for number in range(4)]
    order = nearest_order(
        megatron_layout(SHAPE, MegatronParallel(tensor=4, pipeline=2), dtype="float32"),
        sglang_layout(SHAPE, tensor=2, dtype="float32"),
        gpus,
        gpus,
    )
    assert sorted(order[:4]) == [0, 1, 2, 3]
    assert sorted(order[4:]) == [4, 5, 6, 7]


def test_an_engine_that_spans_nodes_takes_the_gpus_as_they_come() -> None:
    gpus = [(node, number) for node in range(2) for number in range(2)]
    source = megatron_layout(SHAPE, MegatronParallel(tensor=2, pipeline=2), dtype="float32")
    assert nearest_order(source, sglang_layout(SHAPE, tensor=4, dtype="float32"), gpus, gpus) == [0, 1, 2, 3]


@st.composite
def nodes(draw: st.DrawFn) -> tuple[tuple[tuple[int, ...], ...], int]:
    """Draw, for a node of up to six GPUs and its engines, the bytes that each TP rank would find on each GPU."""
    tensor, num_engines = draw(st.sampled_from([(1, 3), (2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (4, 1), (6, 1)]))
    row = st.tuples(*[st.integers(0, draw(st.sampled_from([1, 7, 10**13])))] * tensor)
    return tuple(draw(row) for _ in range(tensor * num_engines)), num_engines


@given(nodes())
def test_no_permutation_of_a_nodes_gpus_is_better(node: tuple[tuple[tuple[int, ...], ...], int]) -> None:
    values, num_engines = node
    slots = [tp for tp in range(len(values[0])) for _ in range(num_engines)]

    def total(order: tuple[int, ...]) -> int:
        return sum(row[tp] for row, tp in zip(values, order, strict=True))

    found = _best_tp_ranks(values, num_engines)
    assert sorted(found) == slots
    assert total(found) == max(total(order) for order in permutations(slots))


def test_a_rack_of_72_gpus_is_ordered_in_seconds() -> None:
    values = tuple(tuple((gpu * 7919 + tp * 104729) % 1009 for tp in range(8)) for gpu in range(72))
    began = time.monotonic()
    assert sorted(_best_tp_ranks(values, 9)) == [tp for tp in range(8) for _ in range(9)]
    assert time.monotonic() - began < 20
