"""The lock of a run: one driver at a time, by flock or by its beat, also where several machines share the folder.

`flock` decides between processes of one machine, and between machines where the file system passes it on. Some file
systems do not (NFS with `nolock`, Lustre without `flock`). A driver therefore writes who it is and a beat every few
seconds; a driver on another machine takes the lock only after the beat has stood still for a while. Of two that take it
at the same moment, the one whose record is there a little later has it.

Each holder has a token one higher than the holder before: the epoch of the run. A driver that was frozen until another
took its place finds the other's token: it is cancelled, and commits no checkpoint. So is a driver that could not renew
its record for half of the time after which others count it as gone, unless `flock` keeps all others out. A lower token
than one's own is the late beat of such a driver, and is overwritten.

The file is beside the run folders, since the folder of an earlier run is renamed. It is never removed: a process that
waits for a removed file and one that made a new file would both hold the lock.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megarl.errors import MachineError

LOCKS_FOLDER = ".locks"
STILL_S = 60.0
"""A beat that stands still for this long belongs to a driver that is gone. Half of it is what a network disk may take
to come back without ending the runs on it."""
_BEATS = 12
"""Beats within this time."""
_REFUSED_S = 1.0
"""Another process that only looks whether the lock is free has it for a moment."""
_RECORD_BYTES = 512
"""A record has always this size: it is overwritten in place, which needs no room on a full disk."""
_NO_FLOCK = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MOUNTS = Path("/proc/self/mountinfo")
_ONE_MACHINE = {"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"}
"""File systems that one machine mounts: `flock` decides there."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """One driver that holds or held the lock."""

    host: str
    pid: int
    boot_id: str
    """The kernel's: equal for all containers of a machine, another one after a reboot. Empty where it is not known."""
    token: int
    run_id: str = ""
    """Random, and the same for all holders: what is shared with other runs, as a Ray cluster, knows the run by it."""
    nonce: str = ""
    """Random: two containers may have the same host name and process id."""
    beat: int = 0
    has_released: bool = False

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def is_same(self, other: Holder) -> bool:
        return replace(self, beat=0, has_released=False) == replace(other, beat=0, has_released=False)


@contextmanager
def run_lock(run_folder: Path, *, beat_s: float | None = None, still_s: float = STILL_S) -> Iterator[Holder]:
    """Hold the lock of a run inside the block; raise MachineError if another driver holds it.

    A driver that loses the lock is told (`told_of_loss`), or interrupted as by Ctrl-C, and the block then ends with a
    MachineError.
    """
    lock = _RunLock(run_folder, still_s=still_s)
    _held[lock.path] = lock
    stop = threading.Event()
    beating = threading.Thread(
        target=lock.keep_beating, args=(stop, beat_s or still_s / _BEATS), name="run-lock", daemon=True
    )
    watching = threading.Thread(target=lock.watch, args=(stop,), name="run-lock-watch", daemon=True)
    beating.start()
    watching.start()
    try:
        yield lock.holder
    except BaseException as error:
        if lock.loss:
            raise MachineError(lock.loss) from error
        raise
    finally:
        stop.set()
        try:
            watching.join()
        except KeyboardInterrupt:
            if not lock.loss:
                raise
            watching.join()  # its own interrupt came late
        beating.join(still_s)  # it may wait for a disk that does not answer
        del _held[lock.path]
        lock.release(is_idle=not beating.is_alive())


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


def newest_token(run_folder: Path) -> int:
    """Return the token of the last driver that took the lock of a run; 0 where its record cannot be read."""
    holder = _read(_path_of(run_folder))
    return 0 if holder is None else holder.token


def _refusal(run_folder: Path, holder: Holder | None) -> MachineError:
    who = "another process" if holder is None else str(holder)
    return MachineError(
        f"{run_folder}: {who} is running this run now; wait for it or end it, or give this one another "
        "name (--set run.name=...)"
    )


def _taken_over(run_folder: Path, successor: Holder) -> str:
    return (
        f"{run_folder}: {successor} has taken over this run, because this driver gave no sign for too long; "
        "this driver ends and saves nothing more"
    )


