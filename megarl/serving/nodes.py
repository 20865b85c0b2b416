"""The nodes of the engines: excluded after repeated faults, lost, and taken out or added as a whole.

The engines of a lost or excluded node start where their devices are moved to; `cluster.lost_nodes` moves devices.
A node is known by the address at which its engines answer, as `megarl fleet` lists it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass
from functools import partial

from megarl.cluster.cluster import NodeBundle, NodeFaults, Pool
from megarl.cluster.lost_nodes import failure_of, followed, leave_for_spares
from megarl.cluster.tasks import logged_task
from megarl.engine.fleet import Engine, Fleet
from megarl.engine.lifecycle import EngineState, EngineStatus, Relocated
from megarl.errors import EngineError, MachineError
from megarl.observe.observer import Observer
from megarl.serving.processes import Engines
from megarl.serving.supervisor import Supervisor

_HAND_OVER_S = 30.0
"""Longest wait for the requests of an excluded node's engines to leave them."""
_POLL_S = 0.25
_RETRY_S = 10.0


@dataclass(eq=False)
class EngineNodes:
    """Retires and adds the engines of a node, and counts the faults of each node."""

    fleet: Fleet
    supervisor: Supervisor
    _: KW_ONLY
    max_faults: int
    observer: Observer
    faults: NodeFaults
    grow: Callable[[str, int | None], Awaitable[None]]
    """Starts further engines on a node."""
    notify_excluded: Callable[[str, list[Engine]], None] = lambda _node, _engines: None
    """Called with a node and its engines, which are retired then."""

    def __post_init__(self) -> None:
        self.fleet.listen(self._note)

    def retire(self, node: str) -> None:
        """Take all engines of a node out."""
        engines = self._on(node)
        if not engines:
            used = sorted({each for engine in self.fleet.engines for each in nodes_of(engine)})
            raise EngineError(f"no engine is on node {node}; there are engines on {', '.join(used)}")
        self._retire(node, engines, "retired by the operator")

    async def add(self, node: str, count: int | None = None) -> None:
        """Start the engines of a node again that are out of service, or further ones; its faults are forgotten.

        Without a `count` a node that has engines gets no further ones.
        """
        engines = self._on(node)
        if count is not None or not engines:
            await self.grow(node, count)
        self.faults.forgive(node)
        self.observer.nodes_excluded(len(self.faults.excluded))
        for engine in engines:
            self.supervisor.add(engine.index)

    def _on(self, node: str) -> list[Engine]:
        return [engine for engine in self.fleet.engines if node in nodes_of(engine)]

    def _retire(self, node: str, engines: list[Engine], reason: str) -> None:
        if all(other.status.is_over for other in self.fleet.engines if other not in engines):
            raise EngineError(f"node {node} has the last engines; stop the run instead")
        for engine in engines:
            if engine.state is not EngineState.RETIRED:
                self.supervisor.retire(engine.index, reason)

    def _note(self, engine: Engine, before: EngineStatus) -> None:
        if engine.state is not EngineState.DEAD or before.state is EngineState.RETIRED:
            return
        for node in nodes_of(engine):
            self._count(node, engine)

    def _count(self, node: str, engine: Engine) -> None:
        num_faults = self.faults.count(node)
        if node in self.faults.excluded or num_faults < self.max_faults:
            return
        elsewhere = [other for other in self.fleet.engines if other.is_live and node not in nodes_of(other)]
        if not elsewhere:
            return  # counted on: with the next fault another node may have engines
        reason = f"node {node} is excluded after {num_faults} faults within an hour"
        self.faults.exclude(node)
        self.observer.nodes_excluded(len(self.faults.excluded))
        self.observer.warned(
            f"{reason} (cluster.max_node_faults), the last: {engine.reason}; its engines are retired, and "
            f"`megarl fleet RUN add --node {node}` takes it back"
        )
        engines = self._on(node)
        self._retire(node, engines, reason)
        self.notify_excluded(node, engines)


def nodes_of(engine: Engine) -> tuple[str, ...]:
    """Return the addresses of the nodes that an engine is on."""
    endpoint = engine.client.endpoint
    return endpoint.node_hosts or (endpoint.host,)


def following_nodes(
    pool: Pool, fleet: Fleet, engines: Engines, *, warn: Callable[[str], None]
) -> AbstractAsyncContextManager[None]:
    """Start the engines of a lost or excluded node, inside the block, on the node that their devices are moved to."""
    if pool.is_private:
        return nullcontext()

    async def start_there(bundle: NodeBundle) -> None:
        for engine in fleet.engines:
            if bundle in engines.nodes_of(engine.index):
                if engines.is_elsewhere(engine.index):
                    await engines.leave(engine.index)
                fleet.report(engine, Relocated())

    return followed(pool, moved=start_there, warn=warn)


@asynccontextmanager
async def moving_engines(
    pool: Pool, fleet: Fleet, engines: Engines, supervisor: Supervisor, *, warn: Callable[[str], None]
) -> AsyncIterator[Callable[[str, Sequence[Engine]], None]]:
    """Yield a function that moves the retired engines of an excluded node to a spare one, in the background."""
    moves: list[asyncio.Task[None]] = []

    def move(node: str, retired: Sequence[Engine]) -> None:
        moves.append(logged_task(_move(pool, fleet, engines, supervisor, node, retired, warn=warn)))

    try:
        yield move
    finally:
        for task in moves:
            task.cancel()
        await asyncio.gather(*moves, return_exceptions=True)


async def _move(
    pool: Pool,
    fleet: Fleet,
    engines: Engines,
    supervisor: Supervisor,
    node: str,
    retired: Sequence[Engine],
    *,
    warn: Callable[[str], None],
) -> None:
    """Start the engines of an excluded node on a spare one, when their requests have left them."""
    deadline = time.monotonic() + _HAND_OVER_S
    while any(engine.num_requests for engine in retired) and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_S)
    for engine in retired:
        await engines.leave(engine.index)
    places = [pair for engine in retired for pair in zip(nodes_of(engine), engines.nodes_of(engine.index), strict=True)]
    left = {bundle: bundle.node for address, bundle in places if address == node}
    leave = partial(_left_with_ranks, left) if pool.has_ranks else partial(leave_for_spares, pool, list(left))
    reported = ""
    # Until the operator takes the node or one of its engines back.
    while node in pool.faults.excluded and all(engine.state is EngineState.RETIRED for engine in retired):
        problem = await failure_of(leave)
        if problem is None and fleet.is_awake:
            warn(f"the engines of node {node} start on a spare node")
            for engine in retired:
                supervisor.add(engine.index)
            return
        if problem is not None and problem != reported:
            warn(f"the engines of node {node} stay out for now: {problem}")
            reported = problem
        await asyncio.sleep(_RETRY_S if problem else _POLL_S)


def _left_with_ranks(nodes: Mapping[NodeBundle, str]) -> None:
    """Raise MachineError while a bundle of a shared pool is still on its node."""
    if any(bundle.node == node for bundle, node in nodes.items()):
        raise MachineError("they leave the node with the ranks of their pool, when these start again")
