"""What a cluster is really like, found out on its own nodes: one question to each, and an all-reduce in every pool.

Ray reads its environment when it is imported: the caller settles it first, see `launch`.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Generic, TypeVar, cast

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.config.recipe import Recipe
from megarl.env import GLOO_INTERFACE, trainer_environment
from megarl.errors import MegarlError
from megarl.runtime.cluster import Cluster, Place, open_cluster, own_address
from megarl.runtime.trainers.worker_group import WorkerGroup
from megarl.system.network import interface_of

Answer = TypeVar("Answer")

_NODE_TIMEOUT_S = 60.0
_REDUCE_TIMEOUT_S = 120.0
_REDUCED_BYTES = 4 << 20
_NUM_TRIES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAnswer(Generic[Answer]):
    """What one node said, and when, by our clock; or why it said nothing."""

    node: str
    answer: Answer | None
    asked_at: float
    answered_at: float
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """An all-reduce among the processes of a pool, as trainer ranks would have it."""

    name: str
    num_ranks: int
    backend: str
    bytes_per_second: float
    """Of the tensor that was reduced, at the fastest try."""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterReport(Generic[Answer]):
    nodes: tuple[NodeAnswer[Answer], ...]
    groups: tuple[GroupReport, ...]


def probe(recipe: Recipe, ask: Callable[[], Answer], *, address: str | None) -> ClusterReport[Answer]:
    """Ask every node, then reduce in every pool of the recipe, and over all of them where there are several."""
    if address is None:
        recipe.run_folder.mkdir(parents=True, exist_ok=True)
    with open_cluster(recipe, address=address) as cluster:
        nodes = tuple(_ask_node(node, ask) for node in ray.nodes() if node["Alive"])
        return ClusterReport(nodes=nodes, groups=tuple(asyncio.run(_try_groups(recipe, cluster))))


def _ask_node(node: dict[str, object], ask: Callable[[], Answer]) -> NodeAnswer[Answer]:
    name = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
    where = NodeAffinitySchedulingStrategy(str(node["NodeID"]), soft=False)
    asked_at = time.time()
    reference = ray.remote(_call).options(num_cpus=0, max_retries=0, scheduling_strategy=where).remote(ask)
    try:
        answer = cast("Answer", ray.get(reference, timeout=_NODE_TIMEOUT_S))
    except ray.exceptions.RayError as error:
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        return NodeAnswer(node=name, answer=None, asked_at=asked_at, answered_at=time.time(), error=reason)
    return NodeAnswer(node=name, answer=answer, asked_at=asked_at, answered_at=time.time())


def _call(ask: Callable[[], Answer]) -> Answer:
    return ask()


async def _try_groups(recipe: Recipe, cluster: Cluster) -> list[GroupReport]:
    pools = cluster.reserve(recipe.pools)
    groups = dict(pools)
    if len(pools) > 1:
        groups["all pools"] = [place for places in pools.values() for place in places]
    return [await _try_group(name, places, recipe) for name, places in groups.items()]


async def _try_group(name: str, places: Sequence[Place], recipe: Recipe) -> GroupReport:
    device = recipe.run.device
    backend = "gloo" if device == "cpu" else "nccl"
    remote = ray.remote(_Peer)
    environment = trainer_environment(device)
    peers: WorkerGroup[_Peer] = WorkerGroup(
        name,
        [remote.options(**place.options(environment, share=1.0)).remote(recipe.network.bind) for place in places],
        timeout_s=_REDUCE_TIMEOUT_S,
    )
    rate, error = 0.0, ""
    try:
        host, port = await peers.call_first(_Peer.find_address)
        members = [_Member(host, port, rank, len(places), backend) for rank in range(len(places))]
        rate = min(await peers.call_each(_Peer.reduce, members))
    except MegarlError as failure:
        error = str(failure)
    finally:
        for peer in peers.workers:
            ray.kill(peer)
    return GroupReport(name=name, num_ranks=len(places), backend=backend, bytes_per_second=rate, error=error)


@dataclass(frozen=True, slots=True)
class _Member:
    """A rank's place in the group that reduces."""

    host: str
    port: int
    rank: int
    world: int
    backend: str


class _Peer:
    """One process of a group, where and as a trainer rank would listen."""

    def __init__(self, bind: str | None) -> None:
        self._host = own_address(bind)
        if (interface := interface_of(self._host)) is not None:
            GLOO_INTERFACE.set(interface)

    def find_address(self) -> tuple[str, int]:
        with socket.create_server((self._host, 0)) as listener:
            port: int = listener.getsockname()[1]
        return self._host, port

    def reduce(self, member: _Member) -> float:
        """Bytes per second; a sum that is wrong is an error."""
        import torch  # noqa: PLC0415
        from torch import distributed  # noqa: PLC0415

        distributed.init_process_group(
            member.backend,
            init_method=f"tcp://{member.host}:{member.port}",
            rank=member.rank,
            world_size=member.world,
            timeout=timedelta(seconds=_REDUCE_TIMEOUT_S),
        )
        device = "cpu" if member.backend == "gloo" else "cuda"
        times = []
        for _ in range(_NUM_TRIES):
            ours = torch.full((_REDUCED_BYTES // 4,), float(member.rank + 1), device=device)
            began = time.monotonic()
            distributed.all_reduce(ours)
            lowest, highest = ours.min().item(), ours.max().item()
            times.append(time.monotonic() - began)
            expected = member.world * (member.world + 1) / 2
            assert lowest == highest == expected, (
                f"rank {member.rank} has {lowest} to {highest} where {expected} is the sum"
            )
        distributed.destroy_process_group()
        return _REDUCED_BYTES / min(times)
