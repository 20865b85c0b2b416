"""The lease of a run: what it started on Ray outlives a driver that dies, for the next driver of the run.

A driver that ends in order ends everything itself. One that is killed leaves its private Ray to the guard
(`system.guard`), or what it started on a Ray that it joined to an actor there (`cluster.leases`): either ends it
when no driver has renewed the lease for `cluster.lease_s`. The next driver of the same run takes the run's lock, reads
the record beside it, renews the lease and goes on with what runs there. A record of another program (recipe, code,
packages, environment), of another boot of the machine or of a Ray that is gone is not used.

Nor is a record that another user may have written: it would name a process to kill and a folder to remove.

The record is written when a driver that dies could be followed by another: once the run has a checkpoint.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import signal
import stat
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, TypeAlias

from megarl.env import program_environment
from megarl.system import guard as guard_module
from megarl.system.guard import LEASE_OPTION, GuardLease, remove, segments_of
from megarl.system.proc import ZOMBIE, read_stat
from megarl.system.run_lock import LOCKS_FOLDER, boot_id, check_held, held_by_this_process, held_token, is_held

logger = logging.getLogger(__name__)

TOKEN_FILE = "token"  # noqa: S105 - the name of the file
RAY_FOLDER = "/tmp/megarl-ray-"  # noqa: S108 - the beginning of a name that cannot be foreseen
"""Begins the names of the folders of private Rays."""
_CODE = Path(__file__).parent.parent
_PACKAGES = ("torch", "megatron-core", "transformer-engine", "sglang", "ray", "transformers")
_RENEWALS = 10
"""Times that a lease is renewed within its duration."""
_POLL_S = 0.05
_KILL_TIMEOUT_S = 10.0

PoolGpus: TypeAlias = Mapping[str, Sequence[Sequence[int]]]
"""The GPUs of each node that a pool holds, by pool; in the order of its bundles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedGuard:
    """The guard of a private Ray."""

    folder: str
    """Ray's files and its token, for this user alone; the guard removes it."""
    pid: int
    started: int
    """Clock ticks since the machine booted: the pid may be given again."""
    boot_id: str

    @property
    def is_running(self) -> bool:
        """Whether it is there still: a process of this user that guards this folder, which is this user's alone."""
        is_here = self.boot_id != "" and self.boot_id == boot_id()
        return is_here and _is_private(Path(self.folder)) and _is_guard(self.pid, self.started, self.folder)

    @classmethod
    def of(cls, folder: Path, pid: int) -> LeasedGuard:
        """Return the guard that runs as `pid`."""
        return cls(folder=str(folder), pid=pid, started=read_stat(pid).started, boot_id=boot_id())

    def end(self, *, grace_s: float) -> None:
        """End Ray and all that runs on it, and remove its folder."""
        if self.is_running:
            segments = segments_of(self.pid)
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
            self._wait_end(grace_s)
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._wait_end(_KILL_TIMEOUT_S)
            remove(segments)
        if _is_private(Path(self.folder)):
            shutil.rmtree(self.folder, ignore_errors=True)

    def _wait_end(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while _is_guard(self.pid, self.started, self.folder) and time.monotonic() < deadline:
            time.sleep(_POLL_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyRay:
    """A private Ray that starts while its run is still checked. Its driver may be another process, forked later."""

    address: str
    guard: LeasedGuard
    log: Path
    began: float
    """Seconds since the epoch."""
    pipe: IO[bytes]
    """The guard sees its end once no process has it open any more: at the death of the driver, to which it is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedRay:
    """A Ray with what a driver may leave on it."""

    address: str
    guard: LeasedGuard | None
    """None for a Ray that was joined; what was left there may have ended already."""
    seconds: float
    """Time by which it outlives its driver."""
    program: str
    """`digest_program` of what everything was started for."""
    gpus: PoolGpus
    run_id: str
    """The run's, from its lock: another one has taken over the place of this run."""


def find_leased(run_folder: Path) -> LeasedRay | None:
    """Return the Ray with what a driver of this run left, unless it has ended. Changes nothing."""
    try:
        fields = json.loads(_read_own(record_path(run_folder)))
        guard = None if fields["guard"] is None else LeasedGuard(**fields["guard"])
        leased = LeasedRay(**fields | {"guard": guard})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return leased if leased.guard is None or leased.guard.is_running else None


def _read_own(path: Path) -> bytes:
    """Return the contents of a file that nobody but this user can have written; raise OSError for another one."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            logger.warning("%s is not used: another user can write it", path)
            raise PermissionError(errno.EPERM, "another user can write it", str(path))
        return file.read()


def _is_private(folder: Path) -> bool:
    """Whether a folder is one of a private Ray, which this user alone enters."""
    if folder.parent != Path(RAY_FOLDER).parent or not folder.name.startswith(Path(RAY_FOLDER).name):
        return False
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def digest_program(recipe: str) -> str:
    """Return a digest of all that the processes of a run are made of: a process that runs keeps what it has loaded."""
    code = [(str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(_CODE.rglob("*.py"))]
    packages = []
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            packages.append((name, version(name)))
    parts = (recipe, sys.version, code, packages, sorted(program_environment().items()))
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def record_path(run_folder: Path) -> Path:
    folder = run_folder.absolute()
    return folder.parent / LOCKS_FOLDER / f"{folder.name}.lease.json"


def remove_record(run_folder: Path) -> None:
    path = record_path(run_folder)
    try:
        path.unlink(missing_ok=True)
    except OSError as error:  # what it names is ended all the same, and the next driver finds nothing there
        logger.warning("%s: cannot be removed: %s", path, error)


class Lease(ABC):
    """A driver's lease of what it started on a Ray, or adopted there."""

    def __init__(self, run_folder: Path, *, program: str, seconds: float, adopted: LeasedRay | None = None) -> None:
        """`program` is a digest. With 0 `seconds` nothing outlives the driver."""
        self.adopted = adopted
        self.seconds = seconds
        self._run_folder = run_folder
        self._program = program
        self._leased = adopted
        self._stop = threading.Event()
        self._renewing = threading.Thread(target=self._renew, name="lease", daemon=True)

    @property
    def outlives_driver(self) -> bool:
        """Whether anything may outlive the driver."""
        return self.seconds > 0

    @property
    def renew_every_s(self) -> float:
        return self.seconds / _RENEWALS

    @property
    def token(self) -> int:
        """This driver's, from the lock of the run."""
        return held_token(self._run_folder)

    @property
    def is_ours(self) -> bool:
        """Whether what runs there is this driver's to end: another one may have taken over the run."""
        return is_held(self._run_folder)

    def _started(self, address: str, guard: LeasedGuard | None) -> None:
        self._leased = LeasedRay(
            address=address,
            guard=guard,
            seconds=self.seconds,
            program=self._program,
            gpus={},
            run_id=run_id_of(self._run_folder),
        )

    def placed(self, gpus: PoolGpus) -> None:
        """Note the GPUs of the pools: while actors hold them, Ray tells no other process their numbers."""
        assert self._leased is not None, "started comes first"
        self._leased = replace(self._leased, gpus=gpus)

    def take(self) -> None:
        """Let everything be adopted by the next driver from now on."""
        if not self.outlives_driver:
            return
        assert self._leased is not None, "started comes first"
        check_held(self._run_folder)
        path = record_path(self._run_folder)
        partial = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            partial.unlink(missing_ok=True)
            with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
                file.write(json.dumps(asdict(self._leased)))
            partial.replace(path)
            self.renew()
        except OSError as error:
            logger.warning("%s: cannot be written: %s; if this driver dies, all is started again", path, error)
            return
        self.start_renewing()

    def start_renewing(self) -> None:
        if not self._renewing.is_alive():
            self._renewing.start()

    def _renew(self) -> None:
        while not self._stop.wait(self.renew_every_s):
            with suppress(OSError):  # a full disk: the next time may succeed
                self.renew()

    @abstractmethod
    def renew(self) -> None:
        """Let what was started outlive this driver by `seconds` from now."""

    def give_back(self) -> bool:
        """Stop renewing; return whether it is this driver's to end: another one may have taken over the run."""
        self._stop.set()
        if self._renewing.is_alive():
            self._renewing.join()
        if not self.is_ours:
            return False
        remove_record(self._run_folder)
        return True


class PrivateLease(Lease):
    """The lease of a private Ray: a file that its guard looks at."""

    def __init__(
        self,
        run_folder: Path,
        *,
        folder: Path,
        program: str,
        seconds: float,
        adopted: LeasedRay | None = None,
        early: EarlyRay | None = None,
    ) -> None:
        """`folder` is the Ray's."""
        super().__init__(run_folder, program=program, seconds=seconds, adopted=adopted)
        self.early = early
        self.of_guard = GuardLease(folder=folder, seconds=seconds)

    def started(self, address: str, guard: int) -> None:
        """Note the Ray that this driver started."""
        self._started(address, LeasedGuard.of(self.of_guard.folder, guard))

    def renew(self) -> None:
        self.of_guard.file.touch(mode=0o600)


class JoinedLease(Lease):
    """The lease of what a run starts on a Ray that it joins."""

    def __init__(self, run_folder: Path, address: str, *, program: str, seconds: float, is_continued: bool) -> None:
        """Without `is_continued` what an earlier driver left is not adopted."""
        leased = find_leased(run_folder) if is_continued and seconds else None
        is_same = leased is not None and (leased.guard, leased.address, leased.program) == (None, address, program)
        super().__init__(run_folder, program=program, seconds=seconds, adopted=leased if is_same else None)
        run_id = run_id_of(run_folder)
        assert run_id, "the lock comes first"
        self.namespace = f"megarl-{run_id}"
        """Ray's name for the names of this run: other runs may have joined it, and their folders may have the same path
        on other disks."""
        self.renew_by: Callable[[], None] = lambda: None
        if self.adopted is None:
            self._started(address, None)

    def renew(self) -> None:
        self.renew_by()


def run_id_of(run_folder: Path) -> str:
    """Return the random id of a run whose lock this process holds; empty without the lock."""
    holder = held_by_this_process(run_folder)
    return "" if holder is None else holder.run_id


def _is_guard(pid: int, started: int, folder: str) -> bool:
    """Whether a process of this user is the guard of a folder."""
    process = Path("/proc") / str(pid)
    try:
        stat_line, owner = read_stat(pid), process.stat().st_uid
        words = process.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return False
    is_there = stat_line.started == started and stat_line.state != ZOMBIE and owner == os.geteuid()
    return is_there and f"-m {guard_module.__name__} " in words and f" {LEASE_OPTION} {folder} " in f"{words} "
