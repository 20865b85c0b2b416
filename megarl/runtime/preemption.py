"""SIGTERM or SIGUSR1: the run is asked to leave. It saves what it has trained and goes; past its grace, at once.

SIGUSR1 may come as often as it likes (a scheduler's early warning); a second SIGTERM means now.
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
        """Of the first signal."""
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
        """Until the run is asked to leave."""
        await self._asked.wait()

    def begin_steps(self) -> None:
        """From now on there is something to finish and to save."""
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
        # Once: a second cancellation would interrupt the taking down that the first one began.
        if not self._is_cancelled:
            self._is_cancelled = True
            self._task.cancel()


@contextmanager
def preemptible(*, grace_s: float) -> Iterator[Preemption]:
    """Inside, the signals end the run with a PreemptedError, and what was running is taken down first."""
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
