from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from megarl.checkpoint.folder import begin, checkpoint_folder
from megarl.errors import MachineError
from megarl.system import run_lock as run_lock_module
from megarl.system.run_lock import (
    LOCKS_FOLDER,
    Holder,
    check_held,
    current_holder,
    held_token,
    is_held,
    run_lock,
    told_of_loss,
)
from tests.waiting import wait_until

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
    with run_lock(folder, still_s=1.0) as holder:
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


@pytest.fixture
def no_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the file system of this process have no locks, as NFS with `nolock`."""

    def refuse(_file: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.mark.patient
@pytest.mark.usefixtures("no_flock")
def test_without_flock_the_beats_decide(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    with (
        another_driver(folder),
        pytest.raises(MachineError, match="is running this run now"),
        run_lock(folder, still_s=60),
    ):
        pass
    with run_lock(folder, still_s=2.0) as holder:
        assert holder.token == 2


def fail(*_arguments: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.patient
@pytest.mark.fault("the disk of the run's lock fails, or hangs", "the driver is cancelled before another can take over")
@pytest.mark.usefixtures("no_flock")
@pytest.mark.parametrize("hangs", [False, True])
def test_a_driver_that_cannot_renew_its_lock_ends_before_another_takes_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    folder, healed, is_told = tmp_path / "mine", threading.Event(), threading.Event()

    def drive() -> None:
        with run_lock(folder, still_s=4.0), told_of_loss(folder, is_told.set):
            monkeypatch.setattr(run_lock_module._RunLock, "_write", lambda *_: healed.wait(60) if hangs else fail())
            monkeypatch.setattr(run_lock_module, "_read", lambda _path: None)
            check_held(folder)  # for a moment nobody else can have it
            began = time.monotonic()
            assert is_told.wait(60)
            assert time.monotonic() - began > 1.0
            with pytest.raises(MachineError, match=r"could not be renewed for \d+ s"):
                check_held(folder)
            assert not is_held(folder)
            healed.set()
            raise RuntimeError("cancelled")

    with pytest.raises(MachineError, match="could not be renewed"):
        drive()
    monkeypatch.undo()
    assert current_holder(folder) is not None, "it has not released what may be another's by now"


def test_where_flock_keeps_all_others_out_a_disk_that_fails_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, is_told = tmp_path / "mine", threading.Event()
    monkeypatch.setattr(run_lock_module, "_is_of_one_machine", lambda _path: True)
    with run_lock(folder, still_s=0.4), told_of_loss(folder, is_told.set), monkeypatch.context() as failing:
        failing.setattr(run_lock_module._RunLock, "_write", fail)
        failing.setattr(run_lock_module, "_read", lambda _path: None)
        assert not is_told.wait(1.0)
        check_held(folder)


@pytest.mark.parametrize("is_listening", [False, True])
def test_a_driver_that_knows_of_its_loss_is_not_interrupted_as_well(tmp_path: Path, is_listening: bool) -> None:
    """One that was told leaves the block at once; one that asked has an error."""
    folder, interrupts, is_told = tmp_path / "mine", list[int](), threading.Event()
    before = signal.signal(signal.SIGINT, lambda number, _frame: interrupts.append(number))
    try:
        with run_lock(folder, beat_s=0.01 if is_listening else 3600, still_s=0.4):
            with told_of_loss(folder, is_told.set) if is_listening else nullcontext():
                write(folder, replace(ELSEWHERE, token=99))
                if is_listening:
                    deadline = time.monotonic() + 60
                    while not is_told.wait(0.2):  # a beat under way has written over it
                        assert time.monotonic() < deadline
                        write(folder, replace(ELSEWHERE, token=99))
                else:
                    assert not is_held(folder)
            time.sleep(0.3)
    finally:
        signal.signal(signal.SIGINT, before)
    assert interrupts == []


def test_a_late_beat_of_an_earlier_driver_is_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    write(folder, replace(ELSEWHERE, has_released=True))
    with run_lock(folder, beat_s=0.05) as holder:
        write(folder, replace(ELSEWHERE, run_id=holder.run_id))
        check_held(folder)
        wait_until(lambda: holder.is_same(current_holder(folder) or ELSEWHERE))


def test_a_driver_whose_lock_file_was_removed_finds_the_one_that_has_a_new_file(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    write(folder, replace(ELSEWHERE, has_released=True))
    with run_lock(folder, beat_s=3600):
        lock_file(folder).unlink()
        check_held(folder)
        with another_driver(folder) as other, pytest.raises(MachineError, match=f"process {other.pid} on .* has taken"):
            check_held(folder)


@pytest.mark.usefixtures("no_flock")
def test_of_two_first_drivers_without_flock_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both_have_read, written = threading.Barrier(2), run_lock_module._RunLock._write

    def write_together(lock: run_lock_module._RunLock, holder: Holder) -> None:
        both_have_read.wait(60)
        written(lock, holder)

    monkeypatch.setattr(run_lock_module._RunLock, "_write", write_together)
    outcomes: list[Holder | MachineError] = []

    def start() -> None:
        try:
            outcomes.append(run_lock_module._RunLock(tmp_path / "mine", still_s=5.0).holder)
        except MachineError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (refused,) = (each for each in outcomes if isinstance(each, MachineError))
    assert "is running this run now" in str(refused)


def test_a_process_that_looks_whether_a_run_is_locked_does_not_stop_a_driver_that_starts(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    with run_lock(folder):
        pass
    with lock_file(folder).open("rb+") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        threading.Timer(0.2, lambda: fcntl.flock(looking, fcntl.LOCK_UN)).start()
        with run_lock(folder) as holder:
            assert holder.token == 2


def test_an_unknown_boot_is_no_proof_that_a_driver_was_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock_module, "_BOOT_ID", tmp_path / "absent")
    folder = tmp_path / "mine"
    write(folder, replace(ELSEWHERE, boot_id=""))
    threading.Timer(0.2, write, (folder, replace(ELSEWHERE, boot_id="", beat=1))).start()
    with pytest.raises(MachineError, match="is running this run now"), run_lock(folder, still_s=30):
        pass


def test_a_record_that_cannot_be_read_is_not_taken_for_a_free_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(MachineError, match="the holder of the run cannot be read: I"), run_lock(tmp_path / "mine"):
        pass


def test_all_drivers_of_a_run_have_one_random_id_and_the_folder_of_the_locks_is_private(tmp_path: Path) -> None:
    (tmp_path / LOCKS_FOLDER).mkdir(mode=0o775)
    ids = []
    for name in ("mine", "mine", "other"):
        with run_lock(tmp_path / name) as holder:
            ids.append(holder.run_id)
            assert held_token(tmp_path / name) == holder.token
    assert ids[0] == ids[1] != ids[2]
    assert len(ids[0]) == 16
    assert (tmp_path / LOCKS_FOLDER).stat().st_mode & 0o777 == 0o700
    assert lock_file(tmp_path / "mine").stat().st_mode & 0o777 == 0o600


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
