"""`python -m megarl.tools.launch.leave RUN`: ask the driver of a run to save and exit, and wait until it has.

For the hook that Kubernetes calls before it ends a pod: its SIGTERM reaches Ray, not the driver. On the driver's pod it
signals the driver. With `--follows`, on other pods, it waits for a driver that was asked to leave, whose ranks are
here, and returns at once where none was: a single lost node is replaced.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

from megarl.system.run_lock import Holder, current_holder

LEAVING_FILE = "leaving"
"""A file in the run's folder: the driver with the token in it was asked to leave."""
_POLL_S = 0.5
_NOTICE_S = 10.0
"""Time for the driver's pod to be told: all pods of a job are ended at the same time."""


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--follows", action="store_true", help="wait for a driver elsewhere, if it was asked to leave")
    parser.add_argument("--notice-s", type=float, default=_NOTICE_S)
    arguments = parser.parse_args(words)
    holder = current_holder(arguments.run)
    if holder is None:
        return 0
    mark = arguments.run / LEAVING_FILE
    if not arguments.follows:
        if holder.host != socket.gethostname():
            sys.stderr.write(f"{holder} runs {arguments.run}: ask there\n")
            return 5
        mark.write_text(str(holder.token))
        with suppress(ProcessLookupError):
            os.kill(holder.pid, signal.SIGUSR1)
    elif not _is_asked(mark, holder, notice_s=arguments.notice_s):
        return 0
    while _holds(arguments.run, holder):
        time.sleep(_POLL_S)
    return 0


def _is_asked(mark: Path, holder: Holder, *, notice_s: float) -> bool:
    deadline = time.monotonic() + notice_s
    while time.monotonic() < deadline:
        with suppress(OSError):
            if mark.read_text() == str(holder.token):
                return True
        time.sleep(_POLL_S)
    return False


def _holds(run: Path, holder: Holder) -> bool:
    now = current_holder(run)
    if now is None or not now.is_same(holder):
        return False
    return holder.host != socket.gethostname() or Path(f"/proc/{holder.pid}").exists()


if __name__ == "__main__":
    sys.exit(main())
