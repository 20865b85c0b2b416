"""Which bytes of which source holder go to which target holder. Pure: no torch, no transport.

Computed once per pair of layouts and replayed every step. Every element of every target piece is written exactly once,
from a holder that has it; nearer holders come first, and holders of equal boxes share the work. The same layouts always
give the same plan, so that each process can compute it for itself and compare hashes.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import TypeAlias

from megarl.errors import WeightSyncError
from megarl.weights.slices import ITEM_BYTES, Index, Layout, Piece, Slice, intersect, shift, subtract


class Link(IntEnum):
    """What a move travels over, nearest first."""

    PROCESS = 0
    DEVICE = 1
    NODE = 2
    NETWORK = 3


Locality: TypeAlias = Callable[[int, int], Link]
"""(source rank, target rank) -> the link between them."""


def apart(_source_rank: int, _target_rank: int) -> Link:
    """Sources and targets are different processes, anywhere."""
    return Link.NETWORK


def same_processes(source_rank: int, target_rank: int) -> Link:
    """Source rank r and target rank r are one process; where the others are is not known."""
    return Link.PROCESS if source_rank == target_rank else Link.NETWORK


def same_devices(source_rank: int, target_rank: int) -> Link:
    """Source rank r and target rank r are two processes on one device; where the others are is not known."""
    return Link.DEVICE if source_rank == target_rank else Link.NETWORK


def on_nodes(source_nodes: Mapping[int, str], target_nodes: Mapping[int, str]) -> Locality:
    """Sources and targets are different processes on named nodes."""

    def link(source_rank: int, target_rank: int) -> Link:
        return Link.NODE if source_nodes[source_rank] == target_nodes[target_rank] else Link.NETWORK

    return link


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One box, from a place in one holder's tensor to a place in another's."""

    slice: Slice
    source_rank: int
    source_name: str
    source_offsets: Index
    target_rank: int
    target_name: str
    target_offsets: Index


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Moves in the order of target ranks, then of their pieces. Sizes are in bytes of the target's dtype."""

    source: Layout
    target: Layout
    moves: tuple[Move, ...]
    bytes_by_link: Mapping[Link, int]
    sent_bytes: Mapping[int, int]
    """Per source rank, what leaves its process."""
    received_bytes: Mapping[int, int]
    """Per target rank, what enters its process."""

    @cached_property
    def hash(self) -> str:
        """Equal in two processes if and only if they will send and expect the same bytes."""
        digest = hashlib.blake2b(digest_size=16)
        for move in self.moves:
            box = move.slice
            source = (move.source_rank, move.source_name, move.source_offsets)
            target = (move.target_rank, move.target_name, move.target_offsets)
            digest.update(repr((box.name, box.offsets, box.shape, self.dtype_of(move), source, target)).encode())
        return digest.hexdigest()

    @cached_property
    def moves_from(self) -> Mapping[int, tuple[Move, ...]]:
        """Per source rank; a rank that gives nothing is absent."""
        return _grouped(self.moves, lambda move: move.source_rank)

    @cached_property
    def moves_to(self) -> Mapping[int, tuple[Move, ...]]:
        """Per target rank; a rank that needs nothing is absent."""
        return _grouped(self.moves, lambda move: move.target_rank)

    def dtype_of(self, move: Move) -> str:
        """What travels: the target's dtype."""
        return self.target.by_rank[move.target_rank].tensors[move.target_name].dtype

    @property
    def peak_staging_bytes(self) -> int:
        """Most that one target holds between `stage` and `commit`, besides its parameters."""
        return max(self.received_bytes.values(), default=0)

    @property
    def busiest_bytes(self) -> int:
        """Most that one rank sends or receives."""
        return max((*self.sent_bytes.values(), *self.received_bytes.values()), default=0)

    @property
    def floor_bytes(self) -> int:
        """What `busiest_bytes` cannot be below: the neediest target's bytes, or an equal share for every source."""
        moved = sum(self.received_bytes.values())
        return max(self.peak_staging_bytes, -(-moved // max(1, len(self.source.holdings))))


def plan(source: Layout, target: Layout, *, locality: Locality = apart) -> Plan:
    """The moves that fill every piece of `target` from `source`."""
    owners = _Owners(source, target)
    chooser = _Chooser(locality)
    moves: list[Move] = []
    for holding in target.holdings:
        for piece in holding.pieces:
            item_bytes = ITEM_BYTES[holding.tensors[piece.local_name].dtype]
            for box, held in owners.cover(piece.slice):
                source_rank = chooser.choose(held.ranks, holding.rank, box.num_elements * item_bytes)
                moves.append(_move(box, source_rank, held.pieces[source_rank], holding.rank, piece))
    return Plan(
        source=source,
        target=target,
        moves=tuple(moves),
        bytes_by_link=dict(chooser.bytes_by_link),
        sent_bytes=dict(chooser.sent_bytes),
        received_bytes=dict(chooser.received_bytes),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """One box that some source ranks have, and where each of them has it."""

    offsets: Index
    shape: Index
    ranks: tuple[int, ...]
    pieces: Mapping[int, Piece]


class _Owners:
    """Who has which box, by canonical name. Replicas are holders of equal boxes; others may overlap, too."""

    def __init__(self, source: Layout, target: Layout) -> None:
        self._canonicals = source.canonical, target.canonical
        self._held = _held_boxes(source)
        self._covers: dict[Slice, list[tuple[Slice, _Held]]] = {}

    def cover(self, wanted: Slice) -> list[tuple[Slice, _Held]]:
        """Disjoint boxes that fill `wanted`, each with its holders."""
        found = self._covers.get(wanted)
        if found is None:
            found = self._covers[wanted] = list(self._search(wanted))
        return found

    def _search(self, wanted: Slice) -> Iterator[tuple[Slice, _Held]]:
        name = wanted.name
        shapes = [canonical[name].shape if name in canonical else None for canonical in self._canonicals]
        if shapes[0] != shapes[1]:
            raise WeightSyncError(f"{name} is {shapes[0]} at the source and {shapes[1]} at the target")
        missing = [(wanted.offsets, wanted.shape)]
        for held in self._held.get(name, ()):
            rest = []
            for offsets, shape in missing:
                shared = intersect(offsets, shape, held.offsets, held.shape)
                if shared is None:
                    rest.append((offsets, shape))
                    continue
                yield Slice(name=name, offsets=shared[0], shape=shared[1]), held
                rest += subtract(offsets, shape, *shared)
            missing = rest
        if missing:
            box = Slice(name=name, offsets=missing[0][0], shape=missing[0][1])
            raise WeightSyncError(f"no source holds {box}, which {wanted} of the target needs")


def _held_boxes(source: Layout) -> Mapping[str, list[_Held]]:
    found: defaultdict[str, defaultdict[tuple[Index, Index], dict[int, Piece]]] = defaultdict(lambda: defaultdict(dict))
    for holding in sorted(source.holdings, key=lambda holding: holding.rank):
        for piece in holding.pieces:
            found[piece.slice.name][piece.slice.offsets, piece.slice.shape].setdefault(holding.rank, piece)
    return {
        name: [
            _Held(offsets=offsets, shape=shape, ranks=tuple(pieces), pieces=pieces)
            for (offsets, shape), pieces in sorted(boxes.items(), key=lambda item: item[0])
        ]
        for name, boxes in found.items()
    }


class _Chooser:
    """Picks the nearest holder, and of several equally near ones the one that has sent least so far."""

    def __init__(self, locality: Locality) -> None:
        self._locality = locality
        self._nearest: dict[tuple[tuple[int, ...], int], tuple[Link, tuple[int, ...]]] = {}
        self._queues: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        self.bytes_by_link: defaultdict[Link, int] = defaultdict(int)
        self.sent_bytes: defaultdict[int, int] = defaultdict(int)
        self.received_bytes: defaultdict[int, int] = defaultdict(int)

    def choose(self, holders: tuple[int, ...], target_rank: int, num_bytes: int) -> int:
        link, nearest = self._nearest_holders(holders, target_rank)
        source_rank = self._least_busy(nearest)
        self.bytes_by_link[link] += num_bytes
        if link is not Link.PROCESS:
            self.sent_bytes[source_rank] += num_bytes
            self.received_bytes[target_rank] += num_bytes
        return source_rank

    def _nearest_holders(self, holders: tuple[int, ...], target_rank: int) -> tuple[Link, tuple[int, ...]]:
        found = self._nearest.get((holders, target_rank))
        if found is None:
            links = [(self._locality(rank, target_rank), rank) for rank in holders]
            best = min(link for link, _ in links)
            found = best, tuple(rank for link, rank in links if link is best)
            self._nearest[holders, target_rank] = found
        return found

    def _least_busy(self, ranks: tuple[int, ...]) -> int:
        if len(ranks) == 1:
            return ranks[0]
        queue = self._queues.setdefault(ranks, [(0, rank) for rank in ranks])
        # A rank may have sent more since, for another set of holders; it only ever sends more, so the head settles it.
        while (now := self.sent_bytes[queue[0][1]]) != queue[0][0]:
            heapq.heapreplace(queue, (now, queue[0][1]))
        return queue[0][1]


def _move(box: Slice, source_rank: int, held: Piece, target_rank: int, wanted: Piece) -> Move:
    return Move(
        slice=box,
        source_rank=source_rank,
        source_name=held.local_name,
        source_offsets=shift(box.offsets, held.slice.offsets, held.local_offsets),
        target_rank=target_rank,
        target_name=wanted.local_name,
        target_offsets=shift(box.offsets, wanted.slice.offsets, wanted.local_offsets),
    )


def _grouped(moves: Iterable[Move], key: Callable[[Move], int]) -> Mapping[int, tuple[Move, ...]]:
    groups: defaultdict[int, list[Move]] = defaultdict(list)
    for move in moves:
        groups[key(move)].append(move)
    return {rank: tuple(groups[rank]) for rank in sorted(groups)}