def check_held(run_folder: Path, token: int = 0) -> None:
    """Raise MachineError if this process took the lock of a run and may have lost it since.

    A process that a driver started has the driver's `token`: it raises if a later driver holds the lock.
    """
    path = _path_of(run_folder)
    lock = _held.get(path)
    if lock is not None:
        lock.check()
    elif token and (now := _read(path)) is not None and now.token > token:
        raise MachineError(_taken_over(run_folder, now))


def is_held(run_folder: Path) -> bool:
    """Whether what runs for a run is this driver's to end: no other one has taken over."""
    try:
        check_held(run_folder)
    except MachineError as error:
        logger.warning("%s", error)
        return False
    return True


def held_by_this_process(run_folder: Path) -> Holder | None:
    """Return this process as the holder of a run's lock, None where it has not taken it."""
    lock = _held.get(_path_of(run_folder))
    return None if lock is None else lock.holder


def held_token(run_folder: Path) -> int:
    """Return the epoch of the run that this process drives; 0 without a lock."""
    holder = held_by_this_process(run_folder)
    return 0 if holder is None else holder.token


@contextmanager
def told_of_loss(run_folder: Path, tell: Callable[[], object]) -> Iterator[None]:
    """Have `tell` called, in another thread, when this process loses the lock of a run inside the block."""
    lock = _held.get(_path_of(run_folder))
    if lock is None:
        yield
        return
    lock.listeners.append(tell)
    try:
        yield
    finally:
        lock.listeners.remove(tell)


class _RunLock:
    def __init__(self, run_folder: Path, *, still_s: float) -> None:
        self.path = _path_of(run_folder)
        self.loss = ""
        """Why this process no longer holds the lock; empty as long as it does."""
        self.listeners: list[Callable[[], object]] = []
        self._is_raised = False
        """Whether the driver knows of the loss by an error: it is not interrupted as well."""
        self._keeps_out = False
        """Whether `flock` keeps all others out, whatever the beats say."""
        self._run_folder = run_folder
        self._still_s = still_s
        try:
            _make_private(self.path.parent)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise MachineError(
                f"{self.path}: the run cannot be locked: {error.strerror}; if the folder belongs to another user, give "
                "this run another place (run.folder)"
            ) from error
        try:
            self.holder = self._acquire()
        except BaseException:
            os.close(self._file)
            raise
        self._num_proofs = 0
        """Beats after which the record was this driver's."""
        self._silent_s = 0.0
        """Time since the last one, without that in which this process did not run."""

    def _acquire(self) -> Holder:
        this_boot = boot_id()
        decides_here = self._flock()
        try:
            before = _parse(self.path.read_bytes())
        except OSError as error:
            raise MachineError(f"{self.path}: the holder of the run cannot be read: {error.strerror}") from error
        was_here = before is not None and this_boot != "" and before.boot_id == this_boot
        is_gone = before is None or before.has_released
        if before is not None and not is_gone and not (decides_here and was_here):
            self._wait_until_still(before)
        holder = Holder(
            host=socket.gethostname(),
            pid=os.getpid(),
            boot_id=this_boot,
            token=1 if before is None else before.token + 1,
            run_id=(before and before.run_id) or secrets.token_hex(8),
            nonce=secrets.token_hex(8),
        )
        try:
            self._write(holder)
        except OSError as error:
            raise MachineError(f"{self.path}: cannot be written: {error.strerror}; make room") from error
        self._keeps_out = decides_here and _is_of_one_machine(self.path)
        # A driver of another machine waits for the beat of one that died here, and for nothing else.
        if not (self._keeps_out or (decides_here and was_here and not is_gone)):
            time.sleep(self._still_s / 10)
            now = _read(self.path)
            if now is None or not now.is_same(holder):
                raise _refusal(self._run_folder, now)
        return holder

    def _flock(self) -> bool:
        """Take the lock; return whether the file system has locks. Raise if another driver has it."""
        deadline = time.monotonic() + _REFUSED_S
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise _refusal(self._run_folder, _read(self.path)) from None
                time.sleep(_REFUSED_S / 20)
            except OSError as error:
                if error.errno not in _NO_FLOCK:
                    raise MachineError(f"{self.path}: the run cannot be locked: {error.strerror}") from error
                return False

    def _wait_until_still(self, before: Holder) -> None:
        """Raise if the holder on another machine, which `flock` may not know of, is still there."""
        still_s = self._still_s
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
        """Renew the record until this driver has lost the lock; `watch` says so, also where a disk does not answer."""
        while not stop.wait(beat_s) and not self.loss:
            self._is_recorded()
            if self.loss:
                return
            with suppress(OSError):  # the next beat may be written
                self.holder = replace(self.holder, beat=self.holder.beat + 1)
                self._write(self.holder)
                self._num_proofs += self._is_recorded()

    def watch(self, stop: threading.Event) -> None:
        """Have this driver cancelled when it has lost the lock, or may have lost it."""
        poll_s, num_proofs, last = min(0.5, self._still_s / 40), 0, time.monotonic()
        while not stop.wait(poll_s):
            now = time.monotonic()
            # A process that was frozen finds out first whether another one has taken over.
            self._silent_s = min(now - last, 2 * poll_s) + (self._silent_s if self._num_proofs == num_proofs else 0.0)
            num_proofs, last = self._num_proofs, now
            self._fence()
            if self.loss:
                logger.error("%s", self.loss)
                listeners = tuple(self.listeners)  # one that is told leaves at once
                for tell in listeners:
                    tell()
                if not (listeners or self._is_raised or stop.is_set()):
                    os.kill(os.getpid(), signal.SIGINT)
                return

    def check(self) -> None:
        """Raise MachineError if another driver has the lock, or may have it by now."""
        if not self._is_recorded():
            self._fence()
        if self.loss:
            self._is_raised = True
            raise MachineError(self.loss)

    def _is_recorded(self) -> bool:
        """Whether the record is this driver's. One that has taken over is noted; of a lower token it is a late beat,
        unless it is of another file: somebody has removed the one that this driver has locked.
        """
        now = _read(self.path)
        if now is None or now.is_same(self.holder):
            return now is not None
        if now.token >= self.holder.token or now.run_id != self.holder.run_id:
            self.loss = _taken_over(self._run_folder, now)
        return False

    def _fence(self) -> None:
        if not self.loss and not self._keeps_out and self._silent_s > self._still_s / 2:
            self.loss = (
                f"{self._run_folder}: its lock, {self.path}, could not be renewed for {self._silent_s:.0f} s, and "
                "another driver may take over; this driver ends and saves nothing more"
            )

    def release(self, *, is_idle: bool) -> None:
        """Let the next driver take the lock at once; `is_idle`: no thread still uses the file."""
        if not is_idle:
            return
        if not self.loss:
            with suppress(OSError):
                self._write(replace(self.holder, has_released=True))
        os.close(self._file)


