"""SIGTERM: the run is asked to leave. Once: after the step it is in, saved. Twice, or past the grace: at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from megarl.errors import PreemptedError


class Preemption:
    def __init__(self, task: asyncio.Task[None], *, grace_s: float) -> None:
        self.is_requested = False
        self._task = task
        self._grace_s = grace_s
        self._has_steps = False
        self._is_cancelled = False

    def begin_steps(self) -> None:
        """From now on there is something to finish and to save."""
        self._has_steps = True

    def request(self) -> None:
        if self.is_requested or not self._has_steps:
            self._cancel()
        else:
            asyncio.get_running_loop().call_later(self._grace_s, self._cancel)
        self.is_requested = True

    def _cancel(self) -> None:
        # Once: a second cancellation would interrupt the taking down that the first one began.
        if not self._is_cancelled:
            self._is_cancelled = True
            self._task.cancel()


@contextmanager
def preemptible(*, grace_s: float) -> Iterator[Preemption]:
    """Inside, SIGTERM ends the run with a PreemptedError, and what was running is taken down first."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    preemption = Preemption(task, grace_s=grace_s)
    loop.add_signal_handler(signal.SIGTERM, preemption.request)
    try:
        yield preemption
    except asyncio.CancelledError:
        if preemption.is_requested:
            raise PreemptedError(
                "stopped by SIGTERM before the step was saved; everything it started is gone"
            ) from None
        raise
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
