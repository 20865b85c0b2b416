"""Child processes that never outlive their parent: one command, in a session of its own, ended with its parent.

`python -m megarl.system.guard COMMAND...` reads a pipe whose other end the parent keeps. The kernel closes that end
when the parent ends, even if it was killed. Linux's parent-death signal reaches only the direct child and would leave
the workers of SGLang or Ray behind; it is set as well, for a guard that is killed itself. Ctrl-C in a terminal and a
scheduler's SIGTERM go to whole process groups: in a session of its own the child does not get them, and the parent ends
its children in order.

With a lease (`system.lease`) the command outlives its parent for a while: the guard ends it, and removes the folder of
the lease, when no driver has renewed the lease for its duration.

Shared memory has a name in /dev/shm that outlives a killed process. Ending a session here also removes the names that
its processes have open.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from megarl.system.proc import FileIdentity, all_processes, files_held_below

SIGNAL_EXIT = 128
"""The guard exits with this plus the number of the signal that ended its command, as a shell does."""

_KILL_TIMEOUT_S = 10.0
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where the system keeps shared memory, not a file of ours
_PR_SET_PDEATHSIG = 1
LEASE_OPTION = "--lease"
_LEASE_POLL_S = 0.25
_libc = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardLease:
    """The time by which a command outlives its parent."""

    folder: Path
    """Removed at the end. Drivers renew the lease by touching `file` in it."""
    seconds: float

    @property
    def file(self) -> Path:
        """Its absence means that the lease was never taken, or was given back."""
        return self.folder / "lease"

    def wait_expired(self) -> None:
        """Return when no driver has renewed the lease for its duration, by this process's own clock."""
        renewed, deadline = self._renewed(), time.monotonic() + self.seconds
        while renewed is not None and time.monotonic() < deadline:
            time.sleep(_LEASE_POLL_S)
            if (now := self._renewed()) != renewed:
                renewed, deadline = now, time.monotonic() + self.seconds

    def _renewed(self) -> int | None:
        try:
            return self.file.stat().st_mtime_ns
        except OSError:
            return None


def start_guarded(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    output: IO[bytes] | int,
    lease: GuardLease | None = None,
) -> subprocess.Popen[bytes]:
    """Start `command` under a guard, with its output going to `output`; return the guard's process."""
    words = [] if lease is None else [LEASE_OPTION, str(lease.folder), str(lease.seconds)]
    return subprocess.Popen(  # noqa: S603 - callers build their own command lines
        [sys.executable, "-m", "megarl.system.guard", *words, *command],
        env=dict(environment),
        # Nothing is ever written: the guard notices when this end is closed, by a call or by our death.
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def stop_guarded(guard: subprocess.Popen[bytes], *, grace_s: float) -> None:
    """Terminate the command, then kill what is left of its process group. Does nothing to one that has ended."""
    segments = segments_of(guard.pid)
    guard.terminate()
    with suppress(subprocess.TimeoutExpired):
        guard.wait(timeout=grace_s)
    # Its children may still run, even if it ended in order.
    with suppress(ProcessLookupError):
        os.killpg(guard.pid, signal.SIGKILL)
    guard.wait(timeout=_KILL_TIMEOUT_S)
    remove(segments)
    assert guard.stdin is not None
    guard.stdin.close()


def segments_of(guard_pid: int) -> set[Path]:
    """Return the files in /dev/shm that the processes under a guard have open."""
    held: set[FileIdentity] = set()
    for pid in _session(guard_pid):
        # A process may end at any moment, or belong to another user.
        with suppress(OSError):
            held |= files_held_below(pid, _SHARED_MEMORY)
    segments = set()
    for path in _SHARED_MEMORY.iterdir():
        with suppress(OSError):
            status = path.stat()
            if (status.st_dev, status.st_ino) in held:
                segments.add(path)
    return segments


def _session(guard_pid: int) -> list[int]:
    """Return the processes that run under a guard, the guard included."""
    return [process.pid for process in all_processes() if process.session == guard_pid]


def remove(segments: Iterable[Path]) -> None:
    for path in segments:
        with suppress(OSError):
            path.unlink()


def main(command: list[str]) -> int:
    """Run the command; return its exit code, or 128 + n if signal n ended it."""
    lease = None
    if command[0] == LEASE_OPTION:
        lease, command = GuardLease(folder=Path(command[1]), seconds=float(command[2])), command[3:]
    child = subprocess.Popen(  # noqa: S603 - the command is our own
        command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_guard
    )
    signal.signal(signal.SIGTERM, lambda _number, _frame: child.terminate())
    orphaned = threading.Event()
    threading.Thread(target=_end_with_parent, args=(lease, orphaned), daemon=True).start()
    code = child.wait()
    _end_others()
    if lease is not None and orphaned.is_set():
        shutil.rmtree(lease.folder, ignore_errors=True)
    return code if code >= 0 else SIGNAL_EXIT - code


def _die_with_guard() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def die_with_parent(parent: int) -> None:
    """End this process with its parent, which may have ended already: `parent` is its pid."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _end_others() -> None:
    """Kill what the command has left behind: the parent, which would do so, may have ended."""
    segments = segments_of(os.getpid())
    for pid in _session(os.getpid()):
        if pid != os.getpid():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    remove(segments)


def _end_with_parent(lease: GuardLease | None, orphaned: threading.Event) -> None:
    # Not sys.stdin.read(): a thread that waits there holds a lock that the interpreter needs to exit.
    os.read(sys.stdin.fileno(), 1)
    orphaned.set()
    if lease is not None:
        lease.wait_expired()
        # The command first: `main` then removes the folder, into which nothing writes any more.
        _end_others()
        time.sleep(_KILL_TIMEOUT_S)
    # First, since the next line ends this process as well; open segments live on until their processes end.
    remove(segments_of(os.getpid()))
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
