"""Routes: which rank gives a box to which target. Pure.

A target takes a box from the nearest source: in its own process, on its own device, on its own node; equally near
sources take equal shares. A box enters a node without a source once: one of the targets there that need it takes it
over the network and forwards it to the others; they take turns from tensor to tensor. With a relay a box leaves the
sources once: nodes without a source forward it from one to the next, each box starting at another node, so that every
node receives and sends each byte once.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megarl.weights.algebra.bundles import Bundle
from megarl.weights.algebra.locality import Link, Locations

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedBundle:
    """A bundle, and per name and target the rank that gives the box; arrays are [names, targets]."""

    bundle: Bundle
    givers: Numbers
    """A source rank, or `forwarder(t)` for a target rank t."""
    origins: Numbers
    """The source rank that the box comes from in the end."""
    hops: Numbers
    """0 from a source; else one more than the giver's."""


def forwarder(target_rank: int) -> int:
    """Return the code of a target rank as a giver; also the inverse."""
    return -1 - target_rank


class BundleRouter:
    """Routes one bundle after the other, and counts the bytes of each rank to keep the shares equal."""

    def __init__(self, locations: Locations, *, relays: bool) -> None:
        self._locations = locations
        self._relays = relays
        self._proximities: dict[tuple[tuple[int, ...], tuple[int, ...]], _Proximity] = {}
        self._sent: defaultdict[int, int] = defaultdict(int)
        self._fetched: defaultdict[int, int] = defaultdict(int)
        self._num_started = 0

    def route(self, bundle: Bundle) -> RoutedBundle:
        proximity = self._proximity(bundle.sources, bundle.targets)
        num_names, num_targets = len(bundle.names), len(bundle.targets)
        givers = np.empty((num_names, num_targets), dtype=np.int64)
        for column, source in proximity.own:
            givers[:, column] = source
        for columns, sources in proximity.near:
            givers[:, columns] = _share(sources, num_names, len(columns), self._sent, bundle.box_bytes)
        routed = RoutedBundle(bundle=bundle, givers=givers, origins=givers.copy(), hops=np.zeros_like(givers))
        if proximity.far:
            self._route_far(routed, proximity.far)
        return routed

    def _route_far(self, routed: RoutedBundle, far: tuple[Numbers, ...]) -> None:
        """Fill in the columns of nodes without a source."""
        bundle = routed.bundle
        num_names, num_nodes = len(bundle.names), len(far)
        codes = -1 - np.asarray(bundle.targets, dtype=np.int64)
        numbers = np.arange(num_names)
        entries = np.empty((num_names, num_nodes), dtype=np.int64)  # columns of the targets that boxes enter nodes at
        for node, columns in enumerate(far):
            ranks = tuple(bundle.targets[column] for column in columns)
            chosen = _share(ranks, num_names, 1, self._fetched, bundle.box_bytes)[:, 0]
            entries[:, node] = columns[np.searchsorted(ranks, chosen)]
        if self._relays:
            starts = (self._num_started + numbers) % num_nodes
            self._num_started += num_names
            sources = _share(bundle.sources, num_names, 1, self._sent, bundle.box_bytes).repeat(num_nodes, axis=1)
            positions = (np.arange(num_nodes)[None, :] - starts[:, None]) % num_nodes
            before = np.roll(entries, 1, axis=1)
            entry_givers = np.where(positions == 0, sources, codes[before])
        else:
            sources = _share(bundle.sources, num_names, num_nodes, self._sent, bundle.box_bytes)
            positions = np.zeros((num_names, num_nodes), dtype=np.int64)
            entry_givers = sources
        for node, columns in enumerate(far):
            entry = entries[:, node]
            routed.givers[:, columns] = codes[entry][:, None]
            routed.hops[:, columns] = positions[:, node][:, None] + 1
            routed.origins[:, columns] = sources[:, node][:, None]
            routed.givers[numbers, entry] = entry_givers[:, node]
            routed.hops[numbers, entry] = positions[:, node]

    def _proximity(self, sources: tuple[int, ...], targets: tuple[int, ...]) -> _Proximity:
        key = sources, targets
        if key not in self._proximities:
            self._proximities[key] = _proximity(sources, targets, self._locations)
        return self._proximities[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Proximity:
    """The targets of a box, by column, sorted by their distance to its sources."""

    own: tuple[tuple[int, int], ...]
    """(column, source) in one process or on one device."""
    near: tuple[tuple[Numbers, tuple[int, ...]], ...]
    """Per node: other targets, and the sources there."""
    far: tuple[Numbers, ...]
    """Per node without a source: its targets."""


def _proximity(sources: tuple[int, ...], targets: tuple[int, ...], locations: Locations) -> _Proximity:
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
        link, source = min((location.link(locations.sources[rank]), rank) for rank in on_node[location.node])
        if link <= Link.DEVICE:
            own.append((column, source))
        else:
            near[location.node].append(column)
    return _Proximity(
        own=tuple(own),
        near=tuple((np.asarray(columns), tuple(on_node[node])) for node, columns in near.items()),
        far=tuple(np.asarray(columns) for columns in far.values()),
    )


def _share(
    ranks: tuple[int, ...], num_names: int, num_columns: int, done: defaultdict[int, int], num_bytes: int
) -> Numbers:
    """Return a rank for each of [names, columns], in equal parts; a remainder goes to the ranks that did least so far.

    A rank's part is a few whole columns, or neighbours in one, so that few pairs of ranks exchange much.
    """
    each, more = divmod(num_names * num_columns, len(ranks))
    sizes = np.full(len(ranks), each)
    if more:
        idlest = sorted(range(len(ranks)), key=lambda index: (done[ranks[index]], index))[:more]
        sizes[idlest] += 1
    for rank, size in zip(ranks, sizes.tolist(), strict=True):
        done[rank] += size * num_bytes
    shared: Numbers = np.repeat(np.asarray(ranks, dtype=np.int64), sizes).reshape(num_columns, num_names).T
    return shared
