"""Pools on a real Ray of several nodes on this machine; the GPUs of its nodes are declared, not there."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from megarl.cluster.local_ray import RAY_LOGS, private_ray
from megarl.config.recipe import ClusterConfig, RunConfig
from megarl.config.roles import PoolConfig
from megarl.engine.client import EngineClient, EngineEndpoint
from megarl.engine.fleet import Fleet
from megarl.env import RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH
from megarl.errors import EngineError, MachineError, PreemptedError, WorkerError
from megarl.observe.observer import Observer
from megarl.system.guard import start_guarded
from megarl.system.lease import PrivateLease
from megarl.system.run_lock import run_lock
from tests.cluster.ray_worker import Seen
from tests.cluster.worker_setup import quick_ray
from tests.engine.engines import engine_spec
from tests.observe.samples import ListSink
from tests.waiting import wait_until

with private_ray():
    # Ray reads its environment when it is imported, here as in a run.
    import ray
    from ray.exceptions import RaySystemError
    from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

    from megarl.cluster import cluster as cluster_module
    from megarl.cluster import local_ray as local_ray_module
    from megarl.cluster import lost_nodes
    from megarl.cluster.cluster import Cluster, NodeBundle, Place, Pool
    from megarl.cluster.leases import AdoptableActors
    from megarl.cluster.local_ray import RAY_LOG, LocalRay, early_ray, local_ray, running_ray, take_early
    from megarl.cluster.lost_nodes import RankNodes, followed, wait_for_nodes
    from megarl.cluster.worker_group import LostRanksError, WorkerDiedError, WorkerLateError
    from megarl.serving.operator import Growth
    from megarl.serving.processes import Engines

GPUS = (2, 4, 4, 4)
"""Declared by each node, the head first; it is smaller than the others."""


@pytest.fixture(scope="module")
def nodes(real_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRay]:
    log_folder = tmp_path_factory.mktemp("nodes")
    with ExitStack() as stack:
        stack.enter_context(private_ray())
        stack.enter_context(quick_ray())
        nodes = LocalRay(device="cuda", log_folder=log_folder, has_several_nodes=True)
        stack.enter_context(local_ray(nodes, num_slots=1, num_gpus=GPUS[0]))
        for num_gpus in GPUS[1:]:
            nodes.start_node(num_slots=1, num_gpus=num_gpus)
        nodes.wait_started()
        ray.init(address=nodes.address, log_to_driver=False, configure_logging=False)
        stack.callback(ray.shutdown)
        yield nodes


@pytest.fixture
def cluster(nodes: LocalRay) -> Iterator[Cluster]:
    # Ray gives a reservation back after the call that removes it; the next test counts what is free.
    wait_until(lambda: ray.available_resources().get("GPU") == ray.cluster_resources().get("GPU"), within_s=300)
    cluster = Cluster("cuda")
    yield cluster
    cluster.release()


def by_node(places: list[Place]) -> list[list[int | None]]:
    found: dict[str, list[int | None]] = {}
    for place in places:
        found.setdefault(place.node, []).append(place.gpu)
    return list(found.values())


def test_a_pool_has_all_gpus_of_its_nodes_and_each_process_sees_its_own(cluster: Cluster) -> None:
    pools = cluster.reserve({"rollout": PoolConfig(gpus_per_node=2), "all": PoolConfig(nodes=3, gpus_per_node=4)})
    assert by_node(pools["all"]) == [[0, 1, 2, 3]] * 3
    assert by_node(pools["rollout"]) == [[0, 1]]
    # A trainer rank and an engine in each place, as in a shared pool.
    places = [*pools["all"][:5], *pools["all"][:5]]
    actors = [ray.remote(Seen).options(**place.options({}, gpu_fraction=0.5)).remote() for place in places]
    seen = ray.get([actor.gpus.remote() for actor in actors], timeout=300)
    assert seen == [(place.node, str(place.gpu)) for place in places]


def test_an_engine_never_gets_the_gpus_of_two_nodes_for_lack_of_one(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Cluster("cuda")
    other.reserve({"other": PoolConfig(nodes=3, gpus_per_node=1)})
    monkeypatch.setattr(cluster_module, "PLACEMENT_TIMEOUT_S", 1.0)
    try:
        with pytest.raises(MachineError, match=r"pools.wide: 2 nodes with 4 devices not free within 1 s; 11 device"):
            cluster.reserve({"wide": PoolConfig(nodes=2, gpus_per_node=4)})
    finally:
        other.release()


def test_a_cluster_of_uneven_nodes_is_refused_at_once(cluster: Cluster) -> None:
    with pytest.raises(MachineError, match=r"pools.four: needs 4 nodes with 4 GPUs, and the Ray cluster has 3 nodes "):
        cluster.reserve({"four": PoolConfig(nodes=4, gpus_per_node=4)})


def test_ranks_leave_a_node_with_repeated_faults_for_a_spare_one(cluster: Cluster) -> None:
    (pool,) = (Pool(places, 1) for places in cluster.reserve({"train": PoolConfig(nodes=2, gpus_per_node=4)}).values())
    sink = ListSink()
    nodes = RankNodes({"train": pool}, max_faults=1, observer=Observer([sink]))
    first, stays = (bundle.node for bundle in pool.bundles)

    def lose(rank: int, kind: type[LostRanksError]) -> list[str]:
        error = WorkerError("version 3 was not published")
        error.__cause__ = kind(f"actor rank {rank}: lost", "actor", [rank])
        nodes.note(error, {"actor": "train"})
        nodes.leave_excluded()
        return [bundle.node for bundle in pool.bundles]

    spare, other = lose(3, WorkerDiedError)
    assert spare not in (first, stays)
    assert other == stays
    assert pool.faults.excluded == {cluster_module.address_of(first)}
    assert "is excluded after 1 faults within an hour (cluster.max_node_faults), the last: version" in sink.warnings[0]
    assert sink.warnings[1].endswith(f"its ranks start on {cluster_module.address_of(spare)}")
    # A rank in a place of the bundle is on the spare node, and sees a GPU of it.
    seen = [ray.remote(Seen).options(**place.options({}, gpu_fraction=1)).remote() for place in pool.places[:4]]
    assert ray.get([each.gpus.remote() for each in seen], timeout=300) == [(spare, str(gpu)) for gpu in range(4)]
    # The small node is no spare one, and an excluded node is not used again.
    assert lose(0, WorkerLateError) == [spare, stays]
    assert lose(0, WorkerLateError) == [spare, stays]
    assert len(sink.warnings) == 4
    assert sink.warnings[-1].endswith("its ranks stay there: no spare node is free")
    missed: list[str] = []
    asyncio.run(wait_for_nodes({"train": pool}, timeout_s=1, waiting=missed.append))
    assert not missed, "a pool with a bundle that was moved has all its nodes"
    remove_placement_group(pool.bundles[0].group)


async def test_a_pool_of_engines_grows_onto_a_node_with_free_devices(cluster: Cluster, tmp_path: Path) -> None:
    places = cluster.reserve({"rollout": PoolConfig(gpus_per_node=4)})["rollout"]
    pool, first = Pool(places, 1), engine_spec(tmp_path, tmp_path, tensor=2)
    specs = [replace(first, index=index, device="cuda") for index in range(2)]
    engines = Engines(specs, [places[:2], places[2:]], gpu_fraction=1, actors=AdoptableActors(outlive_driver=False))
    large = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU") == 4]
    known = {node["NodeID"]: node["NodeManagerAddress"] for node in large}
    joined = max(address for key, address in known.items() if key != places[0].node)
    connect = partial(EngineClient, request_timeout_s=1)

    at = partial(EngineEndpoint, host="10.0.0.1", port=1, tensor=2, device="cuda", keys=first.keys)
    fleet = Fleet([connect(at(index=index)) for index in range(2)], max_outstanding=1, publish_timeout_s=1)
    growth = Growth(pool, fleet, engines, connect=connect)
    with pytest.raises(EngineError, match=r"no node 10\.9\.9\.9 is in the Ray cluster; there is room on "):
        await growth.add("10.9.9.9", None)
    with pytest.raises(EngineError, match=r"has 4 free device\(s\), an engine takes 2 .*; no engine was added"):
        await growth.add(joined, 3)
    await growth.add(joined, None)
    assert [engine.index for engine in fleet.engines] == [0, 1, 2, 3]
    assert [engine.state for engine in fleet.engines[2:]] == ["restarting"] * 2
    assert [place.gpu for place in engines.places] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [known[bundle.node] for index in (2, 3) for bundle in engines.nodes_of(index)] == [joined] * 2
    assert pool.places[4:] == engines.places[4:], "lost nodes are noticed there, too"
    with pytest.raises(EngineError, match="has 0 free"):
        await growth.add(joined, None)
    shared = Growth(Pool(places, 2), fleet, engines, connect=connect)
    with pytest.raises(EngineError, match="share their pool with other roles; only a pool of their own can grow"):
        await shared.add(joined, None)
    await fleet.close()
    remove_placement_group(pool.bundles[1].group)


def test_a_lost_node_is_replaced_or_the_run_ends_in_time(
    nodes: LocalRay, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Takes two nodes away: the tests below need only the head."""
    places = cluster.reserve({"all": PoolConfig(nodes=2, gpus_per_node=4)})["all"]
    pool, before = Pool(places, 1), {place.node for place in places}
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    victim = min(before)
    told: list[str] = []

    moved: list[NodeBundle] = []

    async def note(bundle: NodeBundle) -> None:
        moved.append(bundle)

    failures = [RaySystemError("the head does not answer")] * 2

    def table(group: PlacementGroup) -> object:
        if failures:
            raise failures.pop()
        return placement_group_table(group)

    monkeypatch.setattr(lost_nodes, "placement_group_table", table)

    async def lose(address: str, *, timeout_s: float) -> None:
        async with followed(pool, moved=note, warn=told.append):
            await lose_and_settle(address, timeout_s=timeout_s)
            async with asyncio.timeout(120):
                while not moved:
                    await asyncio.sleep(0.2)

    async def lose_and_settle(address: str, *, timeout_s: float) -> None:
        nodes.kill_node(address)
        # Whoever follows the pool has heard of both failures then.
        while failures or any(node["Alive"] for node in ray.nodes() if node["NodeManagerAddress"] == address):
            await asyncio.sleep(0.5)
        await wait_for_nodes({"all": pool}, timeout_s=timeout_s, waiting=told.append)

    asyncio.run(lose(addresses[victim], timeout_s=300))
    after = {place.node for place in places}
    assert victim not in after
    assert len(after - before) == 1
    (replacement,) = after - before
    assert [bundle.node for bundle in moved] == [replacement]
    assert not moved[0].is_lost
    told_of_ray = [text for text in told if "RaySystemError" in text or "the head does not answer" in text]
    assert len(told_of_ray) == 1, told
    with pytest.raises(MachineError, match=r"pools.all: 1 node with 4 devices lost, and no other within 1 s"):
        asyncio.run(lose(addresses[replacement], timeout_s=1.0))
    assert any(text.startswith("pools.all: 1 node with 4 devices lost; waiting up to 1 s") for text in told)
    assert moved[0].is_lost


