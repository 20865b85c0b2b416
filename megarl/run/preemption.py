"""Preemption by SIGTERM, SIGUSR1 or Ctrl-C: the run saves its last trained step and ends; after `grace_s` at once.

SIGHUP, which comes when the terminal is closed, is one more, unless it is ignored as under nohup.
SIGUSR1 may be repeated (a scheduler's early warning); a second SIGTERM or Ctrl-C ends the run at once.

While a run starts and while it is taken down, the loop handles no signals. The first one of a start is raised where the
process is. Taking down is not interrupted: what is left behind would stay until its lease ends.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TypeAlias

from megarl.errors import PreemptedError, StoppedError
from megarl.system.run_lock import check_held, told_of_loss

Handler: TypeAlias = Callable[[int, FrameType | None], object] | int

_ENDING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


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

    def abandon(self) -> None:
        """End the run at once, and save nothing: another driver has it, or may have it."""
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
def preemptible(*, grace_s: float, run_folder: Path | None = None) -> Iterator[Preemption]:
    """Turn the signals into a PreemptedError, raised after everything inside the block has been shut down.

    Outside the main thread, where Python handles no signals, `interrupt` stands for Ctrl-C. A driver that loses the
    lock of the run in `run_folder` is cancelled, and the block ends with a MachineError.
    """
    _raise_asked()
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    preemption = Preemption(task, grace_s=grace_s)
    earlier = _handlers()
    numbers = [*earlier, signal.SIGINT] if _is_main() else []
    stop = partial(loop.call_soon_threadsafe, preemption.request, signal.SIGINT)
    _interrupts.append(stop)
    for number in numbers:
        loop.add_signal_handler(number, preemption.request, number)
    try:
        with told_of_loss(run_folder, partial(_tell, loop, preemption)) if run_folder is not None else nullcontext():
            yield preemption
    except asyncio.CancelledError:
        if run_folder is not None:
            check_held(run_folder)
        if preemption.requested.is_set():
            raise preemption.error("before the step was saved") from None
        raise
    finally:
        _interrupts.remove(stop)
        if _asked:
            _asked[-1].is_taken_down = True
        for number in numbers:
            loop.remove_signal_handler(number)
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _tell(loop: asyncio.AbstractEventLoop, preemption: Preemption) -> None:
    with suppress(RuntimeError):  # its loop has ended by itself meanwhile
        loop.call_soon_threadsafe(preemption.abandon)


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """Turn a signal that comes where `preemptible` handles none into a PreemptedError: requeue the run."""
    earlier = _handlers()
    _asked.append(_Asked())
    for number in earlier:
        signal.signal(number, _end)
    try:
        yield
    finally:
        _asked.pop()
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _end(number: int, _frame: FrameType | None) -> None:
    asked = _asked[-1]
    if not asked.is_taken_down and not asked.signal_name:
        asked.signal_name = signal.Signals(number).name
        _raise_asked()


def _raise_asked() -> None:
    """Raise what a library may have swallowed."""
    if _asked and (name := _asked[-1].signal_name):
        raise PreemptedError(f"stopped by {name} before a step was trained; everything it started is gone")


def _handlers() -> dict[signal.Signals, Handler]:
    """Return the handlers of the signals that end a run; none where Python handles no signals."""
    handlers = {number: signal.getsignal(number) for number in _ENDING} if _is_main() else {}
    return {number: each or signal.SIG_DFL for number, each in handlers.items() if each is not signal.SIG_IGN}


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


@dataclass(slots=True)
class _Asked:
    """The signal that came while a run started, before the loop handled any."""

    signal_name: str = ""
    is_taken_down: bool = False


_asked: list[_Asked] = []
"""One per run of this process."""


_interrupts: list[Callable[[], object]] = []
"""One per run of this process that is under way."""


def interrupt() -> bool:
    """Do what Ctrl-C does, from any thread; return False if no run has begun to start its processes."""
    stops = tuple(_interrupts)  # a run that ends at once takes its own out
    for stop in stops:
        with suppress(RuntimeError):  # its loop has ended by itself meanwhile
            stop()
    return bool(stops)
