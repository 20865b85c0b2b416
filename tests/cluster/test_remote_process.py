"""Processes as their system knows them: frozen ones are killed, others with the same number are not."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from megarl.cluster.remote_process import RemoteProcess, _end, _state
from megarl.system.proc import read_stat


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
    deadline = time.monotonic() + 60
    while _state(remote) != state:
        assert time.monotonic() < deadline, f"{_state(remote)}, not {state}"
        time.sleep(0.01)


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
