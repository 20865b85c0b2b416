"""Nodes that a run loses: Ray moves their devices of a pool to other nodes, and the run waits for that."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from ray.util.placement_group import placement_group_table

from megarl.errors import MachineError
from megarl.runtime.cluster import NodeBundle, Place, Pool, devices_of, live_nodes, name_nodes

_POLL_S = 1.0
_FOLLOW_S = 2.0


async def settle(pools: Mapping[str, Pool], *, timeout_s: float, waiting: Callable[[str], None]) -> None:
    """Wait until every pool has all its nodes again; `waiting` is told once per pool that lost one.

    Raise MachineError where no other node takes the place of a lost one in time.
    """
    deadline = time.monotonic() + timeout_s
    for name, pool in pools.items():
        bundles = list({id(place.bundle): place.bundle for place in pool.places}.values())
        is_told = False
        while lost := await asyncio.to_thread(_lost, bundles):
            sizes = name_nodes(len(lost), lost[0].size)
            if time.monotonic() > deadline:
                raise MachineError(
                    f"pools.{name}: {sizes} lost, and no other within {timeout_s:.0f} s (cluster.node_timeout_s); "
                    "add a node and run the same command: the run resumes from its newest checkpoint"
                )
            if not is_told:
                is_told = True
                waiting(
                    f"pools.{name}: {sizes} lost; waiting up to {timeout_s:.0f} s for another (cluster.node_timeout_s)"
                )
            await asyncio.sleep(_POLL_S)


@asynccontextmanager
async def followed(
    places: Sequence[Place], *, moved: Callable[[NodeBundle], None], warn: Callable[[str], None]
) -> AsyncIterator[None]:
    """Note inside the block when nodes of these places are lost; `moved` is told the devices that have another one.

    A node that comes back, or a spare one, is another one to Ray.
    """
    bundles = list({id(place.bundle): place.bundle for place in places}.values())

    async def follow() -> None:
        nodes = {bundle: bundle.node for bundle in bundles}
        told: set[NodeBundle] = set()
        while True:
            await asyncio.sleep(_FOLLOW_S)
            try:
                lost = await asyncio.to_thread(_lost, bundles)
            except MachineError as error:
                warn(str(error))
                return
            for bundle in bundles:
                if bundle in lost and bundle not in told:
                    warn(
                        f"a node with {bundle.size} device(s) is lost; its engines start again on the next that is free"
                    )
                    told.add(bundle)
                elif bundle not in lost and bundle.node != nodes[bundle]:
                    nodes[bundle] = bundle.node
                    told.discard(bundle)
                    moved(bundle)

    task = asyncio.create_task(follow())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def _lost(bundles: Sequence[NodeBundle]) -> list[NodeBundle]:
    """Return the bundles without a living node, after noting the new node of those that were moved."""
    places = placement_group_table(bundles[0].group)["bundles_to_node_id"]
    alive = {str(node["NodeID"]): node for node in live_nodes()}
    lost = []
    for bundle in bundles:
        node = places.get(bundle.index) or bundle.node
        bundle.is_lost = node not in alive
        if bundle.is_lost:
            lost.append(bundle)
        elif node != bundle.node:
            if bundle.gpus and devices_of(alive[node], bundle.resource) != bundle.size:
                # Ray tells the numbers only to a task that holds the GPUs, and an engine may already hold some.
                bundle.is_lost = True
                raise MachineError(
                    f"a lost node was replaced by {alive[node]['NodeManagerAddress']}, which has more GPUs than the "
                    "pool takes of a node, and which of them are free is not known; run the same command to resume"
                )
            bundle.node = node
    return lost
