"""What two layouts have in common, cut where any holder's share ends: boxes that some hold and others need. Pure.

Models repeat themselves: layers of a stage have the same holders, and so have the experts of a set, and data-parallel
ranks and engines are copies of each other. So holders with one table of pieces are looked at once, and so are tensors
that are held alike; the work grows with what differs, not with layers times ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from megarl.errors import WeightSyncError
from megarl.weights.algebra.slices import Holding, Index, Layout, Piece, Slice, intersect, subtract

Box: TypeAlias = tuple[Index, Index]
"""Offsets and shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A box of several canonical tensors that have the same holders on both sides."""

    names: tuple[str, ...]
    offsets: Index
    shape: Index
    dtype: str
    """The targets'."""
    copy: int
    """0, or more where a target has the same box in several of its tensors: this is about its copy of that number."""
    sources: tuple[int, ...]
    targets: tuple[int, ...]

    def slice(self, index: int) -> Slice:
        return Slice(name=self.names[index], offsets=self.offsets, shape=self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Holders that have the same boxes in the same places."""

    ranks: tuple[int, ...]
    example: Holding


def kinds_of(layout: Layout) -> tuple[Kind, ...]:
    """Replicas, which share one table of pieces, together; in the order of their first ranks."""
    found: defaultdict[int, list[Holding]] = defaultdict(list)
    for holding in sorted(layout.holdings, key=lambda holding: holding.rank):
        found[id(holding.pieces)].append(holding)
    return tuple(Kind(ranks=tuple(holding.rank for holding in same), example=same[0]) for same in found.values())


def bundles(source: Layout, target: Layout) -> Iterator[Bundle]:
    """Every element of every target's pieces is in exactly one of them (per copy), with all who hold it."""
    source_kinds, target_kinds = kinds_of(source), kinds_of(target)
    needed = _entries(target_kinds)
    held = _entries(source_kinds)
    alike: defaultdict[tuple[_Signature, _Signature], list[str]] = defaultdict(list)
    for name in target.canonical:
        if name in needed:
            _refuse_different(name, source, target)
            alike[tuple(needed[name]), tuple(held.get(name, ()))].append(name)
    for name in needed.keys() - target.canonical.keys():
        _refuse_different(name, source, target)
    for (wanted, offered), names in alike.items():
        yield from _cut(tuple(names), wanted, offered, source_kinds, target_kinds)


_Entry: TypeAlias = tuple[int, Index, Index, str]
"""Number of a kind, box, dtype."""
_Signature: TypeAlias = tuple[_Entry, ...]


def _entries(kinds: Sequence[Kind]) -> dict[str, list[_Entry]]:
    """By canonical name, what each kind has of it."""
    found: defaultdict[str, list[_Entry]] = defaultdict(list)
    for number, kind in enumerate(kinds):
        tensors = kind.example.tensors
        for piece in kind.example.pieces:
            box = piece.slice
            found[box.name].append((number, box.offsets, box.shape, tensors[piece.local_name].dtype))
    return dict(found)


def _refuse_different(name: str, source: Layout, target: Layout) -> None:
    shapes = [
        canonical[name].shape if name in canonical else None for canonical in (source.canonical, target.canonical)
    ]
    if shapes[0] != shapes[1]:
        raise WeightSyncError(f"{name} is {shapes[0]} at the source and {shapes[1]} at the target")


def _cut(
    names: tuple[str, ...],
    wanted: _Signature,
    offered: _Signature,
    source_kinds: Sequence[Kind],
    target_kinds: Sequence[Kind],
) -> Iterator[Bundle]:
    holders: defaultdict[Box, set[int]] = defaultdict(set)
    for number, offsets, shape, _ in offered:
        holders[offsets, shape].add(number)
    for (dtype, copy), takers in sorted(_copies(wanted).items()):
        for (offsets, shape), inside in atoms([*holders, *takers]):
            targets = [rank for box in inside for kind in takers.get(box, ()) for rank in target_kinds[kind].ranks]
            if not targets:
                continue
            sources = {rank for box in inside for kind in holders.get(box, ()) for rank in source_kinds[kind].ranks}
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
    """Who wants which boxes, by dtype; a second copy of what a target has already is apart from the first."""
    found: defaultdict[tuple[str, int], defaultdict[Box, set[int]]] = defaultdict(lambda: defaultdict(set))
    seen: defaultdict[int, list[tuple[Index, Index, int]]] = defaultdict(list)
    for number, offsets, shape, dtype in wanted:
        before = [copy for at, size, copy in seen[number] if intersect(at, size, offsets, shape)]
        copy = max(before, default=-1) + 1
        seen[number].append((offsets, shape, copy))
        found[dtype, copy][offsets, shape].add(number)
    return {key: dict(takers) for key, takers in found.items()}


def atoms(boxes: Iterable[Box]) -> list[tuple[Box, tuple[Box, ...]]]:
    """Disjoint boxes that no given box cuts, each with the given ones around it; in the order of their offsets."""
    distinct = sorted(set(boxes))
    if not distinct:
        return []
    axes = [axis for axis in range(len(distinct[0][0])) if len({(at[axis], size[axis]) for at, size in distinct}) > 1]
    found = _intervals(distinct, axes[0]) if len(axes) == 1 else _split(distinct)
    return sorted(found)


def _intervals(boxes: Sequence[Box], axis: int) -> list[tuple[Box, tuple[Box, ...]]]:
    """Of boxes that differ along one axis only."""
    edges = sorted({edge for at, size in boxes for edge in (at[axis], at[axis] + size[axis])})
    position = {edge: index for index, edge in enumerate(edges)}
    around: list[list[Box]] = [[] for _ in edges]
    for box in boxes:
        (at, size) = box
        for index in range(position[at[axis]], position[at[axis] + size[axis]]):
            around[index].append(box)
    at, size = boxes[0]
    return [
        (
            (
                (*at[:axis], edges[index], *at[axis + 1 :]),
                (*size[:axis], edges[index + 1] - edges[index], *size[axis + 1 :]),
            ),
            tuple(inside),
        )
        for index, inside in enumerate(around)
        if inside
    ]


def _split(boxes: Sequence[Box]) -> list[tuple[Box, tuple[Box, ...]]]:
    found: list[tuple[Box, tuple[Box, ...]]] = []
    for box in boxes:
        rest, parts = [box], []
        for atom, inside in found:
            shared = intersect(*atom, *box)
            if shared is None:
                parts.append((atom, inside))
                continue
            parts.append((shared, (*inside, box)))
            parts += [(outer, inside) for outer in subtract(*atom, *shared)]
            rest = [part for left in rest for part in _without(left, shared)]
        found = [*parts, *((left, (box,)) for left in rest)]
    return found


def _without(box: Box, hole: Box) -> Iterator[Box]:
    shared = intersect(*box, *hole)
    if shared is None:
        yield box
    else:
        yield from subtract(*box, *shared)


def pieces_by_name(holding: Holding) -> dict[str, tuple[Piece, ...]]:
    found: defaultdict[str, list[Piece]] = defaultdict(list)
    for piece in holding.pieces:
        found[piece.slice.name].append(piece)
    return {name: tuple(pieces) for name, pieces in found.items()}
