"""Which bytes of which holder go to which target holder. Pure: no torch, no transport.

Computed once per pair of layouts and replayed every step. Every element of every target piece is written exactly once,
from a holder that has it; nearer holders come first, holders of equal boxes share the work, and each byte enters a node
once. The same layouts always give the same plan, so that each process can compute it for itself and compare hashes.

A plan is kept by bundles, a few hundred for any model; moves are listed for one rank at a time.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megarl.weights.algebra.bundles import Bundle, bundles, pieces_by_name
from megarl.weights.algebra.locality import Link, Locations, apart
from megarl.weights.algebra.routing import BundleRouter, Numbers, Routing, forwarder
from megarl.weights.algebra.slices import ITEM_BYTES, Holding, Index, Layout, Piece, Slice, shift


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One box, from a place in one holder's tensor to a place in another's."""

    slice: Slice
    dtype: str
    """What travels: the target's."""
    source_rank: int
    """Of a source; after the first hop, of a target that has the box by then."""
    source_name: str
    source_offsets: Index
    target_rank: int
    target_name: str
    target_offsets: Index
    hop: int = 0
    """Targets that have passed it on before."""

    @property
    def num_bytes(self) -> int:
        return self.slice.num_elements * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """One box of a source, and every target that it is the origin of, however many hops away."""

    slice: Slice
    dtype: str
    source_name: str
    source_offsets: Index
    targets: tuple[tuple[int, str], ...]
    """Rank and tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strand:
    """A bundle and its routing."""

    bundle: Bundle
    routing: Routing

    @property
    def num_bytes(self) -> int:
        """Of one box."""
        return int(np.prod(self.bundle.shape, dtype=np.int64)) * ITEM_BYTES[self.bundle.dtype]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes are in bytes of the targets' dtypes."""

    source: Layout
    target: Layout
    locations: Locations
    strands: tuple[Strand, ...]
    hash: str
    """Equal in two processes if and only if they will send and expect the same bytes."""

    def moves_from(self, rank: int) -> tuple[Move, ...]:
        """What source `rank` gives, in the order of the tensors."""
        return self._given(rank, rank)

    def moves_on_from(self, rank: int) -> tuple[Move, ...]:
        """What target `rank` passes on."""
        return self._given(forwarder(rank), rank)

    def moves_to(self, rank: int) -> tuple[Move, ...]:
        """What target `rank` needs."""
        found = []
        for strand in self._strands_to.get(rank, ()):
            column = strand.bundle.targets.index(rank)
            found += [self._move(strand, index, column) for index in range(len(strand.bundle.names))]
        return self._in_order(found)

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """All of them, target after target; many for a large plan."""
        return tuple(move for holding in self.target.holdings for move in self.moves_to(holding.rank))

    def deliveries_from(self, rank: int) -> Iterator[Delivery]:
        """Every box that source `rank` is the origin of, once."""
        for strand in self._strands_from.get(rank, ()):
            bundle = strand.bundle
            mine = strand.routing.roots == rank
            for index in np.flatnonzero(mine.any(axis=1)).tolist():
                box = bundle.slice(index)
                held = self._piece(self.source, rank, box)
                targets = [bundle.targets[column] for column in np.flatnonzero(mine[index]).tolist()]
                yield Delivery(
                    slice=box,
                    dtype=bundle.dtype,
                    source_name=held.local_name,
                    source_offsets=shift(box.offsets, held.slice.offsets, held.local_offsets),
                    targets=tuple(
                        (target, self._piece(self.target, target, box, bundle.copy).local_name) for target in targets
                    ),
                )

    @cached_property
    def traffic(self) -> Traffic:
        traffic = Traffic()
        for strand in self.strands:
            traffic.add(strand, self.locations)
        return traffic

    @property
    def bytes_by_link(self) -> Mapping[Link, int]:
        return {link: num_bytes for link in Link if (num_bytes := sum(self.traffic.received[link].values()))}

    @cached_property
    def sent_bytes(self) -> Mapping[int, int]:
        """Per source rank, what leaves its process."""
        return _besides_own(self.traffic.sent)

    @cached_property
    def received_bytes(self) -> Mapping[int, int]:
        """Per target rank, what enters its process."""
        return _besides_own(self.traffic.received)

    @cached_property
    def forwarded_bytes(self) -> Mapping[int, int]:
        """Per target rank, what it passes on."""
        return _besides_own(self.traffic.forwarded)

    @property
    def num_hops(self) -> int:
        """The longest way of a byte."""
        return 1 + max((int(strand.routing.hops.max()) for strand in self.strands), default=-1)

    @property
    def peak_staging_bytes(self) -> int:
        """Most that one target holds between `stage` and `commit`, besides its parameters."""
        return max(self.received_bytes.values(), default=0)

    @property
    def busiest_bytes(self) -> int:
        """Most that one rank sends or receives."""
        sizes = (*self.sent_bytes.values(), *self.received_bytes.values(), *self.forwarded_bytes.values())
        return max(sizes, default=0)

    @property
    def floor_bytes(self) -> int:
        """What `busiest_bytes` cannot be below: the neediest target's bytes, or an equal share for every source."""
        moved = sum(self.sent_bytes.values())
        return max(self.peak_staging_bytes, -(-moved // max(1, len(self.source.holdings))))

    @cached_property
    def _strands_from(self) -> Mapping[int, list[Strand]]:
        found: defaultdict[int, list[Strand]] = defaultdict(list)
        for strand in self.strands:
            for rank in np.unique(strand.routing.roots).tolist():
                found[rank].append(strand)
        return found

    @cached_property
    def _strands_to(self) -> Mapping[int, list[Strand]]:
        found: defaultdict[int, list[Strand]] = defaultdict(list)
        for strand in self.strands:
            for rank in strand.bundle.targets:
                found[rank].append(strand)
        return found

    @cached_property
    def _pieces(self) -> dict[int, dict[str, tuple[Piece, ...]]]:
        """By identity of a table of pieces, which replicas share."""
        return {}

    @cached_property
    def _positions(self) -> Mapping[str, int]:
        return {name: index for index, name in enumerate(self.target.canonical)}

    def _given(self, giver: int, rank: int) -> tuple[Move, ...]:
        found = []
        for strand in (self._strands_from if giver >= 0 else self._strands_to).get(rank, ()):
            rows, columns = np.nonzero(strand.routing.givers == giver)
            found += [self._move(strand, *place) for place in zip(rows.tolist(), columns.tolist(), strict=True)]
        return self._in_order(found)

    def _in_order(self, moves: list[Move]) -> tuple[Move, ...]:
        return tuple(
            sorted(moves, key=lambda move: (self._positions[move.slice.name], move.slice.offsets, move.target_rank))
        )

    def _move(self, strand: Strand, index: int, column: int) -> Move:
        bundle, routing = strand.bundle, strand.routing
        box = bundle.slice(index)
        giver, target_rank = int(routing.givers[index, column]), bundle.targets[column]
        if giver >= 0:
            source_rank, held = giver, self._piece(self.source, giver, box)
        else:
            source_rank = forwarder(giver)
            held = self._piece(self.target, source_rank, box, bundle.copy)
        wanted = self._piece(self.target, target_rank, box, bundle.copy)
        return Move(
            slice=box,
            dtype=bundle.dtype,
            source_rank=source_rank,
            source_name=held.local_name,
            source_offsets=shift(box.offsets, held.slice.offsets, held.local_offsets),
            target_rank=target_rank,
            target_name=wanted.local_name,
            target_offsets=shift(box.offsets, wanted.slice.offsets, wanted.local_offsets),
            hop=int(routing.hops[index, column]),
        )

    def _piece(self, layout: Layout, rank: int, box: Slice, copy: int = 0) -> Piece:
        """Where a holder has a box: in its `copy`-th piece around it."""
        holding = layout.by_rank[rank]
        around = [piece for piece in self._table(holding)[box.name] if _contains(piece.slice, box)]
        return around[copy]

    def _table(self, holding: Holding) -> dict[str, tuple[Piece, ...]]:
        key = id(holding.pieces)
        if key not in self._pieces:
            self._pieces[key] = pieces_by_name(holding)
        return self._pieces[key]


class Traffic:
    """Bytes by link and rank: from sources, from targets that pass on, to targets."""

    def __init__(self) -> None:
        self.sent = _tables()
        self.forwarded = _tables()
        self.received = _tables()
        self.between: defaultdict[tuple[int, int], int] = defaultdict(int)
        """By giver, as in a routing, and target."""
        self._links: dict[tuple[int, int], Link] = {}

    def add(self, strand: Strand, locations: Locations) -> None:
        num_bytes = strand.num_bytes
        for column, target in enumerate(strand.bundle.targets):
            givers, counts = _counted(strand.routing.givers[:, column])
            for giver, count in zip(givers, counts, strict=True):
                size = count * num_bytes
                link = self._link(giver, target, locations)
                self.received[link][target] += size
                self.between[giver, target] += size
                if giver >= 0:
                    self.sent[link][giver] += size
                else:
                    self.forwarded[link][forwarder(giver)] += size

    def _link(self, giver: int, target: int, locations: Locations) -> Link:
        found = self._links.get((giver, target))
        if found is None:
            location = locations.sources[giver] if giver >= 0 else locations.targets[forwarder(giver)]
            found = self._links[giver, target] = location.link(locations.targets[target])
        return found


def plan(source: Layout, target: Layout, *, locations: Locations | None = None, relays: bool = False) -> Plan:
    """The moves that fill every piece of `target` from `source`.

    Without a locations everyone is on a node of its own. `relays`: nodes without a source pass boxes on to each other.
    """
    locations = apart(source, target) if locations is None else locations
    router = BundleRouter(locations, relays=relays)
    digest = hashlib.blake2b(digest_size=16)
    strands = []
    for bundle in bundles(source, target):
        strand = Strand(bundle=bundle, routing=router.route(bundle))
        boxes = (bundle.names, bundle.offsets, bundle.shape, bundle.dtype, bundle.copy, bundle.targets)
        digest.update(repr(boxes).encode())
        digest.update(strand.routing.givers.tobytes())
        strands.append(strand)
    return Plan(source=source, target=target, locations=locations, strands=tuple(strands), hash=digest.hexdigest())


def _tables() -> dict[Link, defaultdict[int, int]]:
    return {link: defaultdict(int) for link in Link}


def _besides_own(tables: Mapping[Link, Mapping[int, int]]) -> dict[int, int]:
    totals: defaultdict[int, int] = defaultdict(int)
    for link, table in tables.items():
        if link is not Link.PROCESS:
            for rank, num_bytes in table.items():
                totals[rank] += num_bytes
    return dict(totals)


def _counted(values: Numbers) -> tuple[list[int], list[int]]:
    if (values == values[0]).all():
        return [int(values[0])], [len(values)]
    found, counts = np.unique(values, return_counts=True)
    return found.tolist(), counts.tolist()


def _contains(outer: Slice, inner: Slice) -> bool:
    return all(
        a <= b and b + b_size <= a + a_size
        for a, a_size, b, b_size in zip(outer.offsets, outer.shape, inner.offsets, inner.shape, strict=True)
    )
