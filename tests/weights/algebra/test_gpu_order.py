from __future__ import annotations

import time
from itertools import permutations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from megarl.weights.algebra.plan import plan
from megarl.weights.algebra.routing import _best_tp_ranks, nearest_order
from megarl.weights.algebra.slices import Gpu, Link, on_gpus
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout
from megarl.weights.layouts.sglang import sglang_layout
from tests.weights.reference import make_shape

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
