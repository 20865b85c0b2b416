"""Child processes that do not outlive us: a session of their own, a death signal, and an end with a deadline.

A session of its own keeps a child out of reach of signals meant for us alone: Ctrl-C in a terminal and a scheduler's
SIGTERM go to whole process groups, and we want to take our children down in order.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def start_child(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    output: IO[bytes] | int,
    death_signal: signal.Signals = signal.SIGKILL,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start `command` with standard output and error going to `output`.

    It gets `death_signal` when the thread that calls this ends, however it ends: Linux ties the signal to the thread.
    """

    def die_with_parent() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, death_signal)

    return subprocess.Popen(  # noqa: S603 - callers build their own command lines
        list(command),
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=die_with_parent,
        pass_fds=tuple(pass_fds),
    )


def stop_child(child: subprocess.Popen[bytes], *, grace_s: float) -> None:
    """End a child and everything in its session. Harmless when it has ended."""
    signal_group(child.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        child.wait(timeout=grace_s)
    # Its own children may outlive it, whether it left in order or not.
    signal_group(child.pid, signal.SIGKILL)
    child.wait(timeout=grace_s)


def signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)
