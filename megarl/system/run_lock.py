"""The lock of a run: one driver at a time, also where several machines share the folder.

`flock` decides between processes of one machine, and between machines where the file system passes it on. Some file
systems do not (NFS with `nolock`, Lustre without `flock`). A driver therefore writes who it is and a beat every few
seconds; a driver on another machine takes the lock only after the beat has stood still for a while.

Each holder has a token one higher than the holder before. A driver that was frozen until another took its place finds
the other's token: it ends, and commits no checkpoint.

The file is beside the run folders, since the folder of an earlier run is renamed. It is never removed: a process that
waits for a removed file and one that made a new file would both hold the lock.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megarl.errors import MachineError

LOCKS_FOLDER = ".locks"
BEAT_S = 5.0
STILL_S = 20.0
"""A beat that stands still for this long belongs to a driver that is gone."""
_RECORD_BYTES = 512
"""A record has always this size: it is overwritten in place, which needs no room on a full disk."""
_NO_FLOCK = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """One driver that holds or held the lock."""

    host: str
    pid: int
    boot_id: str
    """The kernel's: equal for all containers of a machine, another one after a reboot."""
    token: int
    beat: int = 0
    has_released: bool = False

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def is_same(self, other: Holder) -> bool:
        return replace(self, beat=0, has_released=False) == replace(other, beat=0, has_released=False)


@contextmanager
def run_lock(run_folder: Path, *, beat_s: float = BEAT_S, still_s: float = STILL_S) -> Iterator[Holder]:
    """Hold the lock of a run inside the block; raise MachineError if another driver holds it.

    A driver that loses the lock is interrupted as by Ctrl-C, and the block then ends with a MachineError.
    """
    lock = _RunLock(run_folder, still_s=still_s)
    _held[lock.path] = lock
    stop = threading.Event()
    beating = threading.Thread(target=lock.keep_beating, args=(stop, beat_s), name="run-lock", daemon=True)
    beating.start()
    try:
        yield lock.holder
    except BaseException as error:
        if lock.successor is not None:
            raise MachineError(lock.describe_loss()) from error
        raise
    finally:
        stop.set()
        beating.join()
        del _held[lock.path]
        lock.release()


def refuse_locked(run_folder: Path) -> None:
    """Raise MachineError if a driver of this machine holds the lock of a run; makes no file."""
    path = _path_of(run_folder)
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _refusal(run_folder, _read(path)) from None
    except OSError:
        return  # taking the lock says what is wrong
    finally:
        os.close(file)


def current_holder(run_folder: Path) -> Holder | None:
    """Return the driver that holds the lock of a run, here or on another machine; it may have died without a word."""
    holder = _read(_path_of(run_folder))
    return None if holder is None or holder.has_released else holder


def _refusal(run_folder: Path, holder: Holder | None) -> MachineError:
    who = "another process" if holder is None else str(holder)
    return MachineError(
        f"{run_folder}: {who} is running this run now; wait for it or end it, or give this one another "
        "name (--set run.name=...)"
    )


def check_held(run_folder: Path) -> None:
    """Raise MachineError if another driver has taken over a run whose lock this process took."""
    lock = _held.get(_path_of(run_folder))
    if lock is not None:
        lock.check()


class _RunLock:
    def __init__(self, run_folder: Path, *, still_s: float) -> None:
        self.path = _path_of(run_folder)
        self.successor: Holder | None = None
        self._run_folder = run_folder
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise MachineError(f"{self.path}: the run cannot be locked: {error.strerror}") from error
        try:
            self.holder = self._acquire(still_s)
        except BaseException:
            os.close(self._file)
            raise

    def _acquire(self, still_s: float) -> Holder:
        this_boot = boot_id()
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            decides_here = True
        except BlockingIOError:
            raise _refusal(self._run_folder, _read(self.path)) from None
        except OSError as error:
            if error.errno not in _NO_FLOCK:
                raise MachineError(f"{self.path}: the run cannot be locked: {error.strerror}") from error
            decides_here = False
        before = _read(self.path)
        if before is not None and not before.has_released and not (decides_here and before.boot_id == this_boot):
            self._wait_until_still(before, still_s)
        holder = Holder(
            host=socket.gethostname(),
            pid=os.getpid(),
            boot_id=this_boot,
            token=1 if before is None else before.token + 1,
        )
        try:
            self._write(holder)
        except OSError as error:
            raise MachineError(f"{self.path}: cannot be written: {error.strerror}; make room") from error
        return holder

    def _wait_until_still(self, before: Holder, still_s: float) -> None:
        """Raise if the holder on another machine, which `flock` may not know of, is still there."""
        logger.info("run %s was left by %s: watching it for %.0f s", self._run_folder, before, still_s)
        deadline = time.monotonic() + still_s
        while time.monotonic() < deadline:
            time.sleep(min(0.5, still_s / 10))
            now = _read(self.path)
            if now is not None and now != before:
                if now.has_released and now.is_same(before):
                    return
                raise _refusal(self._run_folder, now)

    def _write(self, holder: Holder) -> None:
        text = json.dumps(asdict(holder)).encode()
        assert len(text) < _RECORD_BYTES, f"{len(text)} bytes for the holder of a lock"
        os.pwrite(self._file, text.ljust(_RECORD_BYTES - 1) + b"\n", 0)
        os.fsync(self._file)  # other machines see it then

    def keep_beating(self, stop: threading.Event, beat_s: float) -> None:
        while not stop.wait(beat_s):
            try:
                self.check()
            except MachineError as error:
                logger.error("%s", error)
                os.kill(os.getpid(), signal.SIGINT)
                return
            self.holder = replace(self.holder, beat=self.holder.beat + 1)
            with suppress(OSError):  # the next beat may be written
                self._write(self.holder)

    def check(self) -> None:
        now = _read(self.path)
        if now is not None and not now.is_same(self.holder):
            self.successor = now
            raise MachineError(self.describe_loss())

    def describe_loss(self) -> str:
        return (
            f"{self._run_folder}: {self.successor} has taken over this run, because this driver gave no sign for too "
            "long; this driver ends and saves nothing more"
        )

    def release(self) -> None:
        if self.successor is None:
            with suppress(OSError):
                self._write(replace(self.holder, has_released=True))
        os.close(self._file)


_held: dict[Path, _RunLock] = {}
"""The locks of this process."""


def _path_of(run_folder: Path) -> Path:
    folder = run_folder.absolute()
    return folder.parent / LOCKS_FOLDER / f"{folder.name}.json"


def _read(path: Path) -> Holder | None:
    """Return the last holder; None without one, or where its record is damaged."""
    try:
        return Holder(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def boot_id() -> str:
    """Return the kernel's name of this boot of the machine; empty where there is none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
