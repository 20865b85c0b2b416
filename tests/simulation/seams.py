"""Stand-ins for the standard library inside a world: threads, time, signals, and names of the machine.

Calls from outside of a world reach the real functions.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.simulation.world import FIRST_PID, Process, Thread, calling_process, current_process, current_thread

_EPOCH = 1_800_000_000.0


class WorldEvent:
    """`threading.Event` in virtual time."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[Thread] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        for thread in self._waiting:
            thread.process.world.push(thread.process.world.now, thread)
        self._waiting.clear()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        thread = current_thread()
        assert thread is not None
        world = thread.process.world
        deadline = None if timeout is None else world.now + timeout
        while not self._is_set and (deadline is None or world.now < deadline):
            self._waiting.append(thread)
            world.wait(None if deadline is None else deadline - world.now)
            if thread in self._waiting:
                self._waiting.remove(thread)
        return self._is_set


class WorldThread:
    """`threading.Thread` of the calling process."""

    def __init__(
        self,
        target: Callable[..., object],
        args: Iterable[object] = (),
        kwargs: Mapping[str, object] | None = None,
        name: str = "",
        daemon: bool = False,
    ) -> None:
        self._call = lambda: target(*args, **(kwargs or {}))
        self._name = name
        self._thread: Thread | None = None

    def start(self) -> None:
        self._thread = calling_process().spawn(self._call, self._name)

    def is_alive(self) -> bool:
        return self._thread is not None and not self._thread.is_done

    def join(self, timeout: float | None = None) -> None:
        assert self._thread is not None
        thread = current_thread()
        assert thread is not None
        if not self._thread.is_done:
            self._thread.joining.append(thread)
            thread.process.world.wait(timeout)


THREADING = SimpleNamespace(
    Event=WorldEvent,
    Thread=WorldThread,
    Lock=threading.Lock,
    current_thread=current_thread,
    main_thread=object,
)


class SerialPool:
    """A ThreadPoolExecutor whose calls are made one after the other: blocking code of one thread."""

    def __init__(self, *_arguments: object) -> None:
        pass

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        return map(function, items)

    def shutdown(self, *, cancel_futures: bool) -> None:
        pass


class PerProcess(dict[Any, Any]):
    """A dictionary of a module, of which each process of the world has its own."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def _own(self) -> dict[Any, Any]:
        process = current_process()
        found: dict[Any, Any] = {} if process is None else process.values.setdefault(self._name, {})
        return found

    def __getitem__(self, key: Any) -> Any:
        return self._own()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._own()[key] = value

    def __delitem__(self, key: Any) -> None:
        self._own().pop(key, None)

    def __contains__(self, key: object) -> bool:
        return key in self._own()

    def get(self, key: Any, default: Any = None) -> Any:
        return self._own().get(key, default)

    def pop(self, key: Any, default: Any = None) -> Any:
        return self._own().pop(key, default)


class PerProcessList:
    """A list of a module, of which each process of the world has its own."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _own(self) -> list[Any]:
        process = current_process()
        found: list[Any] = [] if process is None else process.values.setdefault(self._name, [])
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own(), name)

    def __getitem__(self, place: int) -> Any:
        return self._own()[place]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._own())

    def __len__(self) -> int:
        return len(self._own())


_real_monotonic = time.monotonic


def monotonic() -> float:
    """Return the time of the world that calls, or the machine's."""
    thread = current_thread()
    return _real_monotonic() if thread is None else thread.process.world.now


def clocks_of(*functions: Callable[..., object]) -> Iterator[AbstractContextManager[object]]:
    """Yield contexts in which functions whose default `clock` is the machine's have that of the world."""
    for function in functions:
        defaults = function.__kwdefaults__
        assert defaults is not None, function
        assert defaults["clock"] is _real_monotonic, function
        yield mock.patch.dict(defaults, {"clock": monotonic})


@contextmanager
def standard_library() -> Iterator[None]:
    """Let time, pids, signals and names of hosts be those of the world for its threads."""
    real_time, real_sleep = time.time, time.sleep
    real_kill, real_getpid, real_gethostname = os.kill, os.getpid, socket.gethostname

    def wall_clock() -> float:
        thread = current_thread()
        return real_time() if thread is None else _EPOCH + thread.process.world.now

    def sleep(seconds: float) -> None:
        thread = current_thread()
        if thread is None:
            real_sleep(seconds)
        else:
            thread.process.world.pause(seconds)

    def kill(pid: int, number: int) -> None:
        if pid < FIRST_PID:
            real_kill(pid, number)
        else:
            deliver(calling_process().world.processes[pid - FIRST_PID], number)

    def getpid() -> int:
        process = current_process()
        return real_getpid() if process is None else process.pid

    def gethostname() -> str:
        process = current_process()
        return real_gethostname() if process is None else process.host

    with ExitStack() as stack:
        for module, name, function in (
            (time, "monotonic", monotonic),
            (time, "time", wall_clock),
            (time, "sleep", sleep),
            (os, "kill", kill),
            (os, "getpid", getpid),
            (socket, "gethostname", gethostname),
        ):
            stack.enter_context(mock.patch.object(module, name, function))
        yield


def deliver(process: Process, number: int) -> None:
    """Send a signal to a process of the world."""
    if not process.is_alive:
        raise ProcessLookupError(number)
    if number == signal.SIGKILL or (number and process.on_signal is None):
        process.kill()
    elif number and process.on_signal is not None:
        process.on_signal(number)
