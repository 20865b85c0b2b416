"""Flat ranges of tensors as boxes: how a shard of the distributed optimizer says what it holds. Pure: no torch.

The optimizer cuts the flat buffer of all parameters evenly over the data-parallel ranks, so a rank has a range of
elements of each parameter, in row-major order. Such a range is at most `2 * dimensions - 1` boxes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from math import prod
from typing import TypeAlias

from megarl.weights.algebra.slices import Holding, Index, Layout, Piece, Slice, TensorSpec, intersect, shift

FlatRange: TypeAlias = tuple[int, int]
"""First element and the one after the last."""


def flat_boxes(shape: Index, start: int, end: int) -> Iterator[tuple[Index, Index]]:
    """Offsets and shapes of the boxes that make up elements `start:end` of a tensor."""
    if start >= end:
        return
    if len(shape) <= 1:
        yield (start,)[: len(shape)], (end - start,)[: len(shape)]
        return
    row_elements = prod(shape[1:])
    first, into_first = divmod(start, row_elements)
    last, into_last = divmod(end, row_elements)
    if first == last:
        yield from _in_row(shape, first, into_first, into_last)
        return
    if into_first:
        yield from _in_row(shape, first, into_first, row_elements)
        first += 1
    if last > first:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _in_row(shape, last, 0, into_last)


def _in_row(shape: Index, row: int, start: int, end: int) -> Iterator[tuple[Index, Index]]:
    for offsets, extent in flat_boxes(shape[1:], start, end):
        yield (row, *offsets), (1, *extent)


def restrict(holding: Holding, ranges: Mapping[str, FlatRange], *, dtype: str) -> Holding:
    """Of a holder's tensors, as `dtype`, only the elements in `ranges`; a tensor without a range holds nothing."""
    pieces: defaultdict[str, list[Piece]] = defaultdict(list)
    for piece in holding.pieces:
        pieces[piece.local_name].append(piece)
    specs = {name: TensorSpec(shape=holding.tensors[name].shape, dtype=dtype) for name in ranges}
    kept = [
        part
        for name, (start, end) in ranges.items()
        for offsets, shape in flat_boxes(specs[name].shape, start, end)
        for piece in pieces[name]
        if (part := _part(piece, offsets, shape)) is not None
    ]
    return Holding(rank=holding.rank, tensors=specs, pieces=tuple(kept))


def restrict_all(layout: Layout, ranges: Mapping[int, Mapping[str, FlatRange]], *, dtype: str) -> Layout:
    """The layout of what every rank has a range of; canonical tensors are of `dtype` too."""
    canonical = {name: TensorSpec(shape=spec.shape, dtype=dtype) for name, spec in layout.canonical.items()}
    holdings = tuple(restrict(holding, ranges[holding.rank], dtype=dtype) for holding in layout.holdings)
    return Layout(canonical=canonical, holdings=holdings)


def _part(piece: Piece, offsets: Index, shape: Index) -> Piece | None:
    """What a piece has inside a box of its holder's tensor."""
    shared = intersect(piece.local_offsets, piece.slice.shape, offsets, shape)
    if shared is None:
        return None
    local_offsets, extent = shared
    canonical_offsets = shift(local_offsets, piece.local_offsets, piece.slice.offsets)
    box = Slice(name=piece.slice.name, offsets=canonical_offsets, shape=extent)
    return Piece(slice=box, local_name=piece.local_name, local_offsets=local_offsets)
