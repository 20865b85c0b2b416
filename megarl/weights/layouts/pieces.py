"""How a rank's tensors are cut out of canonical ones: windows of stacked rows and of columns, and flat ranges. Pure.

Megatron and SGLang differ in what they stack and in which order; both cut a rank's part out of a list of row segments.
The distributed optimizer cuts the flat buffer of all parameters evenly over the data-parallel ranks, so a rank has a
range of elements of each parameter, in row-major order: at most `2 * dimensions - 1` boxes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from megarl.weights.algebra.slices import Holding, Index, Layout, Piece, Slice, TensorSpec, intersect, shift

FlatRange: TypeAlias = tuple[int, int]
"""First element and the one after the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Rows `start:start + num_rows` of canonical tensor `name`, or padding where `name` is None."""

    name: str | None
    start: int
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTensor:
    """One parameter of a holder, and the canonical boxes in it."""

    name: str
    shape: Index
    pieces: tuple[Piece, ...]
    dtype: str | None = None
    """None: that of the holder."""


def row_window(
    local_name: str, segments: Iterable[Segment], *, start: int, num_rows: int, columns: Index
) -> LocalTensor:
    """Return rows `start:start + num_rows` of segments laid end to end; rows beyond the last one are padding.

    `columns` are the other dimensions: (hidden,) for a matrix, () for a bias.
    """
    zeros = tuple(0 for _ in columns)
    pieces = []
    position = 0
    for segment in segments:
        first = max(start, position)
        size = min(start + num_rows, position + segment.num_rows) - first
        if size > 0 and segment.name is not None:
            box = Slice(name=segment.name, offsets=(segment.start + first - position, *zeros), shape=(size, *columns))
            pieces.append(Piece(slice=box, local_name=local_name, local_offsets=(first - start, *zeros)))
        position += segment.num_rows
    return LocalTensor(name=local_name, shape=(num_rows, *columns), pieces=tuple(pieces))


def column_window(local_name: str, name: str, spec: TensorSpec, *, start: int, num_columns: int) -> LocalTensor:
    """Return columns `start:start + num_columns` of one matrix; columns beyond the matrix are padding."""
    num_rows, width = spec.shape
    size = min(start + num_columns, width) - start
    pieces: tuple[Piece, ...] = ()
    if size > 0:
        box = Slice(name=name, offsets=(0, start), shape=(num_rows, size))
        pieces = (Piece(slice=box, local_name=local_name, local_offsets=(0, 0)),)
    return LocalTensor(name=local_name, shape=(num_rows, num_columns), pieces=pieces)


def stacked(local_name: str, layers: Sequence[LocalTensor]) -> LocalTensor:
    """Stack tensors of one shape along a new first dimension."""
    (shape,) = {layer.shape for layer in layers}
    pieces = tuple(
        Piece(slice=piece.slice, local_name=local_name, local_offsets=(index, *piece.local_offsets))
        for index, layer in enumerate(layers)
        for piece in layer.pieces
    )
    return LocalTensor(name=local_name, shape=(len(layers), *shape), pieces=pieces)


def repeated(template: Sequence[LocalTensor], *, local: str, source: str) -> Iterator[LocalTensor]:
    """Yield the tensors of a layer: those of `template` with the prefixes `local` and `source`.

    Layers of a kind are alike, and renaming one layer's tensors is much faster than deriving each layer's again.
    """
    for tensor in template:
        name = local + tensor.name
        pieces = [
            Piece(
                slice=Slice(name=source + piece.slice.name, offsets=piece.slice.offsets, shape=piece.slice.shape),
                local_name=name,
                local_offsets=piece.local_offsets,
            )
            for piece in tensor.pieces
        ]
        yield LocalTensor(name=name, shape=tensor.shape, pieces=tuple(pieces), dtype=tensor.dtype)


def whole(local_name: str, name: str, spec: TensorSpec) -> LocalTensor:
    """Return a tensor that holds all of a canonical one."""
    origin = tuple(0 for _ in spec.shape)
    box = Slice(name=name, offsets=origin, shape=spec.shape)
    piece = Piece(slice=box, local_name=local_name, local_offsets=origin)
    return LocalTensor(name=local_name, shape=spec.shape, pieces=(piece,))


def replicate(ranks: Sequence[int], tensors: Iterable[LocalTensor], *, dtype: str) -> list[Holding]:
    """Return equal holdings for replicas, which share one table: a large layout stays small in memory."""
    listed = tuple(tensors)
    specs = {tensor.name: TensorSpec(shape=tensor.shape, dtype=tensor.dtype or dtype) for tensor in listed}
    assert len(specs) == len(listed), f"{len(listed)} tensors, {len(specs)} different names"
    pieces = tuple(piece for tensor in listed for piece in tensor.pieces)
    return [Holding(rank=rank, tensors=specs, pieces=pieces) for rank in ranks]


def flat_boxes(shape: Index, start: int, end: int) -> Iterator[tuple[Index, Index]]:
    """Yield offsets and shapes of the boxes that make up elements `start:end` of a tensor."""
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
    """Return a holding of only the elements in `ranges`, as `dtype`; a tensor without a range is left out."""
    pieces: defaultdict[str, list[Piece]] = defaultdict(list)
    for piece in holding.pieces:
        pieces[piece.local_name].append(piece)
    specs = {name: TensorSpec(shape=holding.tensors[name].shape, dtype=dtype) for name in ranges}
    parts = [
        part
        for name, (start, end) in ranges.items()
        for offsets, shape in flat_boxes(specs[name].shape, start, end)
        for piece in pieces[name]
        if (part := _part(piece, offsets, shape)) is not None
    ]
    return Holding(rank=holding.rank, tensors=specs, pieces=tuple(parts))


def restrict_all(layout: Layout, ranges: Mapping[int, Mapping[str, FlatRange]], *, dtype: str) -> Layout:
    """Return the layout of what every rank has in its ranges; canonical tensors are of `dtype` too.

    Those of which no rank has a range, because they are not trained, are left out.
    """
    holdings = tuple(restrict(holding, ranges[holding.rank], dtype=dtype) for holding in layout.holdings)
    held = {piece.slice.name for holding in holdings for piece in holding.pieces}
    canonical = {
        name: TensorSpec(shape=spec.shape, dtype=dtype) for name, spec in layout.canonical.items() if name in held
    }
    return Layout(canonical=canonical, holdings=holdings)


def _part(piece: Piece, offsets: Index, shape: Index) -> Piece | None:
    """Return the part of a piece inside a box of its holder's tensor, or None."""
    shared = intersect(piece.local_offsets, piece.slice.shape, offsets, shape)
    if shared is None:
        return None
    local_offsets, extent = shared
    canonical_offsets = shift(local_offsets, piece.local_offsets, piece.slice.offsets)
    box = Slice(name=piece.slice.name, offsets=canonical_offsets, shape=extent)
    return Piece(slice=box, local_name=piece.local_name, local_offsets=local_offsets)
