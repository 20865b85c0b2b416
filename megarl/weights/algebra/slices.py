"""The vocabulary of the slice algebra: which box of which canonical tensor lives where. Pure: no torch, no engine.

A *canonical tensor* is a tensor as the Hugging Face checkpoint names and shapes it. The weights of every holder (a
Megatron rank, an SGLang TP rank, a safetensors file) are described as `Piece`s; elements that no piece covers
(vocabulary padding) are never moved. A `Location` says where a holder runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from math import prod
from typing import TypeAlias

Index: TypeAlias = tuple[int, ...]
"""Offsets into a tensor, or its extents: one number per dimension."""

ITEM_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
HEADER_DTYPES: Mapping[str, str] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Dtypes by their names in the header of a safetensors file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    shape: Index
    dtype: str
    """Spelled as in torch and `config.json`; a key of ITEM_BYTES."""

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A box in a canonical tensor."""

    name: str
    offsets: Index
    shape: Index

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    def contains(self, other: Slice) -> bool:
        return all(
            start <= first and first + extent <= start + size
            for start, size, first, extent in zip(self.offsets, self.shape, other.offsets, other.shape, strict=True)
        )

    def __str__(self) -> str:
        ranges = ", ".join(f"{start}:{start + size}" for start, size in zip(self.offsets, self.shape, strict=True))
        return f"{self.name}[{ranges}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The place of a box in its holder's own tensor: a box of the same shape, never transposed."""

    slice: Slice
    local_name: str
    local_offsets: Index
    """One number per dimension of the holder's tensor; dimensions that the box lacks come first, as indices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """All tensors of one holder, and the canonical boxes in them."""

    rank: int
    tensors: Mapping[str, TensorSpec]
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.tensors.values())


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One model and all its holders. Replicas are holders of equal boxes."""

    canonical: Mapping[str, TensorSpec]
    holdings: tuple[Holding, ...]

    @cached_property
    def by_rank(self) -> Mapping[int, Holding]:
        table = {holding.rank: holding for holding in self.holdings}
        assert len(table) == len(self.holdings), f"{len(self.holdings)} holdings, {len(table)} different ranks"
        return table

    def derive(self, canonical: Mapping[str, TensorSpec], change: Callable[[Holding], Holding]) -> Layout:
        """Return other tensors of the same holders; `change` is called once for all replicas, which share one table."""
        changed: dict[int, Holding] = {}
        for holding in self.holdings:
            if id(holding.pieces) not in changed:
                changed[id(holding.pieces)] = change(holding)
        holdings = (replace(changed[id(holding.pieces)], rank=holding.rank) for holding in self.holdings)
        return Layout(canonical=canonical, holdings=tuple(holdings))


def intersect(a_offsets: Index, a_shape: Index, b_offsets: Index, b_shape: Index) -> tuple[Index, Index] | None:
    """Return offsets and shape of the intersection of two boxes, or None."""
    offsets = tuple(map(max, a_offsets, b_offsets))
    ends = [
        min(a + a_size, b + b_size) for a, a_size, b, b_size in zip(a_offsets, a_shape, b_offsets, b_shape, strict=True)
    ]
    shape = tuple(end - start for start, end in zip(offsets, ends, strict=True))
    return (offsets, shape) if all(size > 0 for size in shape) else None


def subtract(offsets: Index, shape: Index, hole_offsets: Index, hole_shape: Index) -> Iterator[tuple[Index, Index]]:
    """Yield what remains of a box without a `hole` inside it: at most two boxes per dimension."""
    low, size = list(offsets), list(shape)
    for axis, (hole_start, hole_size) in enumerate(zip(hole_offsets, hole_shape, strict=True)):
        for start, end in ((low[axis], hole_start), (hole_start + hole_size, low[axis] + size[axis])):
            if end > start:
                yield (
                    (*low[:axis], start, *low[axis + 1 :]),
                    (*size[:axis], end - start, *size[axis + 1 :]),
                )
        low[axis], size[axis] = hole_start, hole_size


def shift(offsets: Index, origin: Index, local_origin: Index) -> Index:
    """Return `offsets` relative to `origin` as offsets relative to `local_origin`, behind the indices of the latter."""
    indices, local = local_origin[: -len(offsets)], local_origin[-len(offsets) :]
    shifted = (offset - start + place for offset, start, place in zip(offsets, origin, local, strict=True))
    return (*indices, *shifted)


def header_dtype(name: str) -> str:
    """Return the name of a dtype in the header of a safetensors file."""
    return next(header for header, known in HEADER_DTYPES.items() if known == name)


class Link(IntEnum):
    """The link that a move travels over, nearest first."""

    PROCESS = 0
    DEVICE = 1
    NODE = 2
    NETWORK = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """The place of one rank. Names of devices and processes are unique over all nodes."""

    node: str
    device: str
    process: str

    def link(self, other: Location) -> Link:
        if self.process == other.process:
            return Link.PROCESS
        if self.device == other.device:
            return Link.DEVICE
        return Link.NODE if self.node == other.node else Link.NETWORK


@dataclass(frozen=True, kw_only=True)
class Locations:
    """The location of every rank of both sides."""

    sources: Mapping[int, Location]
    targets: Mapping[int, Location]


Gpu: TypeAlias = tuple[int, int]
"""Numbers of a node, and of a GPU in it."""


def apart(source: Layout, target: Layout) -> Locations:
    """Put every rank on a node of its own."""
    return _alone(source, target, "source", "target")


def same_processes(source: Layout, target: Layout) -> Locations:
    """Put source rank r and target rank r into one process, each pair on a node of its own."""
    return _alone(source, target, "rank", "rank")


def _alone(source: Layout, target: Layout, source_word: str, target_word: str) -> Locations:
    def location(name: str) -> Location:
        return Location(node=name, device=name, process=name)

    return Locations(
        sources={holding.rank: location(f"{source_word} {holding.rank}") for holding in source.holdings},
        targets={holding.rank: location(f"{target_word} {holding.rank}") for holding in target.holdings},
    )


def on_gpus(sources: Sequence[Gpu], targets: Sequence[Gpu]) -> Locations:
    """Put rank r of each side into a process of its own on the r-th of these GPUs."""

    def location(gpu: Gpu, process: str) -> Location:
        node, number = gpu
        return Location(node=f"node {node}", device=f"node {node} gpu {number}", process=process)

    return Locations(
        sources={rank: location(gpu, f"source {rank}") for rank, gpu in enumerate(sources)},
        targets={rank: location(gpu, f"target {rank}") for rank, gpu in enumerate(targets)},
    )
