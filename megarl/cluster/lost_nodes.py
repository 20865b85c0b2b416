"""Nodes that a run loses: Ray moves their devices of a pool to other nodes, and the run waits for that.

Nodes of the Ray cluster that no job uses are spare. Devices of a pool also move there from a node that is excluded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager

from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from megarl.cluster.cluster import (
    RAY_FAILURES,
    NodeBundle,
    NodeFaults,
    Pool,
    address_of,
    devices_of,
    find_gpus,
    free_devices,
    live_nodes,
    name_nodes,
)
from megarl.cluster.tasks import beside
from megarl.cluster.worker_group import LostRanksError
from megarl.errors import MachineError, WorkerError, first_line
from megarl.observe.observer import Observer

_POLL_S = 1.0
_FOLLOW_S = 2.0
_PLACE_S = 10.0
_NODE_FRACTION = 0.001
"""A bundle that asks for this much of the resource that Ray gives a node under its address is placed there."""


async def wait_for_nodes(pools: Mapping[str, Pool], *, timeout_s: float, waiting: Callable[[str], None]) -> None:
    """Wait until every pool has all its nodes again; `waiting` is called once per pool that lost one.

    Raise MachineError where no other node takes the place of a lost one in time.
    """
    deadline = time.monotonic() + timeout_s
    for name, pool in pools.items():
        is_reported = False
        while lack := await asyncio.to_thread(_lack, pool):
            if time.monotonic() > deadline:
                raise MachineError(
                    f"pools.{name}: {lack}, and no other within {timeout_s:.0f} s (cluster.node_timeout_s); "
                    "add a node and run the same command: the run resumes from its newest checkpoint"
                )
            if not is_reported:
                is_reported = True
                waiting(f"pools.{name}: {lack}; waiting up to {timeout_s:.0f} s for another (cluster.node_timeout_s)")
            await asyncio.sleep(_POLL_S)


def _lack(pool: Pool) -> str:
    """Return what a pool lacks; empty if it has all its nodes."""
    try:
        lost = _lost(pool)
    except RAY_FAILURES as error:
        return f"Ray does not tell its nodes ({first_line(error)})"
    return f"{name_nodes(len(lost), lost[0].size)} lost" if lost else ""


@asynccontextmanager
async def followed(
    pool: Pool, *, moved: Callable[[NodeBundle], Awaitable[None]], warn: Callable[[str], None]
) -> AsyncIterator[None]:
    """Note inside the block when nodes of a pool are lost; `moved` is called with the devices that have another one.

    A node that comes back, or a spare one, is another one to Ray.
    """
    nodes = {bundle: bundle.node for bundle in pool.bundles}
    reported: set[NodeBundle] = set()

    async def follow() -> None:
        problem = None
        while True:
            await asyncio.sleep(_FOLLOW_S)
            before, problem = problem, await failure_of(lambda: _lost(pool))
            if problem is not None and problem != before:
                warn(f"nodes of engines cannot be followed: {problem}; tried again every {_FOLLOW_S:g} s")
            for bundle in pool.bundles:
                if bundle.is_lost and bundle not in reported:
                    reported.add(bundle)
                    warn(f"{name_nodes(1, bundle.size)} is lost; its engines start again on the next that is free")
                elif not bundle.is_lost and bundle.node != nodes.setdefault(bundle, bundle.node):
                    nodes[bundle] = bundle.node
                    reported.discard(bundle)
                    await moved(bundle)

    async with beside(follow):
        yield


async def failure_of(ask: Callable[[], object]) -> str | None:
    """Call a function that asks Ray, in a thread; return the reason of a failure, after which it is called again."""
    try:
        await asyncio.to_thread(ask)
    except (MachineError, *RAY_FAILURES) as error:
        return first_line(error)
    return None


def _lost(pool: Pool) -> list[NodeBundle]:
    """Return the bundles without a living node, after noting the new node of those that were moved."""
    return [bundle for bundle in _without_node(pool.bundles) if not (bundle.is_bound and move_to_spare(pool, bundle))]


def _without_node(bundles: Sequence[NodeBundle]) -> list[NodeBundle]:
    # Bundles that were moved off an excluded node have groups of their own.
    groups = {bundle.group.id: bundle.group for bundle in bundles}
    places = {key: placement_group_table(group).get("bundles_to_node_id", {}) for key, group in groups.items()}
    alive = {str(node["NodeID"]): node for node in live_nodes()}
    lost, refused = [], ""
    for bundle in bundles:
        node = places[bundle.group.id].get(bundle.index) or bundle.node
        bundle.is_lost = node not in alive
        if bundle.is_lost:
            lost.append(bundle)
        elif node != bundle.node:
            if bundle.gpus and devices_of(alive[node], bundle.resource) != bundle.size:
                # Ray tells the numbers only to a task that holds the GPUs, and an engine may already hold some.
                bundle.is_lost = True
                refused = (
                    f"a lost node was replaced by {alive[node]['NodeManagerAddress']}, which has more GPUs than the "
                    "pool takes of a node, and which of them are free is not known; run the same command to resume"
                )
                continue
            bundle.node = node
    if refused:
        raise MachineError(refused)
    return lost


def move_to_spare(pool: Pool, bundle: NodeBundle) -> bool:
    """Give a bundle of a pool the same number of devices on a spare node; return False if there is none.

    Nothing may run in it. Its devices on the node before stay reserved, so that no one else starts there.
    """
    used = {other.node for other in pool.bundles}
    free = free_devices(bundle.resource)
    for node in live_nodes():
        key, address = str(node["NodeID"]), str(node["NodeManagerAddress"])
        if key in used or address in pool.faults.excluded or free.get(key, 0) < bundle.size:
            continue
        there = reserve_on(address, resource=bundle.resource, size=bundle.size)
        if there is None:
            continue  # another job was faster
        if bundle.is_bound and bundle.is_lost:
            remove_placement_group(bundle.group)
        bundle.group = there.group
        bundle.index = 0
        bundle.gpus = there.gpus
        bundle.node = key
        bundle.is_bound = True
        bundle.is_lost = False
        return True
    return False


def leave_for_spares(pool: Pool, bundles: list[NodeBundle]) -> None:
    """Move all bundles to spare nodes and take each out of the list; raise MachineError when there is none for one."""
    while bundles:
        if not move_to_spare(pool, bundles[0]):
            raise MachineError("no spare node is free")
        bundles.pop(0)


def reserve_on(address: str, *, resource: str, size: int) -> NodeBundle | None:
    """Reserve devices of one node; return None if they are not free."""
    group = placement_group([{resource: float(size), f"node:{address}": _NODE_FRACTION}])
    bundle = NodeBundle(group, 0, resource=resource, size=size)
    is_placed = False
    try:
        is_placed = group.wait(_PLACE_S)
        if is_placed and resource == "GPU":
            find_gpus([bundle])
    except BaseException:
        remove_placement_group(group)
        raise
    if not is_placed:
        remove_placement_group(group)
        return None
    return bundle


class RankNodes:
    """Counts deaths and hangs of trainer ranks by node, and moves ranks off a node that had too many."""

    def __init__(self, pools: Mapping[str, Pool], *, max_faults: int, observer: Observer) -> None:
        """`pools` are those that ranks use; engines beside them follow."""
        self._pools = pools
        self._max_faults = max_faults
        self._observer = observer
        self._without_spare: set[str] = set()
        """Excluded nodes that were said to have no spare one."""

    def note(self, error: WorkerError, pool_of: Mapping[str, str]) -> None:
        """Count the loss of ranks for their nodes, and exclude a node that had too many."""
        lost = _cause(error)
        if lost is None or (pool := self._pools.get(pool_of.get(lost.role, ""))) is None:
            return
        with self._tolerating_ray():
            for address in sorted({address_of(pool.places[rank].node) for rank in lost.ranks}):
                self._count(address, pool.faults, error)

    def _count(self, address: str, faults: NodeFaults, error: WorkerError) -> None:
        if (num_faults := faults.count(address)) >= self._max_faults and address not in faults.excluded:
            faults.exclude(address)
            self._observer.nodes_excluded(len(faults.excluded))
            reason = f"{num_faults} faults within an hour (cluster.max_node_faults), the last: {error}"
            self._observer.warned(f"node {address} is excluded after {reason}")

    def leave_excluded(self) -> None:
        """Move ranks from excluded nodes to spare ones. No rank may run, and every pool has its nodes."""
        for name, pool in self._pools.items():
            for bundle in pool.bundles:
                with self._tolerating_ray():
                    self._leave(name, pool, bundle)

    def _leave(self, name: str, pool: Pool, bundle: NodeBundle) -> None:
        if (address := address_of(bundle.node)) not in pool.faults.excluded:
            return
        beginning = f"pools.{name}: node {address} is excluded; its ranks"
        if move_to_spare(pool, bundle):
            self._observer.warned(f"{beginning} start on {address_of(bundle.node)}")
        elif address not in self._without_spare:
            self._without_spare.add(address)
            self._observer.warned(f"{beginning} stay there: no spare node is free")

    @contextmanager
    def _tolerating_ray(self) -> Iterator[None]:
        try:
            yield
        except RAY_FAILURES as error:
            self._observer.warned(f"excluded nodes are not left now: {first_line(error)}; tried at the next restart")


def _cause(error: BaseException | None) -> LostRanksError | None:
    """Return the loss of ranks that led to an error, such as that of a publish."""
    while error is not None and not isinstance(error, LostRanksError):
        error = error.__cause__
    return error
