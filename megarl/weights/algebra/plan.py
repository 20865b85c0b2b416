"""Which bytes of which holder go to which target holder. Pure: no torch, no transport.

Computed once per pair of layouts and replayed every step. Every element of every target piece is written exactly once,
from a holder that has it; nearer holders come first, holders of equal boxes divide the work, and each byte enters a
node once. The same layouts always give the same plan, so that each process computes it for itself and compares hashes.

A plan is stored as bundles, a few hundred for any model; moves are listed for one rank at a time.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megarl.weights.algebra.routing import BundleRouter, Numbers, RoutedBundle, bundles, forwarder
from megarl.weights.algebra.slices import (
    ITEM_BYTES,
    Index,
    Layout,
    Link,
    Location,
    Locations,
    Piece,
    Slice,
    apart,
    shift,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One box, from a place in one holder's tensor to a place in another's."""

    slice: Slice
    dtype: str
    """The target's dtype, which is also the one that travels."""
    source_rank: int
    """Rank of a source or, after the first hop, of a target that has received the box."""
    source_name: str
    source_offsets: Index
    target_rank: int
    target_name: str
    target_offsets: Index
    hop: int = 0
    """Targets that forwarded the box before."""

    @property
    def num_bytes(self) -> int:
        return self.slice.num_elements * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceBox:
    """One box of a source, and every target that it reaches, however many hops away."""

    slice: Slice
    dtype: str
    source_name: str
    source_offsets: Index
    targets: tuple[tuple[int, str], ...]
    """Rank and tensor."""


