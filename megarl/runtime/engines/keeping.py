"""All that keeps the engines of a run: their supervisor, the operator, and what watches their pace and their nodes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from megarl.config.cluster import ClusterConfig
from megarl.observe.observer import Observer
from megarl.rollout.client import EngineClient
from megarl.rollout.fleet import Fleet
from megarl.rollout.lifecycle import Relocated
from megarl.runtime.cluster import NodeBundle, Place
from megarl.runtime.engines.nodes import EngineNodes
from megarl.runtime.engines.operator import open_to_operator
from megarl.runtime.engines.processes import Engines
from megarl.runtime.engines.supervisor import Supervisor
from megarl.runtime.lost_nodes import followed
from megarl.runtime.stragglers import EngineWatch


@asynccontextmanager
async def kept_engines(
    run_folder: Path,
    fleet: Fleet,
    engines: Engines,
    places: Sequence[Place],
    *,
    cluster: ClusterConfig,
    observer: Observer,
    request_timeout_s: float,
) -> AsyncIterator[Supervisor]:
    """Keep the engines inside the block; yield their supervisor."""
    connect = partial(EngineClient, request_timeout_s=request_timeout_s)
    supervisor = Supervisor(fleet, engines, connect=connect, may_start=engines.has_nodes)
    nodes = EngineNodes(fleet, supervisor, max_faults=cluster.max_node_faults, observer=observer)
    slow = EngineWatch(fleet, cluster.stragglers, observer, drain=supervisor.drain)

    def start_there(bundle: NodeBundle) -> None:
        for engine in fleet.engines:
            if bundle in engines.bundles_of(engine.index):
                fleet.report(engine, Relocated())

    async with AsyncExitStack() as stack:
        await stack.enter_async_context(supervisor.running())
        await stack.enter_async_context(open_to_operator(run_folder, fleet, supervisor, nodes))
        await stack.enter_async_context(slow.running())
        await stack.enter_async_context(followed(places, moved=start_there, warn=observer.warned))
        yield supervisor
