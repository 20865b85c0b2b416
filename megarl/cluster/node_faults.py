"""The faults of each node of a run, and which nodes are excluded after too many. Pure: it moves nothing.

A node is known by its address: one that comes back after a crash is another one to Ray, and has its faults here.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

WITHIN_S = 3600.0
"""Faults that are older no longer count."""
_ONE_ACCIDENT_S = 30.0
"""Processes of a node that are lost within this time are lost for one reason."""


class NodeFaults:
    """Shared by engines and trainer ranks."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._faults: defaultdict[str, list[float]] = defaultdict(list)
        self.excluded: set[str] = set()

    def count(self, node: str) -> int:
        """Note a fault of a node; return how many it had within an hour."""
        now = self._clock()
        faults = [at for at in self._faults[node] if at > now - WITHIN_S]
        self._faults[node] = faults if faults and now < faults[-1] + _ONE_ACCIDENT_S else [*faults, now]
        return len(self._faults[node])

    def forgive(self, node: str) -> None:
        self._faults.pop(node, None)
        self.excluded.discard(node)
