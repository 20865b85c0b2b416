"""Preemption by SIGTERM, SIGUSR1 or Ctrl-C: the run saves its last trained step and ends; after `grace_s` at once.

SIGHUP, which comes when the terminal is closed, is one more, unless it is ignored as under nohup.
SIGUSR1 may be repeated (a scheduler's early warning); a second SIGTERM or Ctrl-C ends the run at once.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from megarl.errors import PreemptedError, StoppedError


class Preemption:
    def __init__(self, task: asyncio.Task[None], *, grace_s: float) -> None:
        self.signal_name = ""
        """The first signal that was received."""
        self.requested = asyncio.Event()
        self.grace_s = grace_s
        """Time to save after the first signal."""
        self._task = task
        self._has_steps = False
        self._num_orders = 0
        self._is_cancelled = False

    def begin_steps(self) -> None:
        """Save on preemption from now on; before, the run just ends."""
        self._has_steps = True

    def request(self, number: signal.Signals) -> None:
        self._num_orders += number is not signal.SIGUSR1
        if not self.requested.is_set():
            self.signal_name = number.name
            asyncio.get_running_loop().call_later(self.grace_s, self._cancel)
        self.requested.set()
        if self._num_orders > 1 or not self._has_steps:
            self._cancel()

    def error(self, text: str) -> PreemptedError:
        """Return the error that ends the run; `text` says where it stands."""
        if self.signal_name == signal.SIGINT.name:
            return StoppedError(f"stopped by Ctrl-C {text}; the same command goes on from its newest checkpoint")
        return PreemptedError(f"stopped by {self.signal_name} {text}; everything it started is gone")

    def _cancel(self) -> None:
        # A second cancellation would interrupt the shutdown that the first one began.
        if not self._is_cancelled:
            self._is_cancelled = True
            self._task.cancel()


@contextmanager
def preemptible(*, grace_s: float) -> Iterator[Preemption]:
    """Turn the signals into a PreemptedError, raised after everything inside the block has been shut down.

    Outside the main thread, where Python handles no signals, `interrupt` stands for Ctrl-C.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    preemption = Preemption(task, grace_s=grace_s)
    is_main = threading.current_thread() is threading.main_thread()
    numbers = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT] if is_main else []
    if is_main and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    stop = partial(loop.call_soon_threadsafe, preemption.request, signal.SIGINT)
    _interrupts.append(stop)
    for number in numbers:
        loop.add_signal_handler(number, preemption.request, number)
    try:
        yield preemption
    except asyncio.CancelledError:
        if preemption.requested.is_set():
            raise preemption.error("before the step was saved") from None
        raise
    finally:
        _interrupts.remove(stop)
        for number in numbers:
            loop.remove_signal_handler(number)


_interrupts: list[Callable[[], object]] = []
"""One per run of this process that is under way."""


def interrupt() -> bool:
    """Do what Ctrl-C does, from any thread; return False if no run has begun to start its processes."""
    stops = tuple(_interrupts)  # a run that ends at once takes its own out
    for stop in stops:
        with suppress(RuntimeError):  # its loop has ended by itself meanwhile
            stop()
    return bool(stops)
