"""Waiting for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(happened: Callable[[], object], *, within_s: float = 60, told: Callable[[], object] = str) -> None:
    """Wait until something is true; `told` gives what is said when it is not in time."""
    deadline = time.monotonic() + within_s
    while not happened():
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {told()}"
        time.sleep(0.05)
