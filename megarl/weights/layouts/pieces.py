"""How a parallel parameter is put together from canonical tensors: stacked by rows, cut into windows. Pure.

Megatron and SGLang differ in what they stack and in which order; both cut a rank's part out of a list of row segments.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megarl.weights.algebra.slices import Holding, Index, Piece, Slice, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Rows `start:start + num_rows` of canonical tensor `name`, or padding that belongs to none."""

    name: str | None
    start: int
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTensor:
    """One parameter of a holder, and the canonical boxes in it."""

    name: str
    shape: Index
    pieces: tuple[Piece, ...]


def row_window(
    local_name: str, segments: Iterable[Segment], *, start: int, num_rows: int, columns: Index
) -> LocalTensor:
    """Rows `start:start + num_rows` of segments laid end to end; what lies beyond the last one is padding.

    `columns` are the other dimensions: (hidden,) of a matrix, () of a bias.
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
    """Columns `start:start + num_columns` of one matrix; columns beyond the matrix are padding."""
    num_rows, width = spec.shape
    size = min(start + num_columns, width) - start
    pieces: tuple[Piece, ...] = ()
    if size > 0:
        box = Slice(name=name, offsets=(0, start), shape=(num_rows, size))
        pieces = (Piece(slice=box, local_name=local_name, local_offsets=(0, 0)),)
    return LocalTensor(name=local_name, shape=(num_rows, num_columns), pieces=pieces)


def stacked(local_name: str, layers: Sequence[LocalTensor]) -> LocalTensor:
    """Tensors of one shape, one after the other along a new first dimension."""
    (shape,) = {layer.shape for layer in layers}
    pieces = tuple(
        Piece(slice=piece.slice, local_name=local_name, local_offsets=(index, *piece.local_offsets))
        for index, layer in enumerate(layers)
        for piece in layer.pieces
    )
    return LocalTensor(name=local_name, shape=(len(layers), *shape), pieces=pieces)


def repeated(template: Sequence[LocalTensor], *, local: str, source: str) -> Iterator[LocalTensor]:
    """The tensors of a layer like the one that `template` describes without its prefixes: `local` and `source`.

    Layers are alike, and naming what is known is much faster than working it out again.
    """
    for tensor in template:
        name = local + tensor.name
        pieces = tuple(
            Piece(
                slice=Slice(name=source + piece.slice.name, offsets=piece.slice.offsets, shape=piece.slice.shape),
                local_name=name,
                local_offsets=piece.local_offsets,
            )
            for piece in tensor.pieces
        )
        yield LocalTensor(name=name, shape=tensor.shape, pieces=pieces)


def whole(local_name: str, name: str, spec: TensorSpec) -> LocalTensor:
    """A tensor that every rank has in full."""
    origin = tuple(0 for _ in spec.shape)
    box = Slice(name=name, offsets=origin, shape=spec.shape)
    piece = Piece(slice=box, local_name=local_name, local_offsets=origin)
    return LocalTensor(name=local_name, shape=spec.shape, pieces=(piece,))


def replicate(ranks: Sequence[int], tensors: Iterable[LocalTensor], *, dtype: str) -> list[Holding]:
    """Equal holdings for replicas; they share one table, so a large layout stays small in memory."""
    listed = tuple(tensors)
    specs = {tensor.name: TensorSpec(shape=tensor.shape, dtype=dtype) for tensor in listed}
    assert len(specs) == len(listed), f"{len(listed)} tensors, {len(specs)} different names"
    pieces = tuple(piece for tensor in listed for piece in tensor.pieces)
    return [Holding(rank=rank, tensors=specs, pieces=pieces) for rank in ranks]
