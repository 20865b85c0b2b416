"""The check itself: it finds what is left, whatever that calls itself, and ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.faults.leftovers import nothing_left

RENAMED = """
import setproctitle, socket, time
from multiprocessing import shared_memory, resource_tracker
setproctitle.setproctitle("ray::Somebody")
memory = shared_memory.SharedMemory(create=True, size=64)
resource_tracker.unregister(memory._name, "shared_memory")
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], memory.name, flush=True)
time.sleep(600)
"""


def leave_something(found: list[str]) -> None:
    with nothing_left(within_s=0.5) as footprint:
        process = subprocess.Popen(
            [sys.executable, "-c", RENAMED],
            env={**os.environ, **footprint.environment},
            preexec_fn=footprint.enter,
            start_new_session=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        footprint.hold()
        assert process.stdout is not None
        found += [str(process.pid), *process.stdout.readline().split()]
        process.stdout.close()


@pytest.mark.needs("root")
def test_a_process_its_port_and_its_memory_are_found_and_ended() -> None:
    found: list[str] = []
    with pytest.raises(AssertionError) as caught:
        leave_something(found)
    pid, port, segment = found
    assert f"'{pid} ray::Somebody" in str(caught.value)
    assert f"ports=({port},), segments=('{segment}',)" in str(caught.value)
    _, status = os.waitpid(int(pid), 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


def test_nothing_is_nothing() -> None:
    with nothing_left(within_s=0.5) as footprint:
        subprocess.run(["true"], preexec_fn=footprint.enter, env=footprint.environment, check=True)
