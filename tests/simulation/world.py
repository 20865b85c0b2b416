"""Virtual time, processes and their threads. One thread runs at a time; the seed alone decides which one is next.

A thread of the world is a real thread that waits for its turn, so that blocking code runs unchanged. Whoever waits
hands the turn to the owner of the next event. A killed process gets no further turn: each of its threads is unwound by
`KilledError`, and no call of a dead process reaches a disk, a store or an actor.

The seam is the standard library: `os`, `io`, `time` and `fcntl` ask which process calls, in all modules, and the
modules under test get `threading` of the world. Code of the package has no other way to the machine, also not code
that is written later.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import itertools
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

Result = TypeVar("Result")

FIRST_PID = 1_000_000
_MAX_EVENTS = 200_000
"""A history has some thousands."""
_WORLDS_PER_COLLECTION = 16
_TURN_S = 1e-6
"""Time of one turn of an event loop."""


class KilledError(BaseException):
    """Unwinds the threads of a process that was killed."""


class StuckError(Exception):
    """The world does not come to an end."""


class Process:
    """A process on a host. `values` holds what a module of the package has once per process."""

    def __init__(self, world: World, name: str, *, host: str, parent: Process | None = None) -> None:
        self.world, self.name, self.host = world, name, host
        self.parent = parent
        self.pid = FIRST_PID + len(world.processes)
        self.is_alive = True
        self.is_frozen = False
        self.threads: set[Thread] = set()
        self.deferred: list[tuple[Thread, int]] = []
        self.values: dict[str, Any] = {}
        self.on_signal: Callable[[int], None] | None = None
        self.at_death: list[Callable[[], None]] = []
        world.processes.append(self)

    def __repr__(self) -> str:
        return self.name

    def spawn(self, function: Callable[[], object], name: str = "") -> Thread:
        thread = Thread(self, function, name)
        self.threads.add(thread)
        self.world.push(self.world.now, thread)
        return thread

    def freeze(self) -> None:
        self.is_frozen = True

    def thaw(self) -> None:
        self.is_frozen = False
        for thread, turn in self.deferred:
            self.world.push(self.world.now, thread, turn)
        self.deferred.clear()

    def kill(self) -> None:
        """End the process, and those that die with it."""
        if not self.is_alive:
            return
        self.is_alive = self.is_frozen = False
        self.deferred.clear()
        for thread in sorted(self.threads, key=lambda thread: thread.number):
            self.world.push(self.world.now, thread)
        for end in self.at_death:
            end()
        for child in self.world.processes:
            if child.parent is self:
                child.kill()


class Thread:
    """A thread of a process."""

    def __init__(self, process: Process, function: Callable[[], object], name: str) -> None:
        self.process, self.function, self.name = process, function, name
        self.number = process.world.count()
        self.turn = 0
        """Counts its waits: a wake-up for an earlier one is void."""
        self.worker: _Worker | None = None
        self.is_done = False
        self.error: BaseException | None = None
        self.joining: list[Thread] = []
        self.loops: list[WorldLoop] = []
        self.values: dict[str, Any] = {}

    def check(self) -> None:
        if not self.process.is_alive:
            raise KilledError(self.process.name)

    def work(self) -> None:
        """Run to the end, in the thread of a worker."""
        _current.thread = self
        try:
            self.check()
            self.function()
        except KilledError:
            pass
        except BaseException as error:  # noqa: BLE001 - whoever joins looks at it
            self.error = error
        finally:
            for loop in self.loops:
                loop.abandon()
            _current.thread = None
        self.is_done = True
        self.process.threads.discard(self)
        for thread in self.joining:
            self.process.world.push(self.process.world.now, thread)


class _Worker:
    """A real thread that runs threads of worlds, one after the other."""

    def __init__(self) -> None:
        self.baton = threading.Lock()
        self.baton.acquire()
        self.job: Thread | None = None
        threading.Thread(target=self._run, name="world", daemon=True).start()

    def _run(self) -> None:
        while True:
            self.baton.acquire()
            job = self.job
            assert job is not None
            job.work()
            self.job = job.worker = None
            _idle.append(self)
            job.process.world.hand_over(None)


_idle: list[_Worker] = []
# A forked process has none of the threads.
os.register_at_fork(after_in_child=_idle.clear)


class _Current(threading.local):
    thread: Thread | None = None


_current = _Current()


def current_thread() -> Thread | None:
    """Return the thread of a world that calls; None outside of one."""
    return _current.thread


def current_process() -> Process | None:
    thread = _current.thread
    return None if thread is None else thread.process


def calling_process() -> Process:
    """Return the process that calls, which is alive."""
    thread = _current.thread
    assert thread is not None, "a call from outside of the world"
    process = thread.process
    if not process.is_alive:
        raise KilledError(process.name)
    return process


class World:
    def __init__(self, seed: int, *, limit_s: float) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.limit_s = limit_s
        self.processes: list[Process] = []
        self.is_over = False
        self.left: list[Process] = []
        """Processes that were alive when nothing was left to do."""
        self.error: BaseException | None = None
        self.num_events = 0
        self.log: list[tuple[float, str]] = []
        self._count = 0
        self._heap: list[tuple[float, int, Thread | Callable[[], object], int]] = []
        self._main = threading.Lock()
        self._main.acquire()

    def count(self) -> int:
        self._count += 1
        return self._count

    def note(self, text: str) -> None:
        self.log.append((self.now, text))

    def push(self, when: float, what: Thread | Callable[[], object], turn: int | None = None) -> None:
        """Give a thread a turn, or call a function, at a time."""
        if turn is None:
            turn = what.turn if isinstance(what, Thread) else 0
        heapq.heappush(self._heap, (when, self.count(), what, turn))

    def pause(self, seconds: float) -> None:
        """Let others go on for a while."""
        self.wait(seconds)

    def wait(self, seconds: float | None) -> None:
        """Wait until someone gives this thread a turn, at most for so long."""
        thread = current_thread()
        assert thread is not None, "only threads of the world wait"
        thread.check()
        thread.turn += 1
        if seconds is not None:
            self.push(self.now + seconds, thread)
        self.hand_over(thread)
        thread.turn += 1
        thread.check()

    def hand_over(self, thread: Thread | None) -> None:
        """Let events happen until one is the turn of this thread; without one, until another thread has a turn."""
        while True:
            event = self._next()
            if event is None:
                self._main.release()
                break
            if event is thread:
                return
            if isinstance(event, Thread):
                self._resume(event)
                break
            self._happen(event)
        if thread is not None:
            assert thread.worker is not None
            thread.worker.baton.acquire()

    def _next(self) -> Thread | Callable[[], object] | None:
        while self._heap and self.error is None:
            when, _, event, turn = heapq.heappop(self._heap)
            if isinstance(event, Thread):
                if event.is_done or (turn != event.turn and event.process.is_alive):
                    continue
                if event.process.is_frozen and not self.is_over:
                    event.process.deferred.append((event, turn))
                    continue
            elif self.is_over:
                continue
            self.now = max(self.now, when)
            self.num_events += 1
            if not self.is_over and (self.now > self.limit_s or self.num_events > _MAX_EVENTS):
                self.error = StuckError(f"the world goes on after {self.now:.0f} s and {self.num_events} events")
                return None
            return event
        return None

    def _resume(self, thread: Thread) -> None:
        if thread.worker is None:
            thread.worker = _idle.pop() if _idle else _Worker()
            thread.worker.job = thread
        thread.worker.baton.release()

    def _happen(self, event: Callable[[], object]) -> None:
        caller, _current.thread = current_thread(), None
        try:
            event()
        except BaseException as error:  # noqa: BLE001 - raised by `run`
            self.error = error
        finally:
            _current.thread = caller

    def run(self) -> None:
        """Let everything happen; return when nothing is left to do, and end all processes."""
        with _uncollected():
            self._run()

    def _run(self) -> None:
        self._let_happen()
        error, self.error, self.is_over = self.error, None, True
        self.left = [process for process in self.processes if process.is_alive and process.threads]
        for process in self.processes:
            process.kill()
        self._let_happen()
        if error is not None:
            raise error

    def _let_happen(self) -> None:
        self.hand_over(None)
        self._main.acquire()


@contextmanager
def _uncollected() -> Iterator[None]:
    """Let no garbage be collected inside the block: clean-up that it runs would belong to whatever runs then."""
    global _num_worlds
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        _num_worlds += 1
        if _num_worlds % _WORLDS_PER_COLLECTION == 0:
            gc.collect()
        if was_enabled:
            gc.enable()


_num_worlds = 0


class _Task(asyncio.Task[Any]):
    """Lies in a set where its number puts it, so that what cancels a set of tasks does so in the same order again."""

    def __init__(self, *arguments: Any, loop: Any, **named: Any) -> None:
        self._place: int = next(loop.places)
        super().__init__(*arguments, loop=loop, **named)

    def __hash__(self) -> int:
        return self._place


class WorldLoop(asyncio.BaseEventLoop):
    """An event loop of a process: asyncio's own, which waits in virtual time and whose threads are of the world."""

    def __init__(self, process: Process) -> None:
        super().__init__()
        self._world, self._process = process.world, process
        self._selector = self
        self._is_woken = False
        self._waiting: Thread | None = None
        self.places = itertools.count()
        self.set_task_factory(lambda loop, coroutine, **named: _Task(coroutine, loop=loop, **named))

    def time(self) -> float:
        return self._world.now

    def select(self, timeout: float | None) -> Sequence[object]:
        thread = current_thread()
        assert thread is not None
        thread.check()
        # Computing takes time: without it a wait for the rest of a float would never end.
        self._world.now += _TURN_S
        if timeout != 0 and not self._is_woken:
            self._waiting = thread
            self._world.wait(timeout)
            self._waiting = None
        self._is_woken = False
        return ()

    def _process_events(self, _events: object) -> None:
        pass

    def _write_to_self(self) -> None:
        self._is_woken = True
        if self._waiting is not None:
            self._world.push(self._world.now, self._waiting)

    def run_in_executor(self, _executor: object, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        future = self.create_future()

        def work() -> None:
            try:
                result = func(*args)
            except Exception as error:  # noqa: BLE001 - passed on
                self.call_soon_threadsafe(_settle, future, None, error)
            else:
                self.call_soon_threadsafe(_settle, future, result, None)

        self._process.spawn(work, "to_thread")
        return future

    def run(self, main: Callable[[], Any]) -> None:
        """Run a coroutine to its end in the calling thread, as `asyncio.run` does."""
        thread = current_thread()
        assert thread is not None
        thread.loops.append(self)
        task = self.create_task(main())
        try:
            self.run_until_complete(task)
        except KeyboardInterrupt:
            task.cancel()
            self.run_until_complete(asyncio.gather(task, return_exceptions=True))
            raise

    def abandon(self) -> None:
        """Close the coroutines of a loop that nobody runs any more, in the context of its process."""
        for task in asyncio.all_tasks(self):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            _close(task.get_coro())
        self._ready.clear()  # type: ignore[attr-defined]
        self._scheduled.clear()  # type: ignore[attr-defined]


def _close(coroutine: Any) -> None:
    """Unwind a coroutine; where its clean-up waits for something, that is unwound too."""
    for _ in range(100):
        try:
            coroutine.close()
        except RuntimeError:
            continue
        except BaseException:  # noqa: BLE001 - its clean-up fails, as the process is dead
            pass
        return


def _settle(future: asyncio.Future[Any], result: object, error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
