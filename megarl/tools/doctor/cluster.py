"""Checks of a Ray cluster: equal versions, readable files and clocks on every node, and an all-reduce in every pool.

Import this module inside `ray_environment`.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import cast

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.cluster.cluster import Place, open_cluster, own_address
from megarl.cluster.worker_group import WorkerGroup
from megarl.config.recipe import Recipe
from megarl.config.roles import RolesConfig
from megarl.env import GLOO_INTERFACE, trainer_environment
from megarl.errors import MachineError, MegarlError
from megarl.system.network import interface_of
from megarl.tools.doctor import Check, CheckStatus
from megarl.tools.doctor.packages import local_versions

_MAX_SKEW_S = 2.0
_CONNECT_TIMEOUT_S = 10.0
_NODE_TIMEOUT_S = 60.0
_REDUCE_TIMEOUT_S = 120.0
_REDUCED_BYTES = 4 << 20
_NUM_TRIES = 5
_FOLDER = "doctor"
"""Inside the folder of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """The versions, files and clock of one node."""

    versions: Mapping[str, str]
    missing_files: tuple[str, ...]
    """Files that a process there must read and cannot."""
    can_write: bool
    """Into the folder of the run."""
    clock_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAnswer:
    """The report of one node, or why there is none; the times are by our clock."""

    node: str
    report: NodeReport | None
    asked_at: float
    answered_at: float
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """An all-reduce among the processes of a pool, connected as trainer ranks are."""

    name: str
    num_ranks: int
    backend: str
    bytes_per_second: float
    """Size of the reduced tensor over the time of the fastest try."""
    error: str = ""


def check_cluster(recipe: Recipe, *, address: str | None) -> Iterator[Check]:
    """Return the checks of the Ray at `address`, or of one that is started here."""
    if address is not None and (error := _connect_error(address)):
        remedy = f"{error}; name the host and port that `ray start --head` printed"
        yield _error("ray", f"no answer from {address}", remedy)
        return
    describe = partial(describe_node, _files(recipe.model.path, recipe.roles), recipe.run_folder.absolute())
    # A Ray that is started here logs in a folder of its own, not over the log of the run.
    run = recipe.run.model_copy(update={"folder": recipe.run_folder, "name": _FOLDER})
    recipe = recipe.model_copy(update={"run": run})
    if address is None:
        recipe.run_folder.mkdir(parents=True, exist_ok=True)
    try:
        with open_cluster(recipe.run, recipe.pools, address=address) as cluster:
            nodes = [_ask_node(node, describe) for node in ray.nodes() if node["Alive"]]
            pools = cluster.reserve(recipe.pools)
            groups = asyncio.run(_try_groups(pools, device=recipe.run.device, bind=recipe.network.bind))
    except MachineError as failure:
        yield _error("ray", "unusable", str(failure))
        return
    yield from check_nodes(nodes)
    for group in groups:
        yield check_group(group)


