"""Child processes that never outlive us: one command, in a session of its own, ended with whoever asked for it.

`python -m megarl.guard COMMAND...` has a pipe as its standard input, whose other end the parent keeps: the kernel
closes that end with the parent, even one that was killed. Linux's own parent-death signal would reach only the direct
child, and the workers of SGLang or Ray would stay behind; it is set besides, for a guard that is killed itself. The
session keeps the child out of reach of signals meant for us alone: Ctrl-C in a terminal and a scheduler's SIGTERM go
to whole process groups, and we take our children down in order.

Shared memory has a name in /dev/shm that outlives a process which is killed, and SGLang's are: who ends a session here
takes away the names that its processes have open.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

SIGNAL_EXIT = 128
"""What the guard adds to the number of the signal that ended its command, as a shell does."""

_KILL_TIMEOUT_S = 10.0
_LOOK_S = 0.05
_SHARED_MEMORY = "/dev/shm/"  # noqa: S108 - where the system keeps shared memory, not a file of ours
_REMOVED = " (deleted)"
"""What the kernel adds to a name that is gone."""
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def start_guarded(
    command: Sequence[str], *, environment: Mapping[str, str], output: IO[bytes] | int
) -> subprocess.Popen[bytes]:
    """Start `command` under a guard; what it prints goes to `output`. The process returned is the guard."""
    return subprocess.Popen(  # noqa: S603 - callers build their own command lines
        [sys.executable, "-m", "megarl.guard", *command],
        env=dict(environment),
        # Nothing is ever written: the guard ends everything when this end is closed, by us or by our death.
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def stop_guarded(guard: subprocess.Popen[bytes], *, grace_s: float) -> None:
    """Ask the command itself to end, then end what is left of its process group. Harmless when it has ended."""
    segments = segments_of(guard.pid)
    guard.terminate()
    deadline = time.monotonic() + grace_s
    while guard.poll() is None and time.monotonic() < deadline:
        # Some is made only on the way out, and whoever would remove it is ended below.
        segments |= segments_of(guard.pid)
        time.sleep(_LOOK_S)
    # Children may outlive it, whether it left in order or not.
    with suppress(ProcessLookupError):
        os.killpg(guard.pid, signal.SIGKILL)
    guard.wait(timeout=_KILL_TIMEOUT_S)
    remove(segments)
    assert guard.stdin is not None
    guard.stdin.close()


def segments_of(guard_pid: int) -> set[Path]:
    """Shared memory, by name, of all processes that run under a guard."""
    found: set[Path] = set()
    for process in Path("/proc").glob("[0-9]*"):
        # A process may end, or not be ours to look at, at any of these lines.
        with suppress(OSError):
            if int((process / "stat").read_text().rpartition(")")[2].split()[3]) != guard_pid:
                continue
            mapped = (line[line.find("/") :] for line in (process / "maps").read_text().splitlines())
            found |= {Path(path) for path in mapped if path.startswith(_SHARED_MEMORY)}
            for descriptor in (process / "fd").iterdir():
                path = str(descriptor.readlink())
                if path.startswith(_SHARED_MEMORY):
                    found.add(Path(path))
    return {path for path in found if not path.name.endswith(_REMOVED)}


def remove(segments: Iterable[Path]) -> None:
    for path in segments:
        with suppress(OSError):
            path.unlink()


def main(command: list[str]) -> int:
    """The command's exit code; 128 + n where signal n ended it."""
    child = subprocess.Popen(  # noqa: S603 - the command is our own
        command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_guard
    )
    signal.signal(signal.SIGTERM, lambda _number, _frame: child.terminate())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    code = child.wait()
    return code if code >= 0 else SIGNAL_EXIT - code


def _die_with_guard() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_with_parent() -> None:
    # Not sys.stdin: a thread that waits there holds a lock which the interpreter needs to exit.
    os.read(sys.stdin.fileno(), 1)
    # Now, since the next line ends this process as well; who has them open keeps them until it ends.
    remove(segments_of(os.getpid()))
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
