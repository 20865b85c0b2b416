"""Further engines than the recipe's, on nodes that joined the Ray cluster with free devices.

They are engines like the others: started and supervised, sent the committed version, part of every publish. A run that
resumes has the recipe's number again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from megarl.errors import EngineError, first_line
from megarl.rollout.client import EngineClient, EngineEndpoint
from megarl.rollout.fleet import Fleet
from megarl.runtime.cluster import RAY_FAILURES, NodeBundle, Place, Pool, free_devices, live_nodes
from megarl.runtime.engines.processes import Engines
from megarl.runtime.lost_nodes import reserve_on


class Growth:
    """Adds engines to a pool that only engines use."""

    def __init__(
        self, pool: Pool, fleet: Fleet, engines: Engines, *, connect: Callable[[EngineEndpoint], EngineClient]
    ) -> None:
        self._pool = pool
        self._fleet = fleet
        self._engines = engines
        self._tensor = engines.tensor
        self._connect = connect
        self._turn = asyncio.Lock()

    async def add(self, address: str, count: int | None) -> None:
        """Start `count` engines on a node, or as many as have room there. Raise EngineError if there is no room."""
        if self._pool.is_shared:
            raise EngineError("the engines share their pool with other roles; only a pool of their own can grow")
        async with self._turn:
            try:
                bundle = await asyncio.to_thread(self._reserve, address, count)
            except RAY_FAILURES as error:
                raise EngineError(f"node {address}: Ray cannot place engines there now: {first_line(error)}") from error
            places = [Place(bundle=bundle, slot=slot) for slot in range(bundle.size)]
            self._pool.places = [*self._pool.places, *places]
            shares = [places[first : first + self._tensor] for first in range(0, bundle.size, self._tensor)]
            endpoints = [self._engines.extend(share, address) for share in shares]
            self._fleet.add([self._connect(endpoint) for endpoint in endpoints], "was added by the operator")

    def _reserve(self, address: str, count: int | None) -> NodeBundle:
        """Reserve the devices of further engines on a node."""
        resource = self._pool.places[0].bundle.resource
        free = free_devices(resource)
        nodes = {str(node["NodeManagerAddress"]): str(node["NodeID"]) for node in live_nodes()}
        if address not in nodes:
            roomy = sorted(each for each, key in nodes.items() if free.get(key, 0) >= self._tensor)
            there = f"there is room on {', '.join(roomy)}" if roomy else "no node has free devices"
            raise EngineError(f"no node {address} is in the Ray cluster; {there}")
        num_free = free.get(nodes[address], 0)
        wanted = num_free // self._tensor if count is None else count
        size = wanted * self._tensor
        if not 0 < size <= num_free or (bundle := reserve_on(address, resource=resource, size=size)) is None:
            each = f"an engine takes {self._tensor} (roles.rollout.tensor)"
            raise EngineError(f"node {address} has {num_free} free device(s), {each}; no engine was added")
        bundle.node, bundle.is_bound = nodes[address], True
        return bundle
