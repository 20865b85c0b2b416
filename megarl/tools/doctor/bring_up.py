"""`megarl doctor --cluster`: a cluster from its single GPUs to its slowest link, in stages, before a run pays for it.

Each stage has a threshold that follows from the plan, and a remedy. Import this module inside `ray_environment`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.cluster.cluster import Place, accelerators, address_of, live_nodes, open_cluster
from megarl.cluster.worker_group import WorkerGroup
from megarl.config.recipe import Recipe
from megarl.config.section import GIB, MIB
from megarl.env import trainer_environment
from megarl.errors import MachineError, MegarlError, WorkerError
from megarl.planner.hardware import gpu_of
from megarl.tools.doctor import Check, CheckStatus
from megarl.tools.doctor.cluster import check_nodes, connect_error, describe, own_folder, try_nodes
from megarl.tools.doctor.machine import examine_node
from megarl.tools.doctor.probe import GROUP_TIMEOUT_S, ProbePeer, ReduceReport
from megarl.tools.doctor.rates import (
    AREA,
    PlannedRates,
    bus_rate,
    check_network,
    check_rates,
    check_stragglers,
    merge_nodes,
    neighbours,
)
from megarl.tools.doctor.storage import check_storage, read_file, write_file

Result = TypeVar("Result")

_TASK_TIMEOUT_S = 300.0
_SLOW_NETWORK = (
    "too slow for the plan: NCCL's lines in the log of a rank name the adapters in use; cables, rails, NCCL_IB_HCA"
)
_SLOW_NODE = "too slow for the plan: `nvidia-smi topo -m` and `nvidia-smi nvlink -s` on that node, fabric manager"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSizes:
    """Sizes of what is moved; small on CPUs, which show only that everything works."""

    reduced_bytes: int = GIB
    file_bytes: int = 2 * GIB
    tested_bytes: int | None = None
    """Device memory that is tested; None: nearly all that is free."""

    @classmethod
    def on(cls, device: str) -> ProbeSizes:
        return cls() if device == "cuda" else cls(reduced_bytes=4 * MIB, file_bytes=16 * MIB, tested_bytes=16 * MIB)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    name: str
    what: str
    run: Callable[[], Coroutine[None, None, list[Check]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Peer:
    node: str
    gpu: str
    """Its name in the report."""
    handle: ActorHandle


@dataclass(slots=True, kw_only=True)
class BringUp:
    """The processes and nodes of a cluster under test."""

    recipe: Recipe
    sizes: ProbeSizes
    rates: PlannedRates
    pools: Mapping[str, Sequence[Place]]
    peers: dict[str, list[_Peer]] = field(default_factory=dict)
    """By pool."""
    ways: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By node: the networks that NCCL used there."""

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (
            Stage(name="nodes", what="versions, files, clocks and addresses of every node", run=self._nodes),
            Stage(name="machines", what="GPUs, limits, RDMA and locked memory of every node", run=self._machines),
            Stage(name="devices", what="memory and products of every GPU", run=self._devices),
            Stage(name="node links", what="an all-reduce inside every node", run=self._inside),
            Stage(name="node pairs", what="an all-reduce of every node with its neighbours", run=self._pairs),
            Stage(name="all nodes", what="an all-reduce of every pool and of all", run=self._all),
            Stage(name="network", what="which network NCCL used between nodes", run=self._network),
            Stage(name="storage", what="every node writes and reads the run's folder", run=self._storage),
        )

    @property
    def by_node(self) -> dict[str, list[_Peer]]:
        nodes: dict[str, list[_Peer]] = {}
        for peers in self.peers.values():
            for peer in peers:
                nodes.setdefault(peer.node, []).append(peer)
        return nodes

    def run(self, chosen: Sequence[str], say: Callable[[str], None]) -> Iterator[Check]:
        self._start()
        try:
            for stage in self.stages:
                if not chosen or stage.name in chosen:
                    yield from _run(stage, say)
        finally:
            self._end()

    def _start(self) -> None:
        """Start a process on every device."""
        remote, environment = ray.remote(ProbePeer), trainer_environment(self.recipe.run.device)
        for pool, places in self.pools.items():
            self.peers[pool] = [
                _Peer(
                    node=(node := address_of(place.node)),
                    gpu=f"{node} {pool} slot {place.slot}" if place.gpu is None else f"{node} GPU {place.gpu}",
                    handle=remote.options(**place.options(environment, gpu_fraction=1.0)).remote(
                        self.recipe.network.bind, self.recipe.run.device
                    ),
                )
                for place in places
            ]

    def _end(self) -> None:
        for peers in self.peers.values():
            for peer in peers:
                ray.kill(peer.handle)

    async def _nodes(self) -> list[Check]:
        answers = await asyncio.to_thread(try_nodes, describe(self.recipe))
        checks = [*check_nodes(answers)]
        addresses: dict[str, str] = {}
        for node, peers in self.by_node.items():
            addresses[node] = (await _group(peers[:1]).call(ProbePeer.find_address))[0][0]
        found = f"{', '.join(dict.fromkeys(addresses.values()))}"
        name = "addresses"
        return [*checks, Check(area=AREA, name=name, found=found, status=CheckStatus.OK)]

    async def _machines(self) -> list[Check]:
        needed = {node: len(peers) for node, peers in self.by_node.items()}
        gpu = None if self.rates.gpu is None else self.rates.gpu.name
        calls = {node: partial(examine_node, needed=number, kind=gpu) for node, number in needed.items()}
        if self.rates.gpu is None:
            calls = {node: partial(examine_node, needed=0, kind=None) for node in needed}
        return merge_nodes(await asyncio.to_thread(_on_nodes, calls))

    async def _devices(self) -> list[Check]:
        peers = [peer for each in self.peers.values() for peer in each]
        reports = await _group(peers).call(ProbePeer.test_device, self.sizes.tested_bytes)
        of = dict(zip((peer.gpu for peer in peers), reports, strict=True))
        wrong = [gpu for gpu, report in of.items() if report.num_wrong]
        tested = min(report.tested_bytes for report in reports) / GIB
        found = f"wrong words on {', '.join(wrong)}" if wrong else f"{tested:.3g} GiB of each kept all bits"
        remedy = "take the node out: `nvidia-smi -q -d ECC,ROW_REMAPPER`, reset or replace the GPU"
        checks = [Check.of(AREA, "memory test", found, is_ok=not wrong, remedy=remedy)]
        slow = "below what the plan counts on: clocks, power limit, another process on the GPU"
        speeds = {gpu: report.gb_per_s for gpu, report in of.items()}
        products = {gpu: report.tflops for gpu, report in of.items()}
        checks.append(check_rates("memory rate", speeds, self.rates.memory, unit="GB/s", remedy=slow))
        checks.append(check_rates("products", products, self.rates.products, unit="TFLOP/s", remedy=slow))
        if self.rates.gpu is not None:
            for name, each, unit in (("memory rate", speeds, "GB/s"), ("products", products, "TFLOP/s")):
                if (straggler := check_stragglers(f"slowest, {name}", each, unit=unit)) is not None:
                    checks.append(straggler)
        return checks

    async def _inside(self) -> list[Check]:
        groups = {node: peers for node, peers in self.by_node.items() if len(peers) > 1}
        if not groups:
            return [_left_out("all-reduce, inside a node", "every node has one GPU in the pools")]
        planned = self.rates.reduce(num_nodes=1, gpus_per_node=1)
        return await self._reduce("all-reduce, inside a node", [groups], planned, remedy=_SLOW_NODE)

    async def _pairs(self) -> list[Check]:
        nodes = self.by_node
        rounds = neighbours(list(nodes))
        if not rounds:
            return [_left_out("all-reduce, pairs of nodes", "the pools are on one node")]
        groups = [{f"{a} - {b}": nodes[a] + nodes[b] for a, b in pairs} for pairs in rounds]
        planned = self.rates.reduce(num_nodes=2, gpus_per_node=min(len(peers) for peers in nodes.values()))
        return await self._reduce("all-reduce, pairs of nodes", groups, planned, remedy=_SLOW_NETWORK)

    async def _all(self) -> list[Check]:
        groups = {f"pool {name}": peers for name, peers in self.peers.items() if len(peers) > 1}
        if len(self.peers) > 1:
            groups["all pools"] = [peer for peers in self.peers.values() for peer in peers]
        if not groups:
            return [_left_out("all-reduce, all", "there is one GPU")]
        checks = []
        for name, peers in groups.items():
            nodes: dict[str, int] = {}
            for peer in peers:
                nodes[peer.node] = nodes.get(peer.node, 0) + 1
            planned = self.rates.reduce(num_nodes=len(nodes), gpus_per_node=min(nodes.values()))
            checks += await self._reduce(f"all-reduce, {name}", [{name: peers}], planned, remedy=_SLOW_NETWORK)
        return checks

    async def _reduce(
        self, name: str, rounds: Sequence[Mapping[str, Sequence[_Peer]]], planned: float | None, *, remedy: str
    ) -> list[Check]:
        """Reduce in the groups of each round at once; a group that fails is named, and the others are judged."""
        checks: list[Check] = []
        rates: dict[str, float] = {}
        for groups in rounds:
            results = await asyncio.gather(*(self._reduce_group(peers) for peers in groups.values()))
            for (group, peers), result in zip(groups.items(), results, strict=True):
                if isinstance(result, float):
                    rates[group] = bus_rate(len(peers), self.sizes.reduced_bytes, result)
                    continue
                text = f"{result}; open the nodes' ports to each other, or name their network in network.bind"
                checks.append(
                    Check(area=AREA, name=name, found=f"{group} fails", status=CheckStatus.ERROR, remedy=text)
                )
        if rates:
            checks.append(check_rates(name, rates, planned, unit="GB/s", remedy=remedy))
        return checks

    async def _reduce_group(self, peers: Sequence[_Peer]) -> float | str:
        """Return the seconds of the slowest rank, or why there are none."""
        try:
            address = (await _group(peers[:1]).call(ProbePeer.find_address))[0]
            group: WorkerGroup[ProbePeer] = WorkerGroup(
                "probe", [peer.handle for peer in peers], timeout_s=GROUP_TIMEOUT_S + 30
            )
            started = [
                peer.handle.reduce.remote(rank, len(peers), address, self.sizes.reduced_bytes)
                for rank, peer in enumerate(peers)
            ]
            reports: list[ReduceReport] = await group.gather("reduce", started)
        except MegarlError as error:
            return str(error)
        for peer, report in zip(peers, reports, strict=True):
            self.ways[peer.node] = tuple(sorted({*self.ways.get(peer.node, ()), *report.ways}))
        return max(report.seconds for report in reports)

    async def _network(self) -> list[Check]:
        adapters = await asyncio.to_thread(_on_nodes, dict.fromkeys(self.by_node, _num_adapters))
        return [check_network(self.ways, num_adapters=adapters, is_gpu=self.rates.gpu is not None)]

    async def _storage(self) -> list[Check]:
        folder, size = self.recipe.run_folder.absolute() / "doctor", self.sizes.file_bytes
        nodes = list(self.by_node)
        paths = [folder / f"probe_{number}" for number in range(len(nodes))]
        try:
            writes = {node: partial(write_file, paths[number], size, number) for number, node in enumerate(nodes)}
            written = await asyncio.to_thread(_on_nodes, writes)
            reads = {}
            for number, node in enumerate(nodes):
                other = (number + 1) % len(nodes)
                reads[node] = partial(read_file, paths[other], size, other)
            read = await asyncio.to_thread(partial(_on_nodes, reads, may_fail=True))
        finally:
            for path in paths:
                path.unlink(missing_ok=True)
        planned = None if self.rates.gpu is None else self.recipe.cluster.file_system_gb_per_s
        return check_storage(folder, written, read, num_bytes=size, planned=planned)


