"""The notice of a run whose driver was killed, or was ended by Ray's library, and could not print one itself.

`python -m megarl.run.exit_notice RUN` reads a pipe whose other end the driver holds. A byte means that the driver
printed its own ending; end of file without a byte means that it could not, and the notice is printed instead.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megarl.system.lease import find_leased

_PRINTED = b"."
_WAIT_S = 5.0


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


def sentence(run_folder: Path) -> str:
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
            sys.stderr.write(f"{sentence(run_folder)}\n")
            sys.stderr.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
