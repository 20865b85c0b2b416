"""All that keeps the engines of a run: their supervisor, the operator, and what watches their pace and their nodes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from megarl.config.cluster import ClusterConfig
from megarl.errors import MachineError
from megarl.observe.observer import Observer
from megarl.rollout.client import EngineClient
from megarl.rollout.fleet import Engine, Fleet
from megarl.rollout.lifecycle import EngineState, Relocated
from megarl.runtime.cluster import NodeBundle, Pool
from megarl.runtime.engines.growth import Growth
from megarl.runtime.engines.nodes import EngineNodes, nodes_of
from megarl.runtime.engines.operator import open_to_operator
from megarl.runtime.engines.processes import Engines
from megarl.runtime.engines.supervisor import Supervisor
from megarl.runtime.lost_nodes import failure_of, followed, leave_for_spares
from megarl.runtime.stragglers import EngineWatch
from megarl.runtime.tasks import logged_task

_HAND_OVER_S = 30.0
_POLL_S = 0.25
_RETRY_S = 10.0


@asynccontextmanager
async def kept_engines(
    run_folder: Path,
    fleet: Fleet,
    engines: Engines,
    pool: Pool,
    *,
    cluster: ClusterConfig,
    observer: Observer,
    request_timeout_s: float,
) -> AsyncIterator[Supervisor]:
    """Keep the engines inside the block; yield their supervisor."""
    connect = partial(EngineClient, request_timeout_s=request_timeout_s)
    supervisor = Supervisor(fleet, engines, connect=connect, may_start=engines.has_nodes)
    slow = EngineWatch(fleet, cluster.stragglers, observer, drain=supervisor.drain)

    async with AsyncExitStack() as stack:
        await stack.enter_async_context(supervisor.running())
        moves: list[asyncio.Task[None]] = []
        stack.push_async_callback(_cancel, moves)

        def move(node: str, retired: Sequence[Engine]) -> None:
            moving = _move(pool, fleet, engines, supervisor, node, retired, warn=observer.warned)
            moves.append(logged_task(moving))

        nodes = EngineNodes(
            fleet,
            supervisor,
            max_faults=cluster.max_node_faults,
            observer=observer,
            faults=pool.faults,
            grow=Growth(pool, fleet, engines, connect=connect).add,
            excluded=move,
        )
        await stack.enter_async_context(open_to_operator(run_folder, fleet, supervisor, nodes))
        await stack.enter_async_context(slow.running())
        await stack.enter_async_context(following_nodes(pool, fleet, engines, warn=observer.warned))
        yield supervisor


def following_nodes(
    pool: Pool, fleet: Fleet, engines: Engines, *, warn: Callable[[str], None]
) -> AbstractAsyncContextManager[None]:
    """Start the engines of a lost or excluded node, inside the block, on the node that their devices are moved to."""

    async def start_there(bundle: NodeBundle) -> None:
        for engine in fleet.engines:
            if bundle in engines.nodes_of(engine.index):
                if engines.is_elsewhere(engine.index):
                    await engines.leave(engine.index)
                fleet.report(engine, Relocated())

    return followed(pool, moved=start_there, warn=warn)


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


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
    told = ""
    # Until the operator takes the node or one of its engines back.
    while node in pool.faults.excluded and all(engine.state is EngineState.RETIRED for engine in retired):
        problem = await failure_of(leave)
        if problem is None and fleet.is_awake:
            warn(f"the engines of node {node} start on a spare node")
            for engine in retired:
                supervisor.add(engine.index)
            return
        if problem is not None and problem != told:
            warn(f"the engines of node {node} stay out for now: {problem}")
            told = problem
        await asyncio.sleep(_RETRY_S if problem else _POLL_S)


def _left_with_ranks(nodes: Mapping[NodeBundle, str]) -> None:
    """Raise MachineError while a bundle of a shared pool is still on its node."""
    if any(bundle.node == node for bundle, node in nodes.items()):
        raise MachineError("they leave the node with the ranks of their pool, when these start again")
