"""The log of the driver process, `<run>/megarl.log`, for who looks into a run. Numbers and events live elsewhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megarl.system.secret import masked

LOG_FILE = "megarl.log"


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return masked(super().format(record))


@contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """While inside, everything megarl logs from INFO up is appended to `path`, with UTC times."""
    handler = logging.FileHandler(path, encoding="utf-8")
    formatter = _Formatter("%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    logger = logging.getLogger("megarl")
    level_before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level_before)
        logger.removeHandler(handler)
        handler.close()
