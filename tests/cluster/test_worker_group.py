"""A group of workers on a real Ray: one call, every rank, one result or one error that names the rank."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.cluster.local_ray import private_ray
from megarl.cluster.remote_process import RemoteProcess, _end, _state
from megarl.config.load import load_recipe
from megarl.env import RAY_AUTH_TOKEN_PATH
from megarl.errors import MachineError, NumericsError, WorkerError
from megarl.system.proc import read_stat
from megarl.tools.quickstart.arithmetic import make_arithmetic
from tests.cluster.ray_worker import Worker
from tests.cluster.worker_setup import quick_ray
from tests.run.runs import write_recipe
from tests.waiting import wait_until

with private_ray():
    # Ray reads its environment when it is imported, here as in a run.
    import ray

    from megarl.cluster.cluster import Cluster, open_cluster
    from megarl.cluster.worker_group import Fence, WorkerGroup, WorkerLateError, exit_detail
    from megarl.config.roles import PoolConfig


def kill(group: WorkerGroup[Worker]) -> None:
    for worker in group.workers:
        ray.kill(worker, no_restart=True)


@pytest.fixture(scope="module")
def cluster(real_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("ray")
    make_arithmetic(folder / "arithmetic", num_train=8, num_sft=8, num_eval=8)
    recipe = load_recipe(write_recipe(folder, "workers"))
    Path(recipe.run_folder).mkdir(parents=True)
    with private_ray(), quick_ray(), open_cluster(recipe.run, recipe.pools, address=None) as opened:
        yield opened


def start_workers() -> WorkerGroup[Worker]:
    actor = ray.remote(num_cpus=0)(Worker)
    return WorkerGroup("actor", [actor.remote(rank) for rank in range(2)], timeout_s=300)


@pytest.fixture(scope="module")
def workers(cluster: Cluster) -> Iterator[WorkerGroup[Worker]]:
    """For tests that leave them alive and idle."""
    group = start_workers()
    yield group
    kill(group)


@pytest.fixture
def own_workers(cluster: Cluster) -> Iterator[WorkerGroup[Worker]]:
    group = start_workers()
    yield group
    kill(group)


def test_a_failure_can_wait_until_the_other_ranks_are_done(workers: WorkerGroup[Worker]) -> None:
    asyncio.run(workers.call(Worker.square, 1))
    began = time.monotonic()
    with pytest.raises(NumericsError):
        asyncio.run(workers.call_to_end(Worker.diverge_first_or_sleep, 1.5))
    assert time.monotonic() - began >= 1.5


def test_a_failure_does_not_wait_for_ranks_that_wait_for_a_dead_one(own_workers: WorkerGroup[Worker]) -> None:
    with pytest.raises(WorkerError, match="rank 0: died"):
        asyncio.run(own_workers.call_to_end(Worker.die_first_or_sleep, 60.0))


def test_an_error_names_role_rank_operation_and_reason(workers: WorkerGroup[Worker]) -> None:
    with pytest.raises(WorkerError, match=r"actor rank 1: fail_on failed: ValueError: broken on purpose"):
        asyncio.run(workers.call(Worker.fail_on, 1))
    assert asyncio.run(workers.call(Worker.square, 1)) == [1, 2]


def test_an_error_of_our_own_keeps_its_kind_and_its_exit_code(workers: WorkerGroup[Worker]) -> None:
    with pytest.raises(NumericsError, match="the loss is nan"):
        asyncio.run(workers.call(Worker.diverge_on, 0))


def test_a_rank_that_dies_is_named(own_workers: WorkerGroup[Worker]) -> None:
    with pytest.raises(WorkerError, match="actor rank 1: died during die_on"):
        asyncio.run(own_workers.call(Worker.die_on, 1))


def test_a_rank_that_is_late_is_named(own_workers: WorkerGroup[Worker]) -> None:
    asyncio.run(own_workers.call(Worker.square, 1))  # both are there
    late: WorkerGroup[Worker] = WorkerGroup("actor", own_workers.workers, timeout_s=1)
    with pytest.raises(WorkerError, match=r"actor rank\(s\) 1: sleep_on did not finish within 1 s"):
        asyncio.run(late.call(Worker.sleep_on, 1))


def test_a_call_has_more_time_as_long_as_it_gets_on(own_workers: WorkerGroup[Worker]) -> None:
    asyncio.run(own_workers.call(Worker.square, 1))  # both are there
    answers = iter([True, True, False])
    asked: list[bool] = []

    async def is_moving() -> bool:
        asked.append(next(answers))
        return asked[-1]

    async def main() -> None:
        started = [worker.sleep_on.remote(1) for worker in own_workers.workers]
        await own_workers.gather("sleep_on", started, timeout_s=1, is_moving=is_moving)

    with pytest.raises(WorkerLateError, match=r"actor rank\(s\) 1: sleep_on did not finish within 1 s"):
        asyncio.run(main())
    assert asked == [True, True, False]


def test_a_pool_that_does_not_fit_is_said(cluster: Cluster) -> None:
    with pytest.raises(
        MachineError, match=r"pools.big: needs 1 node with 64 slots, and the Ray cluster has 1 node with 3 "
    ):
        cluster.reserve({"big": PoolConfig(gpus_per_node=64)})


STRANGER = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False); print(ray.cluster_resources())"


def test_who_has_not_the_token_of_our_ray_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    address = ray.get_runtime_context().gcs_address
    assert address.startswith("127.0.0.1:")
    hidden = (RAY_AUTH_TOKEN_PATH.name, "RAY_AUTH_TOKEN", "RAY_AUTH_MODE")
    without = {name: value for name, value in os.environ.items() if name not in hidden} | {"HOME": str(tmp_path)}
    with_another = {**without, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef0123456789abcdef"}
    for environment in (without, with_another):
        environment["RAY_NUM_REDIS_GET_RETRIES"] = "2"  # seconds that each tries for
    # Both at once.
    strangers = [
        subprocess.Popen(
            [sys.executable, "-c", STRANGER, address],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for environment in (without, with_another)
    ]
    for stranger in strangers:
        output, errors = stranger.communicate(timeout=600)
        assert stranger.returncode != 0
        assert "megarl_slot" not in output
        assert "auth" in errors.lower()


def test_the_memory_of_a_node_is_named_with_rays_figures() -> None:
    text = (
        "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 10.0.0.1, ID: 5e16) "
        "was 22.91GB used / 24.00GB limit (0.954583)\nTo see more information about memory usage on this node, use ..."
    )
    detail = exit_detail(ray.exceptions.OutOfMemoryError(text))
    assert detail == "Ray ended it, its node ran short of memory (22.91GB used / 24.00GB limit); run less there"


SHORT = """
import asyncio, sys
from pathlib import Path