def bring_up(
    recipe: Recipe, *, address: str | None, chosen: Sequence[str], say: Callable[[str], None]
) -> Iterator[Check]:
    """Run the stages, those in `chosen` if it names some; an error of one does not keep the others from running."""
    if address is not None and (error := connect_error(address)):
        remedy = f"{error}; name the host and port that `ray start --head` printed"
        yield Check(area=AREA, name="ray", found=f"no answer from {address}", status=CheckStatus.ERROR, remedy=remedy)
        return
    own, device = own_folder(recipe, starts_ray=address is None), recipe.run.device
    try:
        with open_cluster(own.run, recipe.pools, address=address) as cluster:
            gpu = gpu_of(recipe.cluster, accelerators()) if device == "cuda" else None
            tested = BringUp(
                recipe=recipe,
                sizes=ProbeSizes.on(device),
                rates=PlannedRates(gpu=gpu),
                pools=cluster.reserve(recipe.pools),
            )
            say(f"starting a process on each of {sum(map(len, tested.pools.values()))} devices")
            yield from tested.run(chosen, say)
    except MachineError as failure:
        yield Check(area=AREA, name="ray", found="unusable", status=CheckStatus.ERROR, remedy=str(failure))


def _run(stage: Stage, say: Callable[[str], None]) -> list[Check]:
    say(f"{stage.name}: {stage.what}")
    began = time.monotonic()
    try:
        checks = asyncio.run(stage.run())
    except (MegarlError, ray.exceptions.RayError, OSError) as error:
        text = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        checks = [Check(area=AREA, name=stage.name, found="did not end", status=CheckStatus.ERROR, remedy=text)]
    worst = [check for check in checks if check.status in (CheckStatus.ERROR, CheckStatus.WARNING)]
    said = "; ".join(f"{check.status}: {check.name}: {check.found}" for check in worst) or "ok"
    say(f"{stage.name}: {said} ({time.monotonic() - began:.1f} s)")
    return checks


