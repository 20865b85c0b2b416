"""The hook at the end of a pod: the driver is signalled and waited for, from its own pod and from others."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.system.run_lock import current_holder
from megarl.tools.launch.leave import main
from tests.waiting import wait_until

DRIVER = """
import signal, sys, time
from pathlib import Path
from megarl.system.run_lock import run_lock
run = Path(sys.argv[1])
asked = []
signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
with run_lock(run):
    (run / "started").touch()
    while not asked:
        time.sleep(0.02)
    time.sleep(1)
    (run / "saved").touch()
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    folder.mkdir()
    return folder


@pytest.fixture
def driver(run: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", DRIVER, str(run)])
    wait_until((run / "started").exists)
    yield process
    process.kill()
    process.wait()


def test_the_drivers_pod_waits_until_the_driver_has_saved(run: Path, driver: subprocess.Popen[bytes]) -> None:
    assert main([str(run)]) == 0
    assert (run / "saved").exists()
    assert current_holder(run) is None


@pytest.mark.patient
def test_another_pod_waits_for_a_driver_that_was_asked(run: Path, driver: subprocess.Popen[bytes]) -> None:
    words = [sys.executable, "-m", "megarl.tools.launch.leave", str(run)]
    with subprocess.Popen([*words, "--follows"]) as other:
        time.sleep(0.5)
        assert other.poll() is None
        subprocess.run(words, check=True, timeout=60)
        assert other.wait(timeout=30) == 0
    assert (run / "saved").exists()


def test_a_single_pod_that_is_ended_does_not_wait(run: Path, driver: subprocess.Popen[bytes]) -> None:
    began = time.monotonic()
    assert main([str(run), "--follows", "--notice-s", "0.2"]) == 0
    assert time.monotonic() - began < 10
    assert driver.poll() is None, "its node is replaced, and the run goes on"


def test_a_run_without_a_driver_is_left_at_once(run: Path) -> None:
    assert main([str(run)]) == 0


def test_a_driver_that_was_killed_is_not_waited_for(run: Path, driver: subprocess.Popen[bytes]) -> None:
    driver.kill()
    driver.wait()
    assert current_holder(run) is not None
    assert main([str(run)]) == 0