from megarl.cluster.local_ray import LocalRay, local_ray, private_ray

with private_ray():
    import ray

    from megarl.cluster.cluster import joined
    from megarl.errors import NodeMemoryError
    from megarl.cluster.worker_group import WorkerGroup
    from tests.cluster.ray_worker import Worker

    with local_ray(LocalRay(device="cpu", log_folder=Path(sys.argv[1])), num_slots=1) as nodes, joined(nodes.address):
        group = WorkerGroup("actor", [ray.remote(num_cpus=0)(Worker).remote(0)], timeout_s=300)
        try:
            asyncio.run(group.call(Worker.sleep_on, 0))
        except NodeMemoryError as error:
            print(f"{error.exit_code} {error}")
"""


@pytest.mark.slow
@pytest.mark.usefixtures("real_ray")
@pytest.mark.fault("Ray ends a rank because its node is short of memory", "named with the figures; exit code 5")
def test_a_rank_that_ray_ends_for_memory_is_named_with_the_figures(tmp_path: Path) -> None:
    # More memory than that is in use on every machine.
    threshold = {"RAY_memory_usage_threshold": "0.001", "RAY_memory_monitor_refresh_ms": "250"}
    words = [sys.executable, "-c", SHORT, str(tmp_path)]
    done = subprocess.run(
        words, env={**os.environ, **threshold}, capture_output=True, text=True, timeout=300, check=False
    )
    assert re.match(
        r"5 actor rank 0: died during \w+: Ray ended it, its node ran short of memory "
        r"\([\d.]+GB used / [\d.]+GB limit\); ",
        done.stdout,
    ), done.stdout + done.stderr


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    # A name with spaces and parentheses, as the file that is read has it.
    program = "import ctypes, time; ctypes.CDLL(None).prctl(15, b'a) S (b'); print(1, flush=True); time.sleep(600)"
    started = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert started.stdout is not None
    started.stdout.readline()
    yield started
    started.kill()
    started.wait()
    started.stdout.close()


def where(process: subprocess.Popen[bytes]) -> RemoteProcess:
    return RemoteProcess(node="", pid=process.pid, started=read_stat(process.pid).started)


def wait_for_state(remote: RemoteProcess, state: str) -> None:
    wait_until(lambda: _state(remote) == state, told=lambda: _state(remote))


def test_a_frozen_process_is_known_as_frozen_and_ended(process: subprocess.Popen[bytes]) -> None:
    remote = where(process)
    wait_for_state(remote, "S")
    process.send_signal(signal.SIGSTOP)
    wait_for_state(remote, "T")
    assert _end(remote, 0.1, 60.0)
    assert process.wait(timeout=60) == -signal.SIGKILL
    assert _state(remote) is None


def test_another_process_with_the_same_number_is_left_alone(process: subprocess.Popen[bytes]) -> None:
    earlier = replace(where(process), started=1)
    assert _state(earlier) is None
    assert _end(earlier, 0.0, 1.0)
    assert process.poll() is None


def test_drivers_pass_in_the_order_of_their_tokens() -> None:
    fence = Fence()
    for token in (0, 3, 3, 7):
        fence.enter(token)
    with pytest.raises(MachineError, match="driver 3 of this run called, and driver 7 has taken over; driver 3 ends"):
        fence.enter(3)
    fence.enter(7)
