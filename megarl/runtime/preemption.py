"""Preemption by SIGTERM or SIGUSR1: the run saves its last trained step and ends; after `grace_s` it ends at once.

SIGUSR1 may be repeated (a scheduler's early warning); a second SIGTERM ends the run at once.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from megarl.errors import PreemptedError


class Preemption:
    def __init__(self, task: asyncio.Task[None], *, grace_s: float) -> None:
        self.signal_name = ""
        """The first signal that was received."""
        self._asked = asyncio.Event()
        self._task = task
        self._grace_s = grace_s
        self._has_steps = False
        self._num_sigterms = 0
        self._is_cancelled = False

    @property
    def is_requested(self) -> bool:
        return self._asked.is_set()

    async def wait(self) -> None:
        """Wait until a signal is received."""
        await self._asked.wait()

    def begin_steps(self) -> None:
        """Save on preemption from now on; before, the run just ends."""
        self._has_steps = True

    def request(self, number: signal.Signals) -> None:
        self._num_sigterms += number is signal.SIGTERM
        if not self.is_requested:
            self.signal_name = number.name
            asyncio.get_running_loop().call_later(self._grace_s, self._cancel)
        self._asked.set()
        if self._num_sigterms > 1 or not self._has_steps:
            self._cancel()

    def _cancel(self) -> None:
        # A second cancellation would interrupt the shutdown that the first one began.
        if not self._is_cancelled:
            self._is_cancelled = True
            self._task.cancel()


@contextmanager
def preemptible(*, grace_s: float) -> Iterator[Preemption]:
    """Turn the signals into a PreemptedError, raised after everything inside the block has been shut down."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    preemption = Preemption(task, grace_s=grace_s)
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    for number in numbers:
        loop.add_signal_handler(number, preemption.request, number)
    try:
        yield preemption
    except asyncio.CancelledError:
        if preemption.is_requested:
            raise PreemptedError(
                f"stopped by {preemption.signal_name} before the step was saved; everything it started is gone"
            ) from None
        raise
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