def plan(source: Layout, target: Layout, *, locations: Locations | None = None, relays: bool = False) -> Plan:
    """Return the moves that fill every piece of `target` from `source`.

    Without `locations` every rank is on a node of its own. With `relays`, nodes without a source forward boxes to each
    other.
    """
    locations = apart(source, target) if locations is None else locations
    router = BundleRouter(locations, relays=relays)
    digest = hashlib.blake2b(digest_size=16)
    routed = []
    for bundle in bundles(source, target):
        routed.append(router.route(bundle))
        boxes = (bundle.names, bundle.offsets, bundle.shape, bundle.dtype, bundle.copy, bundle.targets)
        digest.update(repr(boxes).encode())
        digest.update(routed[-1].givers.tobytes())
    return Plan(source=source, target=target, locations=locations, bundles=tuple(routed), hash=digest.hexdigest())


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes are in bytes of the targets' dtypes."""

    source: Layout
    target: Layout
    locations: Locations
    bundles: tuple[RoutedBundle, ...]
    hash: str
    """Equal in two processes if and only if they will send and expect the same bytes."""

    def moves_from(self, rank: int) -> tuple[Move, ...]:
        """Return what source `rank` sends, in the order of the tensors."""
        return self._given(rank, self._bundles_from.get(rank, ()))

    def moves_forwarded_by(self, rank: int) -> tuple[Move, ...]:
        """Return what target `rank` sends on."""
        return self._given(forwarder(rank), self._bundles_to.get(rank, ()))

    def moves_to(self, rank: int) -> tuple[Move, ...]:
        """Return what target `rank` needs."""
        return self._in_order(
            self._move(routed, index, column)
            for routed in self._bundles_to.get(rank, ())
            for column in (routed.bundle.targets.index(rank),)
            for index in range(len(routed.bundle.names))
        )

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """All moves, target after target; many for a large plan."""
        return tuple(move for holding in self.target.holdings for move in self.moves_to(holding.rank))

    def boxes_from(self, origin: int) -> Iterator[SourceBox]:
        """Yield every box that comes from source rank `origin`, once."""
        for routed in self._bundles_from.get(origin, ()):
            bundle, mine = routed.bundle, routed.origins == origin
            for index in np.flatnonzero(mine.any(axis=1)).tolist():
                box = bundle.slice(index)
                source_name, source_offsets = self._place(self.source, origin, box)
                ranks = [bundle.targets[column] for column in np.flatnonzero(mine[index]).tolist()]
                yield SourceBox(
                    slice=box,
                    dtype=bundle.dtype,
                    source_name=source_name,
                    source_offsets=source_offsets,
                    targets=tuple((rank, self._place(self.target, rank, box, bundle.copy)[0]) for rank in ranks),
                )

    @cached_property
    def traffic(self) -> Traffic:
        return Traffic(self.bundles, self.locations)

    @property
    def num_hops(self) -> int:
        """The most hops that a byte makes."""
        return 1 + max((int(routed.hops.max()) for routed in self.bundles), default=-1)

    @cached_property
    def _bundles_from(self) -> Mapping[int, list[RoutedBundle]]:
        by_origin: defaultdict[int, list[RoutedBundle]] = defaultdict(list)
        for routed in self.bundles:
            for rank in np.unique(routed.origins).tolist():
                by_origin[rank].append(routed)
        return by_origin

    @cached_property
    def _bundles_to(self) -> Mapping[int, list[RoutedBundle]]:
        by_target: defaultdict[int, list[RoutedBundle]] = defaultdict(list)
        for routed in self.bundles:
            for rank in routed.bundle.targets:
                by_target[rank].append(routed)
        return by_target

    @cached_property
    def _positions(self) -> Mapping[str, int]:
        return {name: index for index, name in enumerate(self.target.canonical)}

    @cached_property
    def _pieces(self) -> dict[int, dict[str, list[Piece]]]:
        """Pieces by canonical name, by identity of a table of pieces: replicas share one."""
        return {}

    def _given(self, giver: int, candidates: Iterable[RoutedBundle]) -> tuple[Move, ...]:
        return self._in_order(
            self._move(routed, index, column)
            for routed in candidates
            for index, column in np.argwhere(routed.givers == giver).tolist()
        )

    def _in_order(self, moves: Iterable[Move]) -> tuple[Move, ...]:
        return tuple(
            sorted(moves, key=lambda move: (self._positions[move.slice.name], move.slice.offsets, move.target_rank))
        )

    def _move(self, routed: RoutedBundle, index: int, column: int) -> Move:
        bundle, giver = routed.bundle, int(routed.givers[index, column])
        box, target_rank = bundle.slice(index), bundle.targets[column]
        if giver >= 0:
            source_rank, source = giver, self._place(self.source, giver, box)
        else:
            source_rank = forwarder(giver)
            source = self._place(self.target, source_rank, box, bundle.copy)
        target = self._place(self.target, target_rank, box, bundle.copy)
        return Move(
            slice=box,
            dtype=bundle.dtype,
            source_rank=source_rank,
            source_name=source[0],
            source_offsets=source[1],
            target_rank=target_rank,
            target_name=target[0],
            target_offsets=target[1],
            hop=int(routed.hops[index, column]),
        )

    def _place(self, layout: Layout, rank: int, box: Slice, copy: int = 0) -> tuple[str, Index]:
        """Return the tensor that holds a box, and the box's offsets in it, by the `copy`-th piece around the box."""
        pieces = layout.by_rank[rank].pieces
        if id(pieces) not in self._pieces:
            by_name: defaultdict[str, list[Piece]] = defaultdict(list)
            for piece in pieces:
                by_name[piece.slice.name].append(piece)
            self._pieces[id(pieces)] = by_name
        around = [piece for piece in self._pieces[id(pieces)][box.name] if piece.slice.contains(box)]
        piece = around[copy]
        return piece.local_name, shift(box.offsets, piece.slice.offsets, piece.local_offsets)