def test_the_object_store_grows_with_the_machine(nodes: LocalRay) -> None:
    store = ray.cluster_resources()["object_store_memory"]
    free = min(psutil.virtual_memory().available, psutil.disk_usage("/dev/shm").free)
    assert store > 0.2 * free


def test_an_agent_never_gets_the_port_of_its_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head's port was asked for and is free again until it listens; Ray ends a head that names it twice."""
    started: list[list[str]] = []
    head, free = "39985", count(40_000)

    def free_ports(number: int) -> list[str]:
        return [head, *(str(next(free)) for _ in range(number - 1))]

    monkeypatch.setattr(local_ray_module, "private_folder", lambda: tmp_path)
    monkeypatch.setattr(local_ray_module, "_free_ports", free_ports)
    monkeypatch.setattr(local_ray_module, "start_guarded", lambda command, **_: started.append(command))
    LocalRay(device="cpu", log_folder=tmp_path).start_node(num_slots=1)
    (command,) = started
    ports = [port for option, port in pairwise(command) if option.startswith("--") and option.endswith("port")]
    assert head in ports
    assert len(set(ports)) == len(ports) == 5


class Start:
    """A `ray start` that ends after some seconds of a clock, with or without a node."""

    def __init__(self, clock: list[float], seconds: float) -> None:
        self._clock, self._end = clock, clock[0] + seconds

    def poll(self) -> int | None:
        return 1 if self._clock[0] >= self._end else None


