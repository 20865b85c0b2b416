"""The output of this process in a bounded file: what Python, CUDA and NCCL print, and how a killed process ended.

The file is the process's standard output and error itself, not the end of a pipe: the last words of a process that
aborts are in it.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from pathlib import Path

from megarl.system.environment import capture_environment
from megarl.system.secret import MaskingFormatter

MAX_BYTES = 4 * 2**20
"""Size at which a file is put aside. A run of 512 ranks leaves 4 GB at most."""
_POLL_S = 1.0


def log_process(path: Path, *, max_bytes: int = MAX_BYTES, poll_s: float = _POLL_S) -> None:
    """Append all further output of this process to `path`, and with it what megarl logs at INFO and above.

    The first line is about this process and its node. A file that has reached `max_bytes` becomes `<path>.1`, in place
    of an earlier one. Raise OSError where the file cannot be written; the output goes where it went then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _redirect(path)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(log_format())
    logger = logging.getLogger("megarl")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.info("pid=%d environment=%s", os.getpid(), capture_environment(asks_git=False).line())
    threading.Thread(target=_bound, args=(path, max_bytes, poll_s), daemon=True, name="log size").start()


def log_format() -> logging.Formatter:
    """Return the format of every log of a run: UTC time, level, module, text."""
    formatter = MaskingFormatter("%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    return formatter


def _redirect(path: Path) -> None:
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.close(file)


def _bound(path: Path, max_bytes: int, poll_s: float) -> None:
    while True:
        time.sleep(poll_s)
        try:
            if os.fstat(1).st_size >= max_bytes:
                path.rename(path.with_name(f"{path.name}.1"))
                _redirect(path)
        except OSError as error:
            # The file stays in use; the disk may have room again later.
            sys.stderr.write(f"{path} cannot be put aside: {error.strerror}\n")
            time.sleep(60.0)
