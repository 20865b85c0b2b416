"""Processes as Linux describes them in /proc, and limits on the time and memory of code in this one."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TypeAlias

ZOMBIE = "Z"
"""The state of a process that has ended and that its parent has not waited for yet."""

FileIdentity: TypeAlias = tuple[int, int]
"""Device and inode of a file."""

_PROC = Path("/proc")
_LISTS_CHILDREN = (_PROC / "thread-self" / "children").exists()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStat:
    pid: int
    name: str
    """The first 15 bytes of its title."""
    state: str
    """A letter, as ps shows it."""
    parent: int
    group: int
    session: int
    started: int
    """Clock ticks since the machine booted: with `pid`, a name that is never given again."""
    cpu_s: float
    """CPU time that it has used, without that of its children."""


def read_stat(pid: int) -> ProcessStat:
    """Raise FileNotFoundError or ProcessLookupError for a process that is gone."""
    # The name stands in parentheses and may hold any character, parentheses and spaces included.
    before, _, after = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")
    fields = after.split()
    return ProcessStat(
        pid=pid,
        name=before.partition("(")[2],
        state=fields[0],
        parent=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        started=int(fields[19]),
        cpu_s=(int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"),
    )


def all_processes() -> Iterator[ProcessStat]:
    for folder in _PROC.iterdir():
        if folder.name.isdigit():
            with suppress(OSError):  # it ended meanwhile, or is hidden from this user
                yield read_stat(int(folder.name))


def descendants(root: int) -> set[int]:
    """Return the process numbers of `root` and of all processes below it."""
    family, left = set[int](), [root]
    while left:
        pid = left.pop()
        family.add(pid)
        left += _children(pid)
    return family


def _children(pid: int) -> list[int]:
    """Return the children of a process, where the kernel lists them without a look at all other processes."""
    if not _LISTS_CHILDREN:
        return [process.pid for process in all_processes() if process.parent == pid]
    children: list[int] = []
    with suppress(OSError):  # it ended meanwhile, here and below
        for thread in (_PROC / str(pid) / "task").iterdir():
            with suppress(OSError):
                children += map(int, (thread / "children").read_text().split())
    return children


def kill_marked(name: str, value: str) -> None:
    """Kill every process but this one that has this environment variable, whatever session it has moved to."""
    mark = f"{name}={value}".encode()
    # Twice: one that is just being forked appears in the second round.
    for _ in range(2):
        for folder in _PROC.iterdir():
            if folder.name.isdigit() and int(folder.name) != os.getpid():
                with suppress(OSError):  # it ended meanwhile, or is another user's
                    if mark in (folder / "environ").read_bytes().split(b"\0"):
                        os.kill(int(folder.name), signal.SIGKILL)


def files_held_below(pid: int, folder: Path) -> set[FileIdentity]:
    """Return the files below `folder` that a process has mapped or open.

    By identity: a semaphore is mapped under a name that is gone, as the C library makes it under one name and links it
    to another.
    """
    start = f"{folder}/"
    files = set()
    for line in (_PROC / str(pid) / "maps").read_text().splitlines():
        _, _, _, device, inode, *path = line.split(maxsplit=5)
        if path and path[0].startswith(start):
            major, minor = (int(number, base=16) for number in device.split(":"))
            files.add((os.makedev(major, minor), int(inode)))
    for descriptor in (_PROC / str(pid) / "fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile; the others still count
            if str(descriptor.readlink()).startswith(start):
                status = descriptor.stat()
                files.add((status.st_dev, status.st_ino))
    return files


def resident_bytes(pid: int) -> int:
    """Return how much memory a process holds; 0 for one that is gone."""
    with suppress(OSError):
        return _memory_pages(str(pid))[1] * resource.getpagesize()
    return 0


def own_address_space_bytes() -> int:
    return _memory_pages("self")[0] * resource.getpagesize()


def _memory_pages(process: str) -> list[int]:
    """Return the size of the address space and of what of it is in memory, then other sizes."""
    # Plain calls: this is read around every rendered chat, and a Path with its file costs six times as much.
    descriptor = os.open(f"{_PROC}/{process}/statm", os.O_RDONLY)
    try:
        return [int(number) for number in os.read(descriptor, 4096).split()]
    finally:
        os.close(descriptor)


@contextmanager
def bounded(*, seconds: float, num_bytes: int) -> Iterator[None]:
    """Raise TimeoutError if the body takes longer, MemoryError if it allocates more.

    Time is limited only in the main thread, where signals arrive. The memory limit is that of the whole process.
    """
    with _limited_memory(num_bytes), limited_time(seconds):
        yield


@contextmanager
def limited_time(seconds: float) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    began = time.monotonic()
    handler = signal.signal(signal.SIGALRM, _too_long)
    remaining_s, interval_s = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if remaining_s:
            # An alarm that was set before goes off at its time.
            left_s = max(remaining_s - (time.monotonic() - began), 1e-3)
            signal.setitimer(signal.ITIMER_REAL, left_s, interval_s)


@contextmanager
def limited_cpu(seconds: float) -> Iterator[None]:
    """Raise TimeoutError if the body uses more CPU time, in the main thread: waiting for the machine does not count."""
    handler = signal.signal(signal.SIGPROF, _too_long)
    # Again every second: code that catches everything may catch the first one.
    signal.setitimer(signal.ITIMER_PROF, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)


def _too_long(_number: int, _frame: FrameType | None) -> None:
    raise TimeoutError


@contextmanager
def _limited_memory(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = own_address_space_bytes() + num_bytes
    for bound in (soft, hard):
        limit = limit if bound == resource.RLIM_INFINITY else min(limit, bound)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
