"""Nodes that a run loses: Ray moves their devices of a pool to other nodes, and the run waits for that.

Nodes of the Ray cluster that no one uses are spare. Devices of a pool also move there from a node that is excluded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from ray._private.state import available_resources_per_node
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from megarl.errors import MachineError, WorkerError
from megarl.observe.observer import Observer
from megarl.runtime.cluster import NodeBundle, Pool, address_of, devices_of, find_gpus, live_nodes, name_nodes
from megarl.runtime.trainers.worker_group import WorkerDiedError

_POLL_S = 1.0
_FOLLOW_S = 2.0
_PLACE_S = 10.0
_NODE_SHARE = 0.001
"""A bundle that asks for this much of the resource that Ray gives a node under its address is placed there."""


async def settle(pools: Mapping[str, Pool], *, timeout_s: float, waiting: Callable[[str], None]) -> None:
    """Wait until every pool has all its nodes again; `waiting` is told once per pool that lost one.

    Raise MachineError where no other node takes the place of a lost one in time.
    """
    deadline = time.monotonic() + timeout_s
    for name, pool in pools.items():
        is_told = False
        while lost := await asyncio.to_thread(_lost, pool):
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
    pool: Pool, *, moved: Callable[[NodeBundle], None], warn: Callable[[str], None]
) -> AsyncIterator[None]:
    """Note inside the block when nodes of a pool are lost; `moved` is told the devices that have another one.

    A node that comes back, or a spare one, is another one to Ray.
    """
    bundles = pool.bundles

    async def follow() -> None:
        nodes = {bundle: bundle.node for bundle in bundles}
        told: set[NodeBundle] = set()
        while True:
            await asyncio.sleep(_FOLLOW_S)
            try:
                lost = await asyncio.to_thread(_lost, pool)
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


def _lost(pool: Pool) -> list[NodeBundle]:
    """Return the bundles without a living node, after noting the new node of those that were moved."""
    return [bundle for bundle in _without_node(pool.bundles) if not (bundle.is_bound and move_to_spare(pool, bundle))]


def _without_node(bundles: Sequence[NodeBundle]) -> list[NodeBundle]:
    # Bundles that were moved off an excluded node have groups of their own.
    groups = {bundle.group.id: bundle.group for bundle in bundles}
    places = {key: placement_group_table(group)["bundles_to_node_id"] for key, group in groups.items()}
    alive = {str(node["NodeID"]): node for node in live_nodes()}
    lost = []
    for bundle in bundles:
        node = places[bundle.group.id].get(bundle.index) or bundle.node
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


def move_to_spare(pool: Pool, bundle: NodeBundle) -> bool:
    """Give a bundle of a pool the same number of devices on a spare node; return False if there is none.

    Nothing may run in it. Its devices on the node before stay reserved, so that no one else starts there.
    """
    used = {other.node for other in pool.bundles}
    free = available_resources_per_node()
    for node in live_nodes():
        key, address = str(node["NodeID"]), str(node["NodeManagerAddress"])
        if key in used or address in pool.faults.excluded or free.get(key, {}).get(bundle.resource, 0) < bundle.size:
            continue
        group = placement_group([{bundle.resource: float(bundle.size), f"node:{address}": _NODE_SHARE}])
        if not group.wait(_PLACE_S):
            remove_placement_group(group)  # another job was faster
            continue
        if bundle.is_bound and bundle.is_lost:
            remove_placement_group(bundle.group)
        bundle.group, bundle.index, bundle.node, bundle.is_bound, bundle.is_lost = group, 0, key, True, False
        if bundle.gpus:
            find_gpus([bundle])
        return True
    return False


class RankNodes:
    """Counts the deaths of trainer ranks by node, and moves ranks off a node that had too many."""

    def __init__(self, pools: Mapping[str, Pool], *, max_faults: int, observer: Observer) -> None:
        """`pools` are those that only ranks use."""
        self._pools = pools
        self._max_faults = max_faults
        self._observer = observer

    def note(self, error: WorkerError, pool_of: Mapping[str, str]) -> None:
        """Count the death of a rank for its node, and exclude a node that had too many."""
        if not isinstance(error, WorkerDiedError) or (pool := self._pools.get(pool_of.get(error.role, ""))) is None:
            return
        address, faults = address_of(pool.places[error.rank].node), pool.faults
        if (num_faults := faults.count(address)) >= self._max_faults and address not in faults.excluded:
            faults.excluded.add(address)
            self._observer.nodes_excluded(len(faults.excluded))
            reason = f"{num_faults} faults within an hour (cluster.max_node_faults), the last: {error}"
            self._observer.warned(f"node {address} is excluded after {reason}")

    def leave_excluded(self) -> None:
        """Move ranks from excluded nodes to spare ones. No rank may run, and every pool has its nodes."""
        for name, pool in self._pools.items():
            for bundle in pool.bundles:
                if (address := address_of(bundle.node)) in pool.faults.excluded:
                    has_moved = move_to_spare(pool, bundle)
                    there = f"start on {address_of(bundle.node)}" if has_moved else "stay there: no spare node is free"
                    self._observer.warned(f"pools.{name}: node {address} is excluded; its ranks {there}")