class Traffic:
    """The bytes of a plan by link and rank: sent by sources, forwarded by targets, received by targets."""

    def __init__(self, bundles: Sequence[RoutedBundle], locations: Locations) -> None:
        self.sent = _by_link()
        self.forwarded = _by_link()
        self.received = _by_link()
        self.between = _bytes_between(bundles, locations)
        """Bytes by giver, coded as in `RoutedBundle.givers`, and target."""
        self._num_sources = len(locations.sources)
        for (giver, target), num_bytes in self.between.items():
            link = giver_location(giver, locations).link(locations.targets[target])
            self.received[link][target] += num_bytes
            if giver >= 0:
                self.sent[link][giver] += num_bytes
            else:
                self.forwarded[link][forwarder(giver)] += num_bytes

    @property
    def bytes_by_link(self) -> Mapping[Link, int]:
        return {link: num_bytes for link in Link if (num_bytes := sum(self.received[link].values()))}

    @cached_property
    def sent_bytes(self) -> Mapping[int, int]:
        """Bytes that leave the process of each source rank."""
        return _between_processes(self.sent)

    @cached_property
    def received_bytes(self) -> Mapping[int, int]:
        """Bytes that enter the process of each target rank."""
        return _between_processes(self.received)

    @cached_property
    def forwarded_bytes(self) -> Mapping[int, int]:
        """Bytes that each target rank sends on."""
        return _between_processes(self.forwarded)

    @cached_property
    def neediest_bytes(self) -> int:
        """Most bytes that one target receives."""
        return max(self.received_bytes.values(), default=0)

    @cached_property
    def busiest_bytes(self) -> int:
        """Most bytes that one rank sends or receives."""
        sizes = (*self.sent_bytes.values(), *self.received_bytes.values(), *self.forwarded_bytes.values())
        return max(sizes, default=0)

    @cached_property
    def floor_bytes(self) -> int:
        """Lower bound of `busiest_bytes`: the neediest target's bytes, or an equal share for every source."""
        return max(self.neediest_bytes, -(-sum(self.sent_bytes.values()) // max(1, self._num_sources)))


def giver_location(giver: int, locations: Locations) -> Location:
    """Return the location of a giver, coded as in `RoutedBundle.givers`."""
    return locations.sources[giver] if giver >= 0 else locations.targets[forwarder(giver)]


def _by_link() -> dict[Link, defaultdict[int, int]]:
    return {link: defaultdict(int) for link in Link}


def _between_processes(by_link: Mapping[Link, Mapping[int, int]]) -> dict[int, int]:
    totals: defaultdict[int, int] = defaultdict(int)
    for link, by_rank in by_link.items():
        if link is not Link.PROCESS:
            for rank, num_bytes in by_rank.items():
                totals[rank] += num_bytes
    return dict(totals)


def _bytes_between(bundles: Sequence[RoutedBundle], locations: Locations) -> dict[tuple[int, int], int]:
    """Return the bytes of each giver and target, in the order in which bundles first have them."""
    if not bundles:
        return {}
    num_targets = 1 + max(locations.targets)
    counted = [_counts(routed, num_targets) for routed in bundles]
    codes, firsts, places = np.unique(
        np.concatenate([codes for codes, _ in counted]), return_index=True, return_inverse=True
    )
    totals = np.zeros(len(codes), dtype=np.int64)
    np.add.at(totals, places, np.concatenate([sizes for _, sizes in counted]))
    order = firsts.argsort()
    givers, targets = np.divmod(codes[order], num_targets)
    return dict(zip(zip(givers.tolist(), targets.tolist(), strict=True), totals[order].tolist(), strict=True))


def _counts(routed: RoutedBundle, num_targets: int) -> tuple[Numbers, Numbers]:
    """Return which giver sends to which target, as giver * num_targets + target, and how many bytes."""
    lowest = int(routed.givers.min())
    num_values = int(routed.givers.max()) - lowest + 1
    counts = np.bincount((routed.givers - lowest + num_values * np.arange(routed.givers.shape[1])).ravel())
    found = np.flatnonzero(counts)
    columns, values = np.divmod(found, num_values)
    codes = (values + lowest) * num_targets + np.asarray(routed.bundle.targets)[columns]
    return codes, counts[found] * routed.bundle.box_bytes
