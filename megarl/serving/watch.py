"""All that watches the engines of a run and repairs them: what happened to one is one `report` to the fleet.

`supervisor` notices deaths and silence, `stragglers` slow engines, `nodes` faulty and lost nodes; `operator` lets a
person retire and add engines.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from megarl.cluster.cluster import Pool
from megarl.config.recipe import ClusterConfig
from megarl.engine.client import EngineClient
from megarl.engine.fleet import Fleet
from megarl.observe.observer import Observer
from megarl.serving.nodes import EngineNodes, following_nodes, moving_engines
from megarl.serving.operator import Growth, open_to_operator
from megarl.serving.processes import Engines
from megarl.serving.stragglers import EngineWatch
from megarl.serving.supervisor import Supervisor


@asynccontextmanager
async def watched_engines(
    run_folder: Path,
    fleet: Fleet,
    engines: Engines,
    pool: Pool,
    *,
    cluster: ClusterConfig,
    observer: Observer,
    request_timeout_s: float,
) -> AsyncIterator[Supervisor]:
    """Watch the engines inside the block; yield their supervisor."""
    connect = partial(EngineClient, request_timeout_s=request_timeout_s)
    supervisor = Supervisor(fleet, engines, connect=connect, may_start=engines.has_nodes)
    slow = EngineWatch(fleet, cluster.stragglers, observer, drain=supervisor.drain)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(supervisor.running())
        move = await stack.enter_async_context(moving_engines(pool, fleet, engines, supervisor, warn=observer.warned))
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
