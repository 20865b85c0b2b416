"""The driver in a forked process: if it is killed, another one is forked, with everything imported and read already.

The process of the command waits, passes signals on and ends as its driver ended. It holds nothing of the run: a command
that is killed takes its driver along.

`python -m megarl.run.driver_process RUN` prints the notice of a driver that was killed, or was ended by Ray's library,
and could not print one itself. It reads a pipe whose other end the driver holds. A byte means that the driver printed
its own ending; end of file without a byte means that it could not.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, TypeVar

from megarl.system.guard import SIGNAL_EXIT, die_with_parent
from megarl.system.lease import find_leased

Choice = TypeVar("Choice")

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_MAX_RESTARTS = 3
"""Drivers that may be killed between two checkpoints."""
_PRINTED = b"."
_WAIT_S = 5.0


def drive_again(
    drive: Callable[[Choice], None],
    run_folder: Path,
    resume: Choice,
    *,
    auto: Choice,
    notify: Callable[[str], None],
    leave: Callable[[], None] = lambda: None,
) -> None:
    """Call `drive` in a forked process, and again if that is killed and has left what the next one can adopt.

    It gets `resume`, and once the run has a checkpoint `auto`. `leave` gives up here what the driver has now.

    What it raises is raised here. If another driver cannot help, this process ends as the driver did.
    """
    latest = run_folder / "checkpoints" / "latest"
    saved, num_restarts = None, 0
    while True:
        status, asked = _run_forked(partial(drive, resume), leave)
        if status == 0:
            return
        newest = latest.resolve() if latest.exists() else None
        num_restarts = num_restarts + 1 if newest == saved else 1
        saved = newest
        if status > 0 or asked or num_restarts > _MAX_RESTARTS or find_leased(run_folder) is None:
            _end_like(status)
        if newest is not None:
            resume = auto
        notify(f"the driver was killed ({signal.Signals(-status).name}); another one takes over what it left")


def _run_forked(drive: Callable[[], None], leave: Callable[[], None]) -> tuple[int, Sequence[int]]:
    """Return the exit code of the process, negative for a signal, and the signals that were passed on to it.

    Raise what `drive` raised.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    gc.freeze()  # pages of what is read once stay shared
    with tempfile.TemporaryFile() as answer:
        earlier = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            die_with_parent(parent)
            os.setpgid(0, 0)  # a terminal's Ctrl-C comes once: by way of the parent
            signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # it may still write to the terminal
            signal.pthread_sigmask(signal.SIG_SETMASK, earlier)
            os._exit(_answer(drive, answer))
        with _passing_signals_on(pid) as asked:
            signal.pthread_sigmask(signal.SIG_SETMASK, earlier)
            leave()
            _, status = os.waitpid(pid, 0)
        answer.seek(0)
        if content := answer.read():
            error, trace = pickle.loads(content)  # noqa: S301 - our own process wrote it
            raise error from _DriverTraceback(trace)
    return os.waitstatus_to_exitcode(status), asked


@contextmanager
def _passing_signals_on(pid: int) -> Iterator[Sequence[int]]:
    """Yield the signals that were passed on so far."""
    passed: list[int] = []

    def pass_on(number: int, _: object) -> None:
        passed.append(number)
        os.kill(pid, number)

    earlier = {number: signal.getsignal(number) for number in _PASSED_ON}
    try:
        for number, handler in earlier.items():
            if handler is not signal.SIG_IGN:  # as SIGHUP is under nohup
                signal.signal(number, pass_on)
        yield passed
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


class _DriverTraceback(Exception):  # noqa: N818 - it is the cause of an error
    """The lines of an error's traceback in the driver's process."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _answer(drive: Callable[[], None], file: IO[bytes]) -> int:
    """Call `drive`, write what it raised, and return the exit code."""
    try:
        drive()
    except BaseException as error:  # noqa: BLE001 - it is raised in the parent
        trace = "".join(traceback.format_exception(error))
        file.write(_pickled(error, trace))
        file.flush()
        return 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    return 0


def _pickled(error: BaseException, trace: str) -> bytes:
    try:
        content = pickle.dumps((error, trace))
        pickle.loads(content)  # noqa: S301 - our own
        return content
    except Exception:  # noqa: BLE001 - an error of any library
        return pickle.dumps((RuntimeError(f"{type(error).__name__}: {error}"), trace))


def _end_like(status: int) -> None:
    """End this process with the exit code or by the signal of another one; it could print nothing either."""
    sys.stdout.flush()
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status if status > 0 else SIGNAL_EXIT - status)  # the first process of a container cannot kill itself


@contextmanager
def exit_notice(run_folder: Path) -> Iterator[None]:
    """Have the notice printed to standard error if this process is killed inside the block."""
    # In a session of its own, so that a signal to our process group does not end it too.
    process = subprocess.Popen(  # noqa: S603 - our own module
        [sys.executable, "-m", __name__, str(run_folder)], stdin=subprocess.PIPE, start_new_session=True
    )
    assert process.stdin is not None
    try:
        yield
    finally:
        with suppress(BrokenPipeError):
            process.stdin.write(_PRINTED)
            process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_WAIT_S)


def killed_notice(run_folder: Path) -> str:
    is_saved = (run_folder / "checkpoints" / "latest").exists()
    remedy = "resume from its last checkpoint" if is_saved else "start again: no checkpoint was saved yet"
    log = run_folder / "ray.log"
    # The log of a cluster that was joined is not in the run's folder.
    ray_log = f" (its log is {log})" if log.exists() else ""
    lease = find_leased(run_folder)
    left = "nothing it started is left"
    if lease is not None:
        left = f"what it started waits {lease.seconds:g} s for the next driver (cluster.lease_s)"
    return (
        f"megarl: the driver was killed, or a process of Ray{ray_log} was, which ends the driver; "
        f"{left}; run the same command to {remedy}"
    )


def main(run_folder: Path) -> None:
    if os.read(sys.stdin.fileno(), 1) != _PRINTED:
        with suppress(OSError):  # the terminal is gone, too
            sys.stderr.write(f"{killed_notice(run_folder)}\n")
            sys.stderr.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
