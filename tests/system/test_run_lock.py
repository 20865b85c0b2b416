from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest

from megarl.checkpoint.folder import begin, checkpoint_folder
from megarl.errors import MachineError
from megarl.system.run_lock import LOCKS_FOLDER, Holder, check_held, run_lock

_HOLD = """
import sys, time
from pathlib import Path
from megarl.system.run_lock import run_lock
with run_lock(Path(sys.argv[1]), beat_s=0.1) as holder:
    print(holder.token, flush=True)
    time.sleep(600)
"""


@contextmanager
def another_driver(run_folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", _HOLD, str(run_folder)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert process.stdout.readline().strip().isdigit()
        yield process
    finally:
        process.kill()
        process.wait(timeout=60)
        process.stdout.close()


def lock_file(run_folder: Path) -> Path:
    return run_folder.parent / LOCKS_FOLDER / f"{run_folder.name}.json"


def write(run_folder: Path, holder: Holder) -> None:
    path = lock_file(run_folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(holder)))


ELSEWHERE = Holder(host="node7", pid=12, boot_id="of-node7", token=4)


@pytest.mark.fault("a second driver of a running run", "refused with the holder's host and process; nothing is touched")
def test_a_second_driver_is_refused_and_names_the_first(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "mine"
    with another_driver(folder) as first, pytest.raises(MachineError) as refused, run_lock(folder):
        pass
    assert str(refused.value).startswith(f"{folder}: process {first.pid} on ")
    assert "is running this run now" in str(refused.value)


def test_a_killed_driver_leaves_no_lock_and_tokens_rise(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    with another_driver(folder):
        pass
    with run_lock(folder) as second:
        assert second.token == 2
    with run_lock(folder) as third:
        assert third.token == 3


def test_the_lock_outlives_the_renaming_of_an_earlier_folder(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    with another_driver(folder):
        folder.rename(tmp_path / "mine.1")
        with pytest.raises(MachineError, match="is running this run now"), run_lock(folder):
            pass


def test_a_driver_on_another_machine_is_seen_by_its_beats(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    write(folder, ELSEWHERE)
    stop = threading.Event()

    def beat() -> None:
        number = 0
        while not stop.wait(0.05):
            number += 1
            partial = tmp_path / "record"
            partial.write_text(json.dumps({**asdict(ELSEWHERE), "beat": number}))
            partial.replace(lock_file(folder))

    beating = threading.Thread(target=beat)
    beating.start()
    try:
        with (
            pytest.raises(MachineError, match="process 12 on node7 is running this run now"),
            run_lock(folder, still_s=30),
        ):
            pass
    finally:
        stop.set()
        beating.join()


def test_a_driver_on_another_machine_that_gives_no_sign_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    write(folder, ELSEWHERE)
    with run_lock(folder, still_s=0.2) as holder:
        assert holder.token == ELSEWHERE.token + 1


def test_a_lock_that_was_released_elsewhere_is_taken_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    write(folder, Holder(**{**asdict(ELSEWHERE), "has_released": True}))
    with run_lock(folder, still_s=3600) as holder:
        assert holder.token == ELSEWHERE.token + 1


def test_a_damaged_record_does_not_stop_a_run(tmp_path: Path) -> None:
    lock_file(tmp_path / "mine").parent.mkdir()
    lock_file(tmp_path / "mine").write_bytes(b"\0" * 512)
    with run_lock(tmp_path / "mine") as holder:
        assert holder.token == 1


def test_without_flock_the_beats_decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_file: int, _operation: int) -> None:
        raise OSError(38, os.strerror(38))

    monkeypatch.setattr(fcntl, "flock", refuse)
    folder = tmp_path / "mine"
    with (
        another_driver(folder),
        pytest.raises(MachineError, match="is running this run now"),
        run_lock(folder, still_s=60),
    ):
        pass
    with run_lock(folder, still_s=0.5) as holder:
        assert holder.token == 2


@pytest.mark.fault("a driver that was frozen until another took over", "it ends and commits no checkpoint")
def test_a_driver_that_lost_its_lock_ends_and_saves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "mine"

    def drive() -> None:
        with run_lock(folder, beat_s=3600):
            check_held(folder)
            write(folder, ELSEWHERE)
            begin(checkpoint_folder(folder / "checkpoints", 3), num_bytes=0)

    with pytest.raises(MachineError, match="process 12 on node7 has taken over this run"):
        drive()
    assert not folder.exists(), "not even a folder was made"
    assert json.loads(lock_file(folder).read_text())["pid"] == ELSEWHERE.pid, "the other keeps the lock"


def test_a_driver_that_lost_its_lock_is_interrupted(tmp_path: Path) -> None:
    def drive() -> None:
        with run_lock(tmp_path / "mine", beat_s=0.05):
            write(tmp_path / "mine", ELSEWHERE)
            threading.Event().wait(60)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(MachineError, match="has taken over this run"):
            drive()
    finally:
        signal.signal(signal.SIGINT, before)