def _connect_error(address: str) -> str:
    """Return why a connection fails, else an empty text. Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return ""
    try:
        with socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _files(model: Path, roles: RolesConfig) -> tuple[Path, ...]:
    """Return the files that ranks and engines open on their nodes; data is read where megarl is started."""
    folders = [model]
    folders += [role.path for role in (roles.critic, roles.reference) if role is not None and role.path is not None]
    folders += [*(role.model for role in roles.frozen.values()), *(role.model for role in roles.teacher_ranks.values())]
    return tuple(folder.absolute() / "config.json" for folder in folders)


def describe_node(files: Sequence[Path], run_folder: Path) -> NodeReport:
    """Return the report of the node that this runs on."""
    existing = next(path for path in (run_folder, *run_folder.parents) if path.exists())
    return NodeReport(
        versions=local_versions(),
        missing_files=tuple(str(path) for path in files if not os.access(path, os.R_OK)),
        can_write=os.access(existing, os.W_OK),
        clock_s=time.time(),
    )


def check_nodes(nodes: Sequence[NodeAnswer]) -> Iterator[Check]:
    yield _ok("nodes", str(len(nodes)))
    for node in nodes:
        if node.report is None:
            remedy = f"{node.error}; install the same megarl there and start Ray again"
            yield _error("node", f"{node.node} does not answer", remedy)
    reports = {node.node: node.report for node in nodes if node.report is not None}
    if reports:
        yield from _check_versions(reports)
        yield from _check_files(reports)
        yield _check_clocks(nodes)


def _check_versions(reports: Mapping[str, NodeReport]) -> Iterator[Check]:
    first_name, first = next(iter(reports.items()))
    num_differing = 0
    for name, report in reports.items():
        for package, version in report.versions.items():
            if version != first.versions.get(package):
                num_differing += 1
                yield _error(
                    package,
                    f"{version} on {name}, {first.versions.get(package)} on {first_name}",
                    "install the same versions on every node, best from one image or one shared folder",
                )
    if not num_differing:
        yield _ok("versions", "the same on every node")


def _check_files(reports: Mapping[str, NodeReport]) -> Iterator[Check]:
    missing = [(name, path) for name, report in reports.items() for path in report.missing_files]
    read_only = [name for name, report in reports.items() if not report.can_write]
    for name, path in missing:
        remedy = "put it on storage that every node has under the same path"
        yield _error("files", f"{path} cannot be read on {name}", remedy)
    for name in read_only:
        remedy = "every rank writes its part of a checkpoint: choose a run.folder that all nodes share"
        yield _error("files", f"the run's folder cannot be written on {name}", remedy)
    if not missing and not read_only:
        yield _ok("files", "there on every node")


def _check_clocks(nodes: Sequence[NodeAnswer]) -> Check:
    """Compare with our clock; a node reads its own at some time between question and answer."""
    skews = {
        node.node: max(node.asked_at - node.report.clock_s, node.report.clock_s - node.answered_at, 0.0)
        for node in nodes
        if node.report is not None
    }
    worst = max(skews, key=lambda name: skews[name])
    if skews[worst] <= _MAX_SKEW_S:
        return _ok("clocks", f"within {_MAX_SKEW_S:g} s")
    found = f"{worst} is {skews[worst]:.1f} s off"
    remedy = "events of the nodes cannot be put in order: synchronise the clocks (chrony)"
    return Check.of("cluster", "clocks", found, is_ok=False, remedy=remedy, otherwise=CheckStatus.WARNING)


def check_group(group: GroupReport) -> Check:
    name = f"all-reduce, {group.name}"
    if group.error:
        return _error(
            name,
            f"{group.num_ranks} ranks over {group.backend} fail",
            f"{group.error}; open the nodes' ports to each other, or name their network in network.bind "
            "and its interface in NCCL_SOCKET_IFNAME",
        )
    rate = group.bytes_per_second / 1e9
    return _ok(name, f"{group.num_ranks} ranks over {group.backend}, {rate:.2f} GB/s")


def _ok(name: str, found: str) -> Check:
    return Check(area="cluster", name=name, found=found, status=CheckStatus.OK)


def _error(name: str, found: str, remedy: str) -> Check:
    return Check(area="cluster", name=name, found=found, status=CheckStatus.ERROR, remedy=remedy)


def _ask_node(node: Mapping[str, object], describe: Callable[[], NodeReport]) -> NodeAnswer:
    name = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
    strategy = NodeAffinitySchedulingStrategy(str(node["NodeID"]), soft=False)
    asked_at = time.time()
    # Ray takes a function by its name, and a partial has none.
    reference = ray.remote(_call).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy).remote(describe)
    try:
        report = cast("NodeReport", ray.get(reference, timeout=_NODE_TIMEOUT_S))
    except ray.exceptions.RayError as error:
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        return NodeAnswer(node=name, report=None, asked_at=asked_at, answered_at=time.time(), error=reason)
    return NodeAnswer(node=name, report=report, asked_at=asked_at, answered_at=time.time())


def _call(describe: Callable[[], NodeReport]) -> NodeReport:
    return describe()


async def _try_groups(pools: Mapping[str, Sequence[Place]], *, device: str, bind: str | None) -> list[GroupReport]:
    """Reduce in every pool, and over all of them where there are several."""
    groups = dict(pools)
    if len(pools) > 1:
        groups["all pools"] = [place for places in pools.values() for place in places]
    return [await _try_group(name, places, device=device, bind=bind) for name, places in groups.items()]


async def _try_group(name: str, places: Sequence[Place], *, device: str, bind: str | None) -> GroupReport:
    backend = "gloo" if device == "cpu" else "nccl"
    remote = ray.remote(_Peer)
    environment = trainer_environment(device)
    peers: WorkerGroup[_Peer] = WorkerGroup(
        name,
        [
            remote.options(**place.options(environment, gpu_fraction=1.0)).remote(bind, rank, len(places), backend)
            for rank, place in enumerate(places)
        ],
        timeout_s=_REDUCE_TIMEOUT_S,
    )
    rate, error = 0.0, ""
    try:
        addresses = await peers.call(_Peer.find_address)
        rate = min(await peers.call(_Peer.reduce, *addresses[0]))
    except MegarlError as failure:
        error = str(failure)
    finally:
        for peer in peers.workers:
            ray.kill(peer)
    return GroupReport(name=name, num_ranks=len(places), backend=backend, bytes_per_second=rate, error=error)


class _Peer:
    """One process of a group, which listens where a trainer rank would."""

    def __init__(self, bind: str | None, rank: int, world: int, backend: str) -> None:
        self._host = own_address(bind)
        self._rank, self._world, self._backend = rank, world, backend
        if (interface := interface_of(self._host)) is not None:
            GLOO_INTERFACE.set(interface)

    def find_address(self) -> tuple[str, int]:
        with socket.create_server((self._host, 0)) as listener:
            port: int = listener.getsockname()[1]
        return self._host, port

    def reduce(self, host: str, port: int) -> float:
        """Return bytes per second; fail where the sum is wrong."""
        import torch  # noqa: PLC0415 - only these processes need it
        from torch import distributed  # noqa: PLC0415 - only these processes need it

        distributed.init_process_group(
            self._backend,
            init_method=f"tcp://{host}:{port}",
            rank=self._rank,
            world_size=self._world,
            timeout=timedelta(seconds=_REDUCE_TIMEOUT_S),
        )
        device = "cpu" if self._backend == "gloo" else "cuda"
        times = []
        for _ in range(_NUM_TRIES):
            values = torch.full((_REDUCED_BYTES // 4,), float(self._rank + 1), device=device)
            began = time.monotonic()
            distributed.all_reduce(values)
            lowest, highest = values.min().item(), values.max().item()
            times.append(time.monotonic() - began)
            expected = self._world * (self._world + 1) / 2
            assert lowest == highest == expected, f"rank {self._rank}: {lowest} to {highest}, not the sum {expected}"
        distributed.destroy_process_group()
        return _REDUCED_BYTES / min(times)
