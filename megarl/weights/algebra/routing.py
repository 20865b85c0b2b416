"""Who gives a box to whom: the nearest holder, equal shares for equally near ones, and once into each node. Pure.

A target takes a box from a source in its own process or on its own device or node. Where a node has no source, one of
the targets there that need the box takes it over the network and gives it to the others; they take turns from tensor
to tensor. With a relay the boxes leave the sources once: nodes without a source pass them on from one to the next, each
box starting at another node, so that every node receives and sends each byte once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megarl.weights.algebra.bundles import Bundle
from megarl.weights.algebra.locality import Link, Location, Locations
from megarl.weights.algebra.slices import ITEM_BYTES

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Of one bundle; arrays are [names, targets]."""

    givers: Numbers
    """A source rank, or `forwarder(t)` for a target rank t."""
    roots: Numbers
    """The source rank the box comes from in the end."""
    hops: Numbers
    """0 from a source; else one more than its giver's."""


def forwarder(target_rank: int) -> int:
    """A target rank as a giver."""
    return -1 - target_rank


class BundleRouter:
    """Routes one bundle after the other, and remembers who has done how much."""

    def __init__(self, locations: Locations, *, relays: bool) -> None:
        self._locations = locations
        self._relays = relays
        self._meetings: dict[tuple[tuple[int, ...], tuple[int, ...]], _Meeting] = {}
        self._sent: defaultdict[int, int] = defaultdict(int)
        self._fetched: defaultdict[int, int] = defaultdict(int)
        self._num_started = 0

    def route(self, bundle: Bundle) -> Routing:
        meeting = self._meeting(bundle.sources, bundle.targets)
        num_names, num_targets = len(bundle.names), len(bundle.targets)
        num_bytes = int(np.prod(bundle.shape, dtype=np.int64)) * ITEM_BYTES[bundle.dtype]
        givers = np.empty((num_names, num_targets), dtype=np.int64)
        hops = np.zeros_like(givers)
        for column, source in meeting.own:
            givers[:, column] = source
        for columns, near in meeting.near:
            givers[:, columns] = _share(near, num_names, len(columns), self._sent, num_bytes)
        roots = givers.copy()
        if meeting.far:
            self._route_far(bundle, meeting, num_bytes, givers, roots, hops)
        return Routing(givers=givers, roots=roots, hops=hops)

    def _route_far(
        self, bundle: Bundle, meeting: _Meeting, num_bytes: int, givers: Numbers, roots: Numbers, hops: Numbers
    ) -> None:
        """Nodes without a source."""
        num_names, num_nodes = len(bundle.names), len(meeting.far)
        codes = -1 - np.asarray(bundle.targets, dtype=np.int64)
        numbers = np.arange(num_names)
        entries = np.empty((num_names, num_nodes), dtype=np.int64)
        """Columns of those who take the boxes into their nodes."""
        for node, columns in enumerate(meeting.far):
            ranks = tuple(bundle.targets[column] for column in columns)
            chosen = _share(ranks, num_names, 1, self._fetched, num_bytes)[:, 0]
            entries[:, node] = columns[np.searchsorted(ranks, chosen)]
        if self._relays:
            starts = (self._num_started + numbers) % num_nodes
            self._num_started += num_names
            sources = np.repeat(_share(bundle.sources, num_names, 1, self._sent, num_bytes), num_nodes, axis=1)
            positions = (np.arange(num_nodes)[None, :] - starts[:, None]) % num_nodes
            before = np.roll(entries, 1, axis=1)
            entry_givers = np.where(positions == 0, sources, codes[before])
        else:
            sources = _share(bundle.sources, num_names, num_nodes, self._sent, num_bytes)
            positions = np.zeros((num_names, num_nodes), dtype=np.int64)
            entry_givers = sources
        for node, columns in enumerate(meeting.far):
            entry = entries[:, node]
            givers[:, columns] = codes[entry][:, None]
            hops[:, columns] = positions[:, node][:, None] + 1
            roots[:, columns] = sources[:, node][:, None]
            givers[numbers, entry] = entry_givers[:, node]
            hops[numbers, entry] = positions[:, node]

    def _meeting(self, sources: tuple[int, ...], targets: tuple[int, ...]) -> _Meeting:
        found = self._meetings.get((sources, targets))
        if found is None:
            found = self._meetings[sources, targets] = _meet(sources, targets, self._locations)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Meeting:
    """How near the targets of a box are to its sources; targets by their column."""

    own: tuple[tuple[int, int], ...]
    """(column, source) in one process or on one device."""
    near: tuple[tuple[Numbers, tuple[int, ...]], ...]
    """Per node: other targets, and the sources there."""
    far: tuple[Numbers, ...]
    """Per node without a source: its targets."""


def _meet(sources: tuple[int, ...], targets: tuple[int, ...], locations: Locations) -> _Meeting:
    on_node: defaultdict[str, list[int]] = defaultdict(list)
    for source in sources:
        on_node[locations.sources[source].node].append(source)
    own: list[tuple[int, int]] = []
    near: defaultdict[str, list[int]] = defaultdict(list)
    far: defaultdict[str, list[int]] = defaultdict(list)
    for column, target in enumerate(targets):
        location = locations.targets[target]
        if location.node not in on_node:
            far[location.node].append(column)
            continue
        link, source = _nearest(on_node[location.node], location, locations)
        if link <= Link.DEVICE:
            own.append((column, source))
        else:
            near[location.node].append(column)
    return _Meeting(
        own=tuple(own),
        near=tuple((np.asarray(columns), tuple(on_node[node])) for node, columns in near.items()),
        far=tuple(np.asarray(columns) for columns in far.values()),
    )


def _nearest(sources: Sequence[int], location: Location, locations: Locations) -> tuple[Link, int]:
    return min((location.link(locations.sources[source]), source) for source in sources)


def _share(
    ranks: tuple[int, ...], num_names: int, num_columns: int, done: defaultdict[int, int], num_bytes: int
) -> Numbers:
    """[names, columns]: a rank for each, in equal parts; what does not divide goes to those who did least so far.

    A rank's part is a few whole columns, or neighbours in one: few pairs of ranks have much to say to each other.
    """
    num_all = num_names * num_columns
    each, more = divmod(num_all, len(ranks))
    sizes = np.full(len(ranks), each)
    if more:
        idlest = sorted(range(len(ranks)), key=lambda index: (done[ranks[index]], index))[:more]
        sizes[idlest] += 1
    for rank, size in zip(ranks, sizes.tolist(), strict=True):
        done[rank] += size * num_bytes
    shared: Numbers = np.repeat(np.asarray(ranks, dtype=np.int64), sizes).reshape(num_columns, num_names).T
    return shared
