"""The boxes that some ranks hold and others need, cut where any holder's share ends. Pure.

A model repeats itself: the layers of a stage have the same holders, so have the experts of a set, and data-parallel
ranks and engines are copies. Replicas are therefore looked at once, and so are tensors with equal holders: the work
grows with what differs, not with layers times ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from megarl.errors import WeightSyncError
from megarl.weights.algebra.slices import ITEM_BYTES, Holding, Index, Layout, Slice, intersect, subtract

Box: TypeAlias = tuple[Index, Index]
"""Offsets and shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A box of several canonical tensors that have the same holders on both sides."""

    names: tuple[str, ...]
    offsets: Index
    shape: Index
    dtype: str
    """The targets' dtype."""
    copy: int
    """Number of the copy, where a target has the same box in several of its tensors; else 0."""
    sources: tuple[int, ...]
    targets: tuple[int, ...]

    @property
    def box_bytes(self) -> int:
        """Bytes of the box in one tensor."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    def slice(self, index: int) -> Slice:
        return Slice(name=self.names[index], offsets=self.offsets, shape=self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Replicas:
    """Ranks that share one table of pieces."""

    ranks: tuple[int, ...]
    example: Holding


def bundles(source: Layout, target: Layout) -> Iterator[Bundle]:
    """Yield disjoint boxes that cover every target piece once per copy, each with all its holders."""
    source_replicas, target_replicas = _replicas(source), _replicas(target)
    needed, held = _entries(target_replicas), _entries(source_replicas)
    alike: defaultdict[tuple[_Signature, _Signature], list[str]] = defaultdict(list)
    for name in target.canonical:
        if name in needed:
            _refuse_different(name, source, target)
            alike[tuple(needed[name]), tuple(held.get(name, ()))].append(name)
    for name in needed.keys() - target.canonical.keys():
        _refuse_different(name, source, target)
    for (wanted, offered), names in alike.items():
        yield from _cut(tuple(names), wanted, offered, source_replicas, target_replicas)


_Entry: TypeAlias = tuple[int, Index, Index, str]
"""Number of a set of replicas, offsets, shape, dtype."""
_Signature: TypeAlias = tuple[_Entry, ...]


def _replicas(layout: Layout) -> tuple[_Replicas, ...]:
    """Return the sets of replicas in the order of their first ranks."""
    by_table: defaultdict[int, list[Holding]] = defaultdict(list)
    for holding in sorted(layout.holdings, key=lambda holding: holding.rank):
        by_table[id(holding.pieces)].append(holding)
    return tuple(_Replicas(ranks=tuple(each.rank for each in same), example=same[0]) for same in by_table.values())


def _entries(replicas: Sequence[_Replicas]) -> dict[str, list[_Entry]]:
    """Return by canonical name the boxes that each set of replicas has."""
    entries: defaultdict[str, list[_Entry]] = defaultdict(list)
    for number, same in enumerate(replicas):
        tensors = same.example.tensors
        for piece in same.example.pieces:
            box = piece.slice
            entries[box.name].append((number, box.offsets, box.shape, tensors[piece.local_name].dtype))
    return dict(entries)


def _refuse_different(name: str, source: Layout, target: Layout) -> None:
    here, there = (layout.canonical[name].shape if name in layout.canonical else None for layout in (source, target))
    if here != there:
        raise WeightSyncError(f"{name} is {here} at the source and {there} at the target")


def _cut(
    names: tuple[str, ...],
    wanted: _Signature,
    offered: _Signature,
    source_replicas: Sequence[_Replicas],
    target_replicas: Sequence[_Replicas],
) -> Iterator[Bundle]:
    holders: defaultdict[Box, set[int]] = defaultdict(set)
    for number, offsets, shape, _ in offered:
        holders[offsets, shape].add(number)
    for (dtype, copy), takers in sorted(_copies(wanted).items()):
        for (offsets, shape), around in atoms([*holders, *takers]):
            targets = [rank for box in around for each in takers.get(box, ()) for rank in target_replicas[each].ranks]
            if not targets:
                continue
            sources = {rank for box in around for each in holders.get(box, ()) for rank in source_replicas[each].ranks}
            if not sources:
                lacking = Slice(name=names[0], offsets=offsets, shape=shape)
                raise WeightSyncError(f"no source holds {lacking}, which target rank {min(targets)} needs")
            yield Bundle(
                names=names,
                offsets=offsets,
                shape=shape,
                dtype=dtype,
                copy=copy,
                sources=tuple(sorted(sources)),
                targets=tuple(sorted(targets)),
            )


def _copies(wanted: _Signature) -> dict[tuple[str, int], dict[Box, set[int]]]:
    """Return by dtype and number of the copy which replicas want which boxes."""
    takers: defaultdict[tuple[str, int], defaultdict[Box, set[int]]] = defaultdict(lambda: defaultdict(set))
    seen: defaultdict[int, list[tuple[Index, Index, int]]] = defaultdict(list)
    for number, offsets, shape, dtype in wanted:
        before = [copy for at, size, copy in seen[number] if intersect(at, size, offsets, shape)]
        copy = max(before, default=-1) + 1
        seen[number].append((offsets, shape, copy))
        takers[dtype, copy][offsets, shape].add(number)
    return {key: dict(boxes) for key, boxes in takers.items()}


def atoms(boxes: Iterable[Box]) -> list[tuple[Box, tuple[Box, ...]]]:
    """Return disjoint boxes that no given box cuts, sorted by offsets, each with the given boxes around it."""
    distinct = sorted(set(boxes))
    if not distinct:
        return []
    axes = [axis for axis in range(len(distinct[0][0])) if len({(at[axis], size[axis]) for at, size in distinct}) > 1]
    return sorted(_intervals(distinct, axes[0]) if len(axes) == 1 else _split(distinct))


def _intervals(boxes: Sequence[Box], axis: int) -> list[tuple[Box, tuple[Box, ...]]]:
    """Return the atoms of boxes that differ along one axis only."""
    edges = sorted({edge for at, size in boxes for edge in (at[axis], at[axis] + size[axis])})
    position = {edge: index for index, edge in enumerate(edges)}
    around: list[list[Box]] = [[] for _ in edges]
    for at, size in boxes:
        for index in range(position[at[axis]], position[at[axis] + size[axis]]):
            around[index].append((at, size))
    at, size = boxes[0]

    def interval(start: int, end: int) -> Box:
        return (*at[:axis], start, *at[axis + 1 :]), (*size[:axis], end - start, *size[axis + 1 :])

    return [(interval(edges[index], edges[index + 1]), tuple(inside)) for index, inside in enumerate(around) if inside]


def _split(boxes: Sequence[Box]) -> list[tuple[Box, tuple[Box, ...]]]:
    """Return the atoms of any boxes: each box in turn cuts the atoms so far, and its remainder becomes new ones."""
    atoms_so_far: list[tuple[Box, tuple[Box, ...]]] = []
    for box in boxes:
        rest, parts = [box], []
        for atom, around in atoms_so_far:
            shared = intersect(*atom, *box)
            if shared is None:
                parts.append((atom, around))
                continue
            parts.append((shared, (*around, box)))
            parts += [(outer, around) for outer in subtract(*atom, *shared)]
            rest = [part for left in rest for part in _without(left, shared)]
        atoms_so_far = [*parts, *((left, (box,)) for left in rest)]
    return atoms_so_far


def _without(box: Box, hole: Box) -> Iterator[Box]:
    shared = intersect(*box, *hole)
    if shared is None:
        yield box
    else:
        yield from subtract(*box, *shared)
