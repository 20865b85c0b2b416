"""The sink that bounds the log files of a run: one that is too large loses its older half, while others write to it.

Writers append (O_APPEND), so that they go on at the new end. A line that is written in the moment of the cut may be
lost. Reward and environment workers bound their logs themselves; that of `ray start` is a page.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from megarl.observe.events import Record

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 30.0
_BOUNDED = ("megarl.log", "engines/*.log")


class LogFiles:
    def __init__(self, run_folder: Path, *, max_bytes: int) -> None:
        """`max_bytes` is the largest size of one file."""
        self._run_folder = run_folder
        self._max_bytes = max_bytes
        self._looked = time.monotonic()

    def record(self, record: Record) -> None:
        if time.monotonic() - self._looked >= _LOOK_EVERY_S:
            self._looked = time.monotonic()
            self.cut()

    def close(self) -> None:
        self.cut()

    def cut(self) -> None:
        """Cut every file that is too large; one that cannot be cut is tried again later."""
        for path in [path for pattern in _BOUNDED for path in self._run_folder.glob(pattern)]:
            try:
                num_bytes = path.stat().st_size
                if num_bytes > self._max_bytes:
                    _keep_end(path, self._max_bytes // 2)
                    logger.warning("%s: removed the older part of %d bytes (observe.log_megabytes)", path, num_bytes)
            except OSError as error:
                logger.warning("%s: cannot be shortened: %s", path, error)


def _keep_end(path: Path, num_bytes: int) -> None:
    """Replace the contents by their last whole lines, `num_bytes` at most. The file stays the same."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND)
    try:
        size = os.fstat(descriptor).st_size
        # Few bytes at a time would lose more of what is written meanwhile.
        end = os.pread(descriptor, num_bytes, size - num_bytes)
        end = end[end.find(b"\n") + 1 :]
        os.ftruncate(descriptor, 0)
        os.write(descriptor, b"[older lines were removed: observe.log_megabytes]\n" + end)
    finally:
        os.close(descriptor)
