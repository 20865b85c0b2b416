"""The lease of a run: what it started on Ray outlives a driver that dies, for the next driver of the run.

A driver that ends in order ends everything itself. One that is killed leaves its private Ray to the guard
(`system.guard`), or what it started on a Ray that it joined to an actor there (`cluster.leases`): either ends it
when no driver has renewed the lease for `cluster.lease_s`. The next driver of the same run takes the run's lock, reads
the record beside it, renews the lease and goes on with what runs there. A record of another program (recipe, code,
packages, environment), of another boot of the machine or of a Ray that is gone is not used.

The record is written when a driver that dies could be followed by another: once the run has a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeAlias

from megarl.env import program_environment
from megarl.errors import MachineError
from megarl.system.guard import GuardLease, remove, segments_of
from megarl.system.proc import ZOMBIE, read_stat
from megarl.system.run_lock import LOCKS_FOLDER, boot_id, check_held

logger = logging.getLogger(__name__)

TOKEN_FILE = "token"  # noqa: S105 - the name of the file
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
        return self.boot_id == boot_id() and _is_running(self.pid, self.started)

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
        shutil.rmtree(self.folder, ignore_errors=True)

    def _wait_end(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self.is_running and time.monotonic() < deadline:
            time.sleep(_POLL_S)


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


def find_leased(run_folder: Path) -> LeasedRay | None:
    """Return the Ray with what a driver of this run left, unless it has ended. The caller holds the run's lock."""
    path = record_path(run_folder)
    try:
        fields = json.loads(path.read_bytes())
        guard = None if fields["guard"] is None else LeasedGuard(**fields["guard"])
        leased = LeasedRay(**fields | {"guard": guard})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    if leased.guard is None or leased.guard.is_running:
        return leased
    path.unlink(missing_ok=True)
    return None


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

    def _started(self, address: str, guard: LeasedGuard | None) -> None:
        self._leased = LeasedRay(address=address, guard=guard, seconds=self.seconds, program=self._program, gpus={})

    def placed(self, gpus: PoolGpus) -> None:
        """Note the GPUs of the pools: while actors hold them, Ray tells no other process their numbers."""
        assert self._leased is not None, "started comes first"
        self._leased = replace(self._leased, gpus=gpus)

    def take(self) -> None:
        """Let everything be adopted by the next driver from now on."""
        if not self.outlives_driver:
            return
        assert self._leased is not None, "started comes first"
        path = record_path(self._run_folder)
        try:
            path.with_suffix(".tmp").write_text(json.dumps(asdict(self._leased)))
            path.with_suffix(".tmp").replace(path)
            self.renew()
        except OSError as error:
            logger.warning("%s: cannot be written: %s; if this driver dies, all is started again", path, error)
            return
        self.start_renewing()

    def start_renewing(self) -> None:
        if not self._renewing.is_alive():
            self._renewing.start()

    def _renew(self) -> None:
        while not self._stop.wait(self.seconds / _RENEWALS):
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
        try:
            check_held(self._run_folder)
        except MachineError:
            return False
        record_path(self._run_folder).unlink(missing_ok=True)
        return True


class PrivateLease(Lease):
    """The lease of a private Ray: a file that its guard looks at."""

    def __init__(
        self, run_folder: Path, *, folder: Path, program: str, seconds: float, adopted: LeasedRay | None = None
    ) -> None:
        """`folder` is the Ray's."""
        super().__init__(run_folder, program=program, seconds=seconds, adopted=adopted)
        self.of_guard = GuardLease(folder=folder, seconds=seconds)

    def started(self, address: str, guard: int) -> None:
        """Note the Ray that this driver started."""
        started = read_stat(guard).started
        folder = str(self.of_guard.folder)
        self._started(address, LeasedGuard(folder=folder, pid=guard, started=started, boot_id=boot_id()))

    def renew(self) -> None:
        self.of_guard.file.touch(mode=0o600)


class JoinedLease(Lease):
    """The lease of what a run starts on a Ray that it joins."""

    def __init__(self, run_folder: Path, address: str, *, program: str, seconds: float, is_continued: bool) -> None:
        """Without `is_continued` what an earlier driver left is not adopted."""
        leased = find_leased(run_folder) if is_continued and seconds else None
        is_same = leased is not None and (leased.guard, leased.address, leased.program) == (None, address, program)
        super().__init__(run_folder, program=program, seconds=seconds, adopted=leased if is_same else None)
        folder = hashlib.sha256(str(run_folder.absolute()).encode()).hexdigest()
        self.namespace = f"megarl-{folder[:16]}"
        """Ray's name for the names of this run: other runs may have joined it."""
        self.renew_by: Callable[[], None] = lambda: None
        if self.adopted is None:
            self._started(address, None)

    def renew(self) -> None:
        self.renew_by()


def _is_running(pid: int, started: int) -> bool:
    try:
        process = read_stat(pid)
    except OSError:
        return False
    return process.started == started and process.state != ZOMBIE
