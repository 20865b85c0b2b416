"""The notice of a run whose driver was killed, or was ended by Ray's library, and could not print one itself.

`python -m megarl.runtime.exit_notice RUN` reads a pipe whose other end the driver holds. A byte means that the driver
printed its own ending; end of file without a byte means that it could not, and the notice is printed instead.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_SPOKEN = b"."
_WAIT_S = 5.0


@contextmanager
def exit_notice(run_folder: Path) -> Iterator[None]:
    """Should this process end inside the block, its standard error gets a sentence that says how to go on."""
    # In a session of its own: what ends our process group must not silence it.
    process = subprocess.Popen(  # noqa: S603 - our own module
        [sys.executable, "-m", __name__, str(run_folder)], stdin=subprocess.PIPE, start_new_session=True
    )
    assert process.stdin is not None
    try:
        yield
    finally:
        with suppress(BrokenPipeError):
            process.stdin.write(_SPOKEN)
            process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_WAIT_S)


def sentence(run_folder: Path) -> str:
    is_saved = (run_folder / "checkpoints" / "latest").exists()
    next_time = "goes on from its last checkpoint" if is_saved else "begins anew: it had no checkpoint yet"
    log = run_folder / "ray.log"
    # A Ray that was joined has its log elsewhere.
    where = f"Ray's log: {log}; " if log.exists() else ""
    return (
        "megarl: the run ended without a word: its process was killed, or one of Ray's own was, which ends it; "
        f"{where}everything it started is gone, and the same command {next_time}"
    )


def main(run_folder: Path) -> None:
    if os.read(sys.stdin.fileno(), 1) != _SPOKEN:
        with suppress(OSError):  # a terminal that is gone as well
            sys.stderr.write(f"{sentence(run_folder)}\n")
            sys.stderr.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