def _left_out(name: str, why: str) -> Check:
    return Check(area=AREA, name=name, found=f"not tried: {why}", status=CheckStatus.NOTE)


def _group(peers: Sequence[_Peer]) -> WorkerGroup[ProbePeer]:
    return WorkerGroup("probe", [peer.handle for peer in peers], timeout_s=_TASK_TIMEOUT_S)


def _num_adapters() -> int:
    return len(list(Path("/sys/class/infiniband").glob("*")))


def _call(function: Callable[[], Result]) -> Result:
    return function()


def _on_nodes(calls: Mapping[str, Callable[[], Result]], *, may_fail: bool = False) -> dict[str, Result]:
    """Run a function on each node, all at once; with `may_fail` nodes where it fails are left out."""
    ids = {str(node["NodeManagerAddress"]): str(node["NodeID"]) for node in live_nodes()}
    started = {
        node: ray.remote(_call)
        .options(num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(ids[node], soft=False))
        .remote(call)
        for node, call in calls.items()
    }
    results: dict[str, Result] = {}
    for node, reference in started.items():
        try:
            results[node] = ray.get(reference, timeout=_TASK_TIMEOUT_S)
        except ray.exceptions.RayError as error:
            if not may_fail:
                raise WorkerError(f"{node}: {str(error).strip().splitlines()[-1]}") from error
    return results
