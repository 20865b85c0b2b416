"""The side of a GPU, from a copy of the kernel's tree."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.system.affinity import DevicePlace, parse_cpus, place_of


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Two sockets, each with a bridge, a GPU and an adapter."""
    (tmp_path / "bus" / "pci" / "devices").mkdir(parents=True)
    (tmp_path / "class" / "infiniband").mkdir(parents=True)
    for socket, cpus in enumerate(("0-3,8", "4-7")):
        bridge = tmp_path / "devices" / f"pci000{socket}:00" / f"000{socket}:00:01.0"
        gpu, adapter = bridge / f"000{socket}:19:00.0", bridge / f"000{socket}:1a:00.0"
        for device in (gpu, adapter):
            device.mkdir(parents=True)
            (device / "numa_node").write_text(f"{socket}\n")
            (device / "local_cpulist").write_text(f"{cpus}\n")
            (tmp_path / "bus" / "pci" / "devices" / device.name).symlink_to(device)
        named = tmp_path / "class" / "infiniband" / f"mlx5_{socket}"
        named.mkdir()
        (named / "device").symlink_to(adapter)
    return tmp_path


def test_a_gpu_has_the_cores_and_the_adapter_of_its_side(tree: Path) -> None:
    assert place_of("0000:19:00.0", tree) == DevicePlace(
        numa_node=0, cpus=frozenset({0, 1, 2, 3, 8}), adapters=("mlx5_0",)
    )
    second = place_of("0001:19:00.0", tree)
    assert str(second) == "numa=1 cpus=4-7 (4) adapters=mlx5_1"


def test_a_machine_that_does_not_say_leaves_processes_free(tree: Path) -> None:
    (tree / "bus" / "pci" / "devices" / "0000:19:00.0" / "numa_node").write_text("-1\n")
    assert place_of("0000:19:00.0", tree).cpus == frozenset()
    assert place_of("0009:00:00.0", tree).numa_node is None


def test_lists_of_cores_are_read() -> None:
    assert parse_cpus("0-2,8,10-11\n") == frozenset({0, 1, 2, 8, 10, 11})
    assert parse_cpus("") == frozenset()


BINDS = """
import os, threading, time
from megarl.system.affinity import bind_process
release = threading.Event()
other = threading.Thread(target=release.wait)
other.start()
first = min(os.sched_getaffinity(0))
print(sorted(bind_process(frozenset({first, 100_000}))) == [first])
print(all(os.sched_getaffinity(int(task)) == {first} for task in os.listdir("/proc/self/task")))
print(bind_process(frozenset({100_000})) == frozenset(), os.sched_getaffinity(0) == {first})
release.set()
"""


def test_all_threads_are_bound_to_the_cores_that_the_process_may_use() -> None:
    done = subprocess.run([sys.executable, "-c", BINDS], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "True\nTrue\nTrue True\n", done.stderr
    assert len(os.sched_getaffinity(0)) >= 1
