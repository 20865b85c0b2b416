from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megarl.config.hub import PUBLIC_MODELS
from megarl.weights.algebra.routing import Box, atoms, bundles
from megarl.weights.algebra.slices import Holding, Layout, Piece, Slice, TensorSpec
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout
from megarl.weights.layouts.sglang import sglang_layout


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
