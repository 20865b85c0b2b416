"""The bytes that a plan makes each rank and link carry, and the lower bound of the busiest rank's. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cached_property

import numpy as np

from megarl.weights.algebra.locality import Link, Location, Locations
from megarl.weights.algebra.routing import Numbers, RoutedBundle, forwarder


class Traffic:
    """The bytes of a plan by link and rank: sent by sources, forwarded by targets, received by targets."""

    def __init__(self, bundles: Iterable[RoutedBundle], locations: Locations) -> None:
        self.sent = _by_link()
        self.forwarded = _by_link()
        self.received = _by_link()
        self.between: defaultdict[tuple[int, int], int] = defaultdict(int)
        """Bytes by giver, coded as in `RoutedBundle.givers`, and target."""
        self._num_sources = len(locations.sources)
        for routed in bundles:
            for column, target in enumerate(routed.bundle.targets):
                for giver, count in _counts(routed.givers[:, column]):
                    self.between[giver, target] += count * routed.bundle.box_bytes
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

    @property
    def neediest_bytes(self) -> int:
        """Most bytes that one target receives."""
        return max(self.received_bytes.values(), default=0)

    @property
    def busiest_bytes(self) -> int:
        """Most bytes that one rank sends or receives."""
        sizes = (*self.sent_bytes.values(), *self.received_bytes.values(), *self.forwarded_bytes.values())
        return max(sizes, default=0)

    @property
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


def _counts(values: Numbers) -> list[tuple[int, int]]:
    if (values == values[0]).all():  # much faster than np.unique, and the common case
        return [(int(values[0]), len(values))]
    distinct, counts = np.unique(values, return_counts=True)
    return list(zip(distinct.tolist(), counts.tolist(), strict=True))
