from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megarl.weights.algebra.slices import Index, Slice, intersect, shift, subtract

EXTENT = (6, 5)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[Index, Index]:
    offsets = tuple(draw(st.integers(0, size - 1)) for size in EXTENT)
    shape = tuple(draw(st.integers(1, size - start)) for size, start in zip(EXTENT, offsets, strict=True))
    return offsets, shape


def cells(offsets: Index, shape: Index) -> set[tuple[int, int]]:
    return {
        (row, column)
        for row in range(offsets[0], offsets[0] + shape[0])
        for column in range(offsets[1], offsets[1] + shape[1])
    }


@given(a=boxes(), b=boxes())
def test_an_intersection_has_the_cells_of_both(a: tuple[Index, Index], b: tuple[Index, Index]) -> None:
    shared = intersect(*a, *b)
    assert (cells(*shared) if shared else set()) == cells(*a) & cells(*b)


@given(a=boxes(), b=boxes())
def test_what_remains_is_disjoint_and_has_the_other_cells(a: tuple[Index, Index], b: tuple[Index, Index]) -> None:
    shared = intersect(*a, *b)
    if shared is None:
        return
    rest = list(subtract(*a, *shared))
    counts = np.zeros(EXTENT, dtype=int)
    for offsets, shape in rest:
        for cell in cells(offsets, shape):
            counts[cell] += 1
    assert counts.max() <= 1
    assert {tuple(map(int, cell)) for cell in np.argwhere(counts)} == cells(*a) - cells(*b)


def test_offsets_move_with_their_origin() -> None:
    assert shift((5, 3), (4, 0), (10, 7)) == (11, 10)


def test_a_box_is_written_as_python_slices_it() -> None:
    assert str(Slice(name="w", offsets=(2, 0), shape=(4, 8))) == "w[2:6, 0:8]"
