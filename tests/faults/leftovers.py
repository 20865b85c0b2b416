"""What a run leaves on the machine: processes, listening sockets, shared memory.

A run is given a mount namespace with a /dev/shm of its own: so its shared memory is known from that of other runs on
the machine, and its processes by their namespace, whoever their parent is by now and whatever they call themselves. Who
may not make one finds the processes by a mark in their environment, as far as they have not overwritten it, and counts
everything in /dev/shm.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import psutil

MARK = "MEGARL_TEST_RUN"

_SHARED_MEMORY = Path("/dev/shm")
_CLONE_NEWNS = 0x20000
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftovers:
    processes: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    """On which they listen."""
    segments: tuple[str, ...] = ()
    """In /dev/shm."""


class Footprint:
    """Everything of one run. Give `environment` and `enter` to the process that starts the rest."""

    def __init__(self, memory: Path, notes: Path) -> None:
        self._mark = uuid4().hex
        self._memory = memory
        self._notes = notes
        self._held: dict[str, int] = {}
        """Open descriptors of namespaces: the number of one that is gone is given to the next, of whatever run."""
        self._before = _names(_SHARED_MEMORY)
        self.is_private = os.geteuid() == 0

    @property
    def environment(self) -> dict[str, str]:
        return {MARK: self._mark}

    def enter(self) -> None:
        """In the new process, before its program begins."""
        if self.is_private:
            _check(_libc.unshare(_CLONE_NEWNS), "unshare")
            _check(_libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None), "mount /")
            _check(_libc.mount(bytes(self._memory), bytes(_SHARED_MEMORY), None, _MS_BIND, None), "mount /dev/shm")
            (self._notes / str(os.getpid())).write_text(_namespace_of("self") or "")

    def hold(self) -> None:
        """After a process has entered, while it is there."""
        for path in self._notes.iterdir():
            if (namespace := path.read_text()) not in self._held:
                self._held[namespace] = os.open(f"/proc/{path.name}/ns/mnt", os.O_RDONLY)

    def let_go(self) -> None:
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()

    def processes(self) -> list[psutil.Process]:
        return [
            process
            for process in psutil.process_iter()
            if (_namespace_of(process.pid) in self._held or _mark_of(process.pid) == self._mark) and _is_alive(process)
        ]

    def leftovers(self) -> Leftovers:
        found = self.processes()
        segments = _names(self._memory) if self.is_private else _names(_SHARED_MEMORY) - self._before
        return Leftovers(
            processes=tuple(f"{process.pid} {_name(process)}" for process in found),
            ports=tuple(port for process in found for port in _ports(process)),
            segments=tuple(sorted(segments)),
        )

    def after(self, timeout_s: float) -> Leftovers:
        """What is still there when everything should be gone, or after so many seconds."""
        deadline = time.monotonic() + timeout_s
        while (found := self.leftovers()) != Leftovers() and time.monotonic() < deadline:
            time.sleep(0.1)
        return found


@contextmanager
def nothing_left(*, within_s: float = 10.0) -> Iterator[Footprint]:
    """Whatever is started inside with the footprint is gone soon after the end; ended, where it is not."""
    memory = Path(tempfile.mkdtemp(prefix="megarl-test-", dir=_SHARED_MEMORY))
    with tempfile.TemporaryDirectory() as notes:
        footprint = Footprint(memory, Path(notes))
        try:
            yield footprint
            found = footprint.after(within_s)
            assert found == Leftovers(), f"left after {within_s:g} s: {found}"
        finally:
            for process in footprint.processes():
                process.send_signal(signal.SIGKILL)
            footprint.let_go()
            shutil.rmtree(memory, ignore_errors=True)


def _check(code: int, what: str) -> None:
    if code != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def _namespace_of(pid: int | str) -> str | None:
    try:
        return str(Path(f"/proc/{pid}/ns/mnt").readlink())
    except OSError:
        return None


def _mark_of(pid: int) -> str | None:
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    prefix = f"{MARK}=".encode()
    return next((entry[len(prefix) :].decode() for entry in entries if entry.startswith(prefix)), None)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _name(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()).strip()[:120] or process.name()
    except psutil.Error:
        return "?"


def _ports(process: psutil.Process) -> list[int]:
    try:
        connections = process.net_connections(kind="tcp")
    except psutil.Error:
        return []
    return sorted({item.laddr.port for item in connections if item.status == psutil.CONN_LISTEN})
