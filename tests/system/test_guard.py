from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megarl.system.guard import GuardLease, segments_of, start_guarded, stop_guarded
from tests.engine.test_process import group_members, wait_until_gone

FAMILY = "import subprocess, time; subprocess.Popen(['sleep', '600']); print('ready', flush=True); time.sleep(600)"


@contextmanager
def guarded(*command: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "megarl.system.guard", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        yield process


def test_the_whole_group_ends_when_the_parents_end_of_the_pipe_is_closed() -> None:
    with guarded(sys.executable, "-c", FAMILY) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        assert len(group_members(process.pid)) == 3
        process.stdin.close()
        assert not wait_until_gone(process.pid, 60)


@contextmanager
def leased(folder: Path, seconds: float, *, is_taken: bool) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A guard whose parent has just died."""
    lease = GuardLease(folder=folder / "ray", seconds=seconds)
    lease.folder.mkdir()
    if is_taken:
        lease.file.touch()
    guard = start_guarded([sys.executable, "-c", FAMILY], environment=os.environ, output=subprocess.PIPE, lease=lease)
    assert guard.stdin is not None
    assert guard.stdout is not None
    with guard:
        guard.stdout.readline()
        guard.stdin.close()
        yield guard, lease.file


def test_a_lease_that_was_not_taken_ends_with_the_parent_and_its_folder_goes(tmp_path: Path) -> None:
    with leased(tmp_path, 600, is_taken=False) as (guard, file):
        assert not wait_until_gone(guard.pid, 60)
        assert not file.parent.exists()


@pytest.mark.patient
def test_a_leased_command_outlives_its_parent_while_the_lease_is_renewed(tmp_path: Path) -> None:
    with leased(tmp_path, 3, is_taken=True) as (guard, file):
        for _ in range(15):  # twice as long as the lease
            time.sleep(0.4)
            file.touch()
        assert len(group_members(guard.pid)) == 3
        assert not wait_until_gone(guard.pid, 60)
        assert not file.parent.exists()


def test_a_lease_that_is_given_back_ends_the_command(tmp_path: Path) -> None:
    with leased(tmp_path, 600, is_taken=True) as (guard, file):
        file.unlink()
        assert not wait_until_gone(guard.pid, 60)
        assert not file.parent.exists()


def test_a_request_to_end_is_passed_on() -> None:
    with guarded(sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(600)") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 128 + signal.SIGTERM


@pytest.mark.parametrize("code", [0, 7])
def test_the_exit_code_is_the_commands(code: int) -> None:
    with guarded(sys.executable, "-c", f"raise SystemExit({code})") as process:
        assert process.wait(timeout=60) == code


def test_what_a_command_leaves_behind_is_ended_with_it() -> None:
    with guarded(sys.executable, "-c", "import subprocess; subprocess.Popen(['sleep', '600'])") as process:
        assert process.wait(timeout=60) == 0
        assert not wait_until_gone(process.pid, 60)


SEGMENT = """
import time
from multiprocessing import shared_memory, resource_tracker
memory = shared_memory.SharedMemory(create=True, size=64)
resource_tracker.unregister(memory._name, "shared_memory")
print(memory.name, flush=True)
time.sleep(600)
"""

SEMAPHORE = """
import multiprocessing, time
from multiprocessing import resource_tracker
lock = multiprocessing.get_context("spawn").RLock()
resource_tracker.unregister(lock._semlock.name, "semaphore")
print("sem." + lock._semlock.name.removeprefix("/"), flush=True)
time.sleep(600)
"""

sharing = pytest.mark.parametrize("program", [SEGMENT, SEMAPHORE], ids=["segment", "semaphore"])


@sharing
def test_shared_memory_goes_with_a_session_whose_parent_has_died(program: str) -> None:
    with guarded(sys.executable, "-c", program) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        segment = Path("/dev/shm") / process.stdout.readline().strip()
        assert segments_of(process.pid) == {segment}
        process.stdin.close()
        assert not wait_until_gone(process.pid, 60)
    assert not segment.exists()


@sharing
def test_and_with_one_that_is_stopped(program: str) -> None:
    process = start_guarded([sys.executable, "-c", program], environment=os.environ, output=subprocess.PIPE)
    assert process.stdout is not None
    segment = Path("/dev/shm") / process.stdout.readline().decode().strip()
    assert segment.exists()
    stop_guarded(process, grace_s=5)
    process.stdout.close()
    assert not segment.exists()
