"""The nodes of the engines: taken out and added as a whole, and excluded after repeated faults.

A node is known by the address at which its engines answer, as `megarl fleet` lists it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from megarl.cluster.cluster import RAY_FAILURES, NodeBundle, Place, Pool, free_devices, live_nodes
from megarl.cluster.lost_nodes import reserve_on
from megarl.cluster.node_faults import NodeFaults
from megarl.engine.client import EngineClient, EngineEndpoint
from megarl.engine.fleet import Engine, Fleet
from megarl.engine.lifecycle import EngineState, Life
from megarl.errors import EngineError, first_line
from megarl.observe.observer import Observer
from megarl.serving.processes import Engines
from megarl.serving.supervisor import Supervisor


class EngineNodes:
    """Retires and adds the engines of a node, and counts the faults of each node."""

    def __init__(
        self,
        fleet: Fleet,
        supervisor: Supervisor,
        *,
        max_faults: int,
        observer: Observer,
        faults: NodeFaults,
        grow: Callable[[str, int | None], Awaitable[None]],
        excluded: Callable[[str, list[Engine]], None] = lambda _node, _engines: None,
    ) -> None:
        """`grow` starts further engines on a node.

        `excluded` is told a node and its engines, which are retired then.
        """
        self._fleet = fleet
        self._supervisor = supervisor
        self._max_faults = max_faults
        self._observer = observer
        self._faults = faults
        self._grow = grow
        self._tell_excluded = excluded
        fleet.listen(self._note)

    def retire(self, node: str) -> None:
        """Take all engines of a node out."""
        engines = self._on(node)
        if not engines:
            known = sorted({each for engine in self._fleet.engines for each in nodes_of(engine)})
            raise EngineError(f"no engine is on node {node}; there are engines on {', '.join(known)}")
        self._retire(node, engines, "retired by the operator")

    async def add(self, node: str, count: int | None = None) -> None:
        """Start the engines of a node again that are out of service, or further ones; its faults are forgotten.

        Without a `count` a node that has engines gets no further ones.
        """
        engines = self._on(node)
        if count is not None or not engines:
            await self._grow(node, count)
        self._faults.forgive(node)
        self._observer.nodes_excluded(len(self._faults.excluded))
        for engine in engines:
            self._supervisor.add(engine.index)

    def _on(self, node: str) -> list[Engine]:
        return [engine for engine in self._fleet.engines if node in nodes_of(engine)]

    def _retire(self, node: str, engines: list[Engine], reason: str) -> None:
        if all(other.life.is_over for other in self._fleet.engines if other not in engines):
            raise EngineError(f"node {node} has the last engines; stop the run instead")
        for engine in engines:
            if engine.state is not EngineState.RETIRED:
                self._supervisor.retire(engine.index, reason)

    def _note(self, engine: Engine, before: Life) -> None:
        if engine.state is not EngineState.DEAD or before.state is EngineState.RETIRED:
            return
        for node in nodes_of(engine):
            self._count(node, engine)

    def _count(self, node: str, engine: Engine) -> None:
        num_faults = self._faults.count(node)
        if node in self._faults.excluded or num_faults < self._max_faults:
            return
        elsewhere = [other for other in self._fleet.engines if other.is_live and node not in nodes_of(other)]
        if not elsewhere:
            return  # counted on: with the next fault another node may have engines
        reason = f"node {node} is excluded after {num_faults} faults within an hour"
        self._faults.excluded.add(node)
        self._observer.nodes_excluded(len(self._faults.excluded))
        self._observer.warned(
            f"{reason} (cluster.max_node_faults), the last: {engine.reason}; its engines are retired, and "
            f"`megarl fleet RUN add --node {node}` takes it back"
        )
        engines = self._on(node)
        self._retire(node, engines, reason)
        self._tell_excluded(node, engines)


def nodes_of(engine: Engine) -> tuple[str, ...]:
    """Return the addresses of the nodes that an engine is on."""
    endpoint = engine.client.endpoint
    return endpoint.node_hosts or (endpoint.host,)


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