_held: dict[Path, _RunLock] = {}
"""The locks of this process."""


def _path_of(run_folder: Path) -> Path:
    folder = run_folder.absolute()
    return folder.parent / LOCKS_FOLDER / f"{folder.name}.json"


def _make_private(folder: Path) -> None:
    """Make the folder of the locks; only its owner enters it, since drivers trust the records in it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.stat()
    if status.st_uid == os.geteuid() and status.st_mode & 0o077:
        folder.chmod(0o700)


def _is_of_one_machine(path: Path) -> bool:
    """Whether no other machine mounts the disk of a file; False where that is not known."""
    try:
        device = path.stat().st_dev
        lines = [line.split() for line in _MOUNTS.read_text().splitlines()]
    except OSError:
        return False
    number = f"{os.major(device)}:{os.minor(device)}"
    return any(words[2] == number and words[words.index("-") + 1] in _ONE_MACHINE for words in lines)


def _read(path: Path) -> Holder | None:
    """Return the last holder; None without one, or where its record is damaged or cannot be read."""
    try:
        return _parse(path.read_bytes())
    except OSError:
        return None


def _parse(text: bytes) -> Holder | None:
    try:
        holder = Holder(**json.loads(text))
    except (ValueError, TypeError):
        return None
    return holder if isinstance(holder.token, int) and isinstance(holder.run_id, str) else None


def boot_id() -> str:
    """Return the kernel's name of this boot of the machine; empty where there is none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
