"""Drivers in forked processes: what they raise, how they are replaced, and what signals reach them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from megarl.cluster.local_ray import end_left, private_folder
from megarl.errors import DataError
from megarl.run.driver_process import drive_again
from megarl.system.guard import GuardLease, start_guarded, stop_guarded
from megarl.system.lease import LeasedGuard, LeasedRay, find_leased, record_path
from megarl.system.proc import read_stat
from megarl.system.run_lock import boot_id
from tests.waiting import wait_until

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from megarl.run.driver_process import drive_again
folder = Path(sys.argv[1])
latest = folder / "checkpoints" / "latest"
def drive(resume):
    with (folder / "drivers").open("a") as file:
        file.write(f"{os.getpid()} {resume}\\n")
    num_drivers = len((folder / "drivers").read_text().splitlines())
    BODY
drive_again(drive, folder, "never", auto="auto", notify=print)
print("done")
"""
DIE = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.fixture
def left(tmp_path: Path) -> Iterator[Path]:
    """A run folder with the record of a Ray that outlives its driver; `sleep` stands for Ray."""
    folder, ray = tmp_path / "run", private_folder()
    lease = GuardLease(folder=ray, seconds=90)
    guard = start_guarded(["sleep", "600"], environment=os.environ, output=subprocess.DEVNULL, lease=lease)
    try:
        folder.mkdir()
        record_path(folder).parent.mkdir()
        started = read_stat(guard.pid).started
        kept_guard = LeasedGuard(folder=str(ray), pid=guard.pid, started=started, boot_id=boot_id())
        kept = LeasedRay(address="127.0.0.1:1", guard=kept_guard, seconds=90, program="", gpus={}, run_id="")
        record_path(folder).write_text(json.dumps(asdict(kept)))
        record_path(folder).chmod(0o600)
        yield folder
    finally:
        stop_guarded(guard, grace_s=0.0)
        shutil.rmtree(ray, ignore_errors=True)


def command(folder: Path, body: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", PROGRAM.replace("BODY", body), str(folder)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def drivers(folder: Path) -> list[tuple[int, str]]:
    """The pid of each driver so far, and where it resumed."""
    lines = (folder / "drivers").read_text().split("\n")[:-1] if (folder / "drivers").exists() else []
    return [(int(line.split()[0]), line.split()[1]) for line in lines]


def test_an_error_of_the_driver_is_raised_with_its_traceback(tmp_path: Path) -> None:
    def drive(_: str) -> None:
        raise DataError("rows.parquet: no rows")

    with pytest.raises(DataError, match=r"^rows.parquet: no rows$") as raised:
        drive_again(drive, tmp_path, "never", auto="auto", notify=print)
    assert "in drive" in str(raised.value.__cause__)


def test_a_killed_driver_is_followed_by_another_that_resumes(left: Path) -> None:
    body = f"latest.mkdir(parents=True, exist_ok=True); num_drivers > 1 or {DIE}"
    process = command(left, body)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    assert output == "the driver was killed (SIGKILL); another one takes over what it left\ndone\n"
    assert [resume for _, resume in drivers(left)] == ["never", "auto"]


def test_a_finished_run_ends_what_a_driver_left_that_was_killed_behind_its_last_step(left: Path) -> None:
    kept = find_leased(left)
    assert kept is not None
    assert kept.guard is not None
    end_left(left)
    assert not kept.guard.is_running
    assert not Path(kept.guard.folder).exists()
    assert not record_path(left).exists()


def test_drivers_that_are_killed_without_a_new_checkpoint_end_the_command(left: Path) -> None:
    process = command(left, DIE)
    process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL
    assert len(drivers(left)) == 4


@pytest.mark.parametrize(("body", "code"), [(DIE, -signal.SIGKILL), ("os._exit(1)", 1)])
def test_a_driver_that_leaves_nothing_ends_the_command_alike(tmp_path: Path, body: str, code: int) -> None:
    process = command(tmp_path, body)
    process.communicate(timeout=300)
    assert process.returncode == code
    assert len(drivers(tmp_path)) == 1


def test_a_signal_reaches_the_driver(left: Path) -> None:
    body = (
        "signal.signal(signal.SIGTERM, lambda *_: (folder / 'asked').touch()); [time.sleep(0.05) for _ in range(9999)]"
    )
    process = command(left, body)
    wait_until(lambda: bool(drivers(left)))
    driver = psutil.Process(drivers(left)[0][0])
    time.sleep(0.5)  # for its handler
    process.terminate()
    wait_until((left / "asked").exists)
    assert driver.is_running()
    driver.send_signal(signal.SIGKILL)  # one that was asked to leave is not replaced
    process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL
    assert len(drivers(left)) == 1


def test_a_killed_command_takes_its_driver_along(left: Path) -> None:
    process = command(left, "time.sleep(600)")
    wait_until(lambda: bool(drivers(left)))
    driver = psutil.Process(drivers(left)[0][0])
    process.kill()
    process.communicate(timeout=300)
    driver.wait(timeout=60)


NOTIFYING_PROGRAM = """
import os, signal, sys
from pathlib import Path
from megarl.run.driver_process import exit_notice
with exit_notice(Path(sys.argv[1])):
    {}
"""


def last_words(folder: Path, end: str) -> str:
    command = [sys.executable, "-c", NOTIFYING_PROGRAM.format(end), str(folder)]
    # The end of the pipe is also the end of the process that speaks.
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False).stderr


@pytest.mark.parametrize("end", ["pass", "raise SystemExit(3)"])
def test_nothing_is_said_of_a_run_that_ends_by_itself(end: str, tmp_path: Path) -> None:
    assert last_words(tmp_path, end) == ""


@pytest.mark.parametrize("end", ["os._exit(1)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_of_one_that_cannot_speak_any_more_it_is_said_how_to_go_on(end: str, tmp_path: Path) -> None:
    said = last_words(tmp_path, end)
    assert said.count("\n") == 1
    assert "log" not in said
    assert said.endswith("run the same command to start again: no checkpoint was saved yet\n")
    (tmp_path / "checkpoints" / "latest").mkdir(parents=True)
    (tmp_path / "ray.log").touch()
    said = last_words(tmp_path, end)
    assert f"(its log is {tmp_path / 'ray.log'})" in said
    assert said.endswith("run the same command to resume from its last checkpoint\n")