def starts_after(folder: Path, monkeypatch: pytest.MonkeyPatch, lasting: Sequence[float]) -> LocalRay:
    """Return a Ray that starts once these starts have failed, each after so many seconds."""
    monkeypatch.setattr(local_ray_module, "private_folder", lambda: folder)
    clock, nodes = [0.0], LocalRay(device="cpu", log_folder=folder)
    ahead = iter(lasting)

    def start(command: list[str], **_: object) -> Start:
        seconds = next(ahead, None)
        if seconds is None:
            nodes.log_of(0).write_bytes(b"Ray runtime started.")
        return Start(clock, seconds or 0.0)

    def sleep(_: float) -> None:
        clock[0] += 1.0

    monkeypatch.setattr(local_ray_module, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    monkeypatch.setattr(local_ray_module, "start_guarded", start)
    monkeypatch.setattr(local_ray_module, "stop_guarded", lambda *_, **__: None)
    nodes.start_node(num_slots=1)
    return nodes


def test_a_node_that_a_busy_machine_holds_up_is_started_again_until_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each start has its own time; one that hangs has it, too."""
    starts_after(tmp_path, monkeypatch, [95.0] * 8 + [10_000.0, 2.0]).wait_started()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 10
    assert re.fullmatch(
        r"node 0 of the local Ray was not ready in time \(95 s; load \d+ on \d+ cores: end what runs beside it\) "
        rf"and is started again; log: {tmp_path}/ray.log",
        told[0],
    )
    assert "(360 s; " in told[8]
    assert "node 0 of the local Ray does not start and is started again" in told[9]


@pytest.mark.parametrize(
    ("seconds", "message"),
    [
        (2.0, r"node 0 of the local Ray does not start, at the last of 3 tries; log: .*/ray.log"),
        (40.0, r"node 0 of the local Ray was not ready in time \(40 s; .*\), at the last of 12 tries; log: .*/ray.log"),
    ],
)
def test_a_node_that_never_starts_ends_the_run_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, message: str
) -> None:
    with pytest.raises(MachineError, match=f"^{message}$"):
        starts_after(tmp_path, monkeypatch, [seconds] * 100).wait_started()


class FailingRay(LocalRay):
    """A Ray that writes logs and does not start."""

    def start_node(self, *, num_slots: int, num_gpus: int | None = None) -> str:
        logs = self.folder / "ray" / "session_latest" / "logs"
        logs.mkdir(parents=True)
        (logs / "gcs_server.out").write_bytes(b"a" * 2**20 + b"the end")
        raise self.error

    error: Exception = MachineError("it does not start")


def test_the_logs_of_a_ray_that_fails_are_kept(tmp_path: Path) -> None:
    nodes = FailingRay(device="cpu", log_folder=tmp_path)
    with pytest.raises(MachineError, match="it does not start"), local_ray(nodes, num_slots=1):
        pass
    assert not nodes.folder.exists()
    kept = (tmp_path / RAY_LOGS / "gcs_server.out").read_bytes()
    assert len(kept) == 2**20
    assert kept.endswith(b"the end")


def test_the_logs_of_a_run_that_is_asked_to_leave_are_not_kept(tmp_path: Path) -> None:
    nodes = FailingRay(device="cpu", log_folder=tmp_path)
    nodes.error = PreemptedError("asked to stop")
    with pytest.raises(PreemptedError), local_ray(nodes, num_slots=1):
        pass
    assert not (tmp_path / RAY_LOGS).exists()


GUEST = """
import sys

from megarl.config.recipe import ClusterConfig
from megarl.run.launch import ray_environment

with ray_environment(sys.argv[1], ClusterConfig(allows_no_token=True)):
    import ray

    from megarl.cluster.cluster import joined

    with joined(sys.argv[1]):
        print(ray.cluster_resources())
"""


@pytest.mark.usefixtures("real_ray")
def test_a_ray_that_others_started_without_a_token_is_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (RAY_AUTH_TOKEN_PATH.name, RAY_AUTH_TOKEN.name):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("HOME", str(tmp_path))
    with local_ray(LocalRay(device="cpu", log_folder=tmp_path), num_slots=7) as nodes:
        nodes.wait_started()
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        words = [sys.executable, "-c", GUEST, nodes.address]
        guest = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert "'megarl_slot': 7.0" in guest.stdout, guest.stderr


@pytest.mark.parametrize("is_started", [True, False])
def test_a_driver_takes_the_ray_that_was_started_early_unless_it_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_started: bool
) -> None:
    """Also a driver that is no parent of its guard; it ends both by their ids."""
    program = f"print('{'Ray runtime started' if is_started else 'no port is free'}', flush=True)"
    program += "; import time; time.sleep(600)" if is_started else ""

    def start(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        return start_guarded([sys.executable, "-c", program], **options)

    monkeypatch.setattr(local_ray_module, "start_guarded", start)
    run, config = RunConfig(name="mine", folder=tmp_path, steps=1, device="cpu"), ClusterConfig()
    with early_ray(run, config, num_slots=1) as early:
        assert early is not None
        (tmp_path / "mine").mkdir()
        with run_lock(tmp_path / "mine"):
            folder = Path(early.guard.folder)
            lease = PrivateLease(tmp_path / "mine", folder=folder, program="digest", seconds=90, early=early)
            guard = take_early(lease, tmp_path / "mine")
            assert (guard is not None) == is_started == (tmp_path / "mine" / RAY_LOG).exists()
            assert (folder / "token").exists()
            if guard is not None:
                with running_ray(lease, guard, tmp_path / "mine"):
                    assert guard.is_running
                assert not guard.is_running
    assert not early.guard.is_running
    assert not folder.exists()
    assert not early.log.parent.exists()


def test_nobody_else_enters_the_folder_of_a_private_ray(nodes: LocalRay) -> None:
    session = Path(ray.worker._global_node.get_session_dir_path())
    private = session.parent.parent
    assert private.parent == Path("/tmp")
    assert private.stat().st_mode & 0o077 == 0
    # As another user would: Ray's own folders are open to all.
    command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "ls", str(session / "sockets")]
    if os.geteuid() == 0:
        assert subprocess.run(command, capture_output=True, check=False).returncode != 0
