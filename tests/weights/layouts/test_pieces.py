from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout
from megarl.weights.layouts.pieces import flat_boxes, restrict, restrict_all
from tests.weights.reference import make_shape

SHAPES = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)


@given(SHAPES, st.data())
def test_the_boxes_of_a_range_are_its_elements_each_once(shape: tuple[int, ...], data: st.DataObject) -> None:
    size = prod(shape)
    start = data.draw(st.integers(0, size))
    end = data.draw(st.integers(start, size))
    counts = np.zeros(shape, dtype=np.int64)
    boxes = list(flat_boxes(shape, start, end))
    for offsets, extent in boxes:
        counts[tuple(slice(first, first + num) for first, num in zip(offsets, extent, strict=True))] += 1
    expected = np.zeros(size, dtype=np.int64)
    expected[start:end] = 1
    np.testing.assert_array_equal(counts.ravel(), expected)
    assert len(boxes) <= 2 * len(shape) - 1


@given(st.integers(0, 10**6), st.sampled_from([1, 2]), st.sampled_from([1, 2]))
def test_ranges_that_split_every_parameter_hold_the_whole_model_once(seed: int, tensor: int, pipeline: int) -> None:
    layout = megatron_layout(make_shape(), MegatronParallel(tensor=tensor, pipeline=pipeline, data=2), dtype="bfloat16")
    random = np.random.default_rng(seed)
    ranges: dict[int, dict[str, tuple[int, int]]] = {holding.rank: {} for holding in layout.holdings}
    for stage in range(pipeline):
        for tensor_rank in range(tensor):
            first, second = (tensor_rank + tensor * (data + 2 * stage) for data in range(2))
            for name, spec in layout.by_rank[first].tensors.items():
                size = prod(spec.shape)
                cut = int(random.integers(0, size + 1))
                ranges[first][name], ranges[second][name] = (0, cut), (cut, size)

    sharded = restrict_all(layout, ranges, dtype="float32")

    counts = {name: np.zeros(spec.shape, dtype=np.int64) for name, spec in layout.canonical.items()}
    for holding in sharded.holdings:
        for piece in holding.pieces:
            box = piece.slice
            ends = [first + num for first, num in zip(box.offsets, box.shape, strict=True)]
            counts[box.name][tuple(map(slice, box.offsets, ends))] += 1
    whole = {name: np.zeros_like(count) for name, count in counts.items()}
    for holding in megatron_layout(
        make_shape(), MegatronParallel(tensor=tensor, pipeline=pipeline), dtype="float32"
    ).holdings:
        for piece in holding.pieces:
            box = piece.slice
            ends = [first + num for first, num in zip(box.offsets, box.shape, strict=True)]
            whole[box.name][tuple(map(slice, box.offsets, ends))] += 1
    for name, count in counts.items():
        np.testing.assert_array_equal(count, whole[name], err_msg=name)
    assert all(spec.dtype == "float32" for spec in sharded.canonical.values())


def test_a_tensor_that_no_rank_trains_is_not_in_the_layout_of_an_optimizer() -> None:
    layout = megatron_layout(make_shape(), MegatronParallel(tensor=2), dtype="float32")
    ranges = {
        holding.rank: {name: (0, prod(spec.shape)) for name, spec in holding.tensors.items() if "final" not in name}
        for holding in layout.holdings
    }
    sharded = restrict_all(layout, ranges, dtype="float32")
    assert layout.canonical.keys() - sharded.canonical.keys() == {"model.norm.weight"}


def test_a_parameter_without_a_range_is_not_held() -> None:
    layout = megatron_layout(make_shape(), MegatronParallel(), dtype="float32")
    (holding,) = layout.holdings
    name = next(iter(holding.tensors))
    held = restrict(holding, {name: (0, 1)}, dtype="float32")
    assert list(held.tensors) == [name]
    assert sum(piece.slice.num_elements for piece in held.pieces) == 1
