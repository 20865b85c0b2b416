"""Limits on the time and memory of foreign code, such as a chat template, that runs in this process."""

from __future__ import annotations

import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from megarl.system.proc import own_address_space_bytes


@contextmanager
def bounded(*, seconds: float, num_bytes: int) -> Iterator[None]:
    """Raise TimeoutError if the body takes longer, MemoryError if it allocates more.

    Time is limited only in the main thread, where signals arrive. The memory limit is that of the whole process.
    """
    with _limited_memory(num_bytes), _limited_time(seconds):
        yield


@contextmanager
def _limited_time(seconds: float) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    began = time.monotonic()
    handler = signal.signal(signal.SIGALRM, _too_long)
    remaining_s, interval_s = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if remaining_s:
            # An alarm that was set before goes off at its time.
            left_s = max(remaining_s - (time.monotonic() - began), 1e-3)
            signal.setitimer(signal.ITIMER_REAL, left_s, interval_s)


def _too_long(_number: int, _frame: FrameType | None) -> None:
    raise TimeoutError


@contextmanager
def _limited_memory(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = own_address_space_bytes() + num_bytes
    for bound in (soft, hard):
        limit = limit if bound == resource.RLIM_INFINITY else min(limit, bound)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
