"""The inside of a process that several episodes share: one event loop, on which each computes until it awaits.

Code that does not give way is interrupted, and CPU time is counted for each request. The number of the episode that
computes is in memory that the other side reads when the process has died: it says who is to blame.
"""

from __future__ import annotations

import asyncio
import json
import math
import mmap
import os
import resource
import signal
import struct
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import Context, ContextVar
from dataclasses import dataclass
from functools import partial
from types import FrameType, TracebackType
from typing import Any, Protocol, TypeVar, cast

from megarl.system.proc import own_address_space_bytes
from megarl.system.user_process import LENGTH
from megarl.system.user_worker import Reply, StartedWorker

_T = TypeVar("_T")


class Within(Protocol):
    """Waits for an episode's work for so many seconds; raises a TimeoutError after them."""

    def __call__(self, seconds: float, work: Awaitable[_T], /) -> Awaitable[_T]: ...


class AnswersBeside(Protocol):
    """Answers a request of one episode, beside those of others."""

    def __call__(self, request: Mapping[str, Any], within: Within, /) -> Coroutine[Any, Any, Reply]: ...


NOBODY = 0
WITNESS = struct.Struct("=Q")
"""The number of the episode that computes."""
BEAT_S = 1.0
"""Time between two signs of life."""
BLOCK_S = 20.0
"""Time that code may compute between two awaits: as long others of its process stand still."""
_TICK_S = 0.25
_LEAVE_S = 1.0
"""Time for code that is too late to end; code that does not keeps its process from taking more episodes."""
_MAX_THREADS = 4096
_MORE_S = 1.0
"""CPU time for code that is told that it has used up its own, until it is told again."""
_BROKEN = 3
"""Exit status of a process without memory: whose request would fail for it next is chance."""


class BlockedError(TimeoutError):
    """Code kept all other episodes of its process waiting."""

    def __init__(self) -> None:
        super().__init__(
            f"it computed for {BLOCK_S:g} s without an await, and other episodes share its process: "
            "set environment.episodes_per_process to 1"
        )


class CpuTimeError(TimeoutError):
    def __init__(self) -> None:
        super().__init__("it used more CPU time than environment.cpu_s")


@dataclass(slots=True)
class _Meter:
    """The CPU time of one request."""

    episode: int
    left_s: float


_meter: ContextVar[_Meter | None] = ContextVar("meter", default=None)


class _Loop:
    """The event loop of a shared process: its time, who computes, and whether it goes on."""

    def __init__(self, witness: int, *, deadline_s: float) -> None:
        """`deadline_s` is the time of one request."""
        self._deadline_s = deadline_s
        self._witness = mmap.mmap(witness, WITNESS.size)
        self.pid = os.getpid()
        self._late_s = 0.0
        self._ticked = time.monotonic()
        self.is_stuck = False
        """Code that is too late did not end."""

    def clock(self) -> float:
        """Return the time in which the loop could run: what stands still because of another episode is not late."""
        return time.monotonic() - self._late_s

    def note(self, episode: int) -> None:
        WITNESS.pack_into(self._witness, 0, episode)

    @property
    def is_computing(self) -> bool:
        return bool(WITNESS.unpack_from(self._witness)[0] != NOBODY)

    def watch(self) -> None:
        """Begin to measure how late the loop is, and to interrupt code that blocks it."""
        signal.signal(signal.SIGALRM, self._interrupt)
        self._tick()

    def _tick(self) -> None:
        now = time.monotonic()
        self._late_s += max(now - self._ticked - 2 * _TICK_S, 0.0)
        self._ticked = now
        limit_s = min(self._deadline_s, BLOCK_S) + _TICK_S
        signal.setitimer(signal.ITIMER_REAL, limit_s, limit_s)
        asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        if not self.is_computing:
            return
        if self._deadline_s <= BLOCK_S:
            raise TimeoutError(f"gave no answer within {self._deadline_s:g} s")
        raise BlockedError


class _Metered(Coroutine[Any, Any, Any]):
    """A coroutine of an episode: each of its steps is noted and measured."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], meter: _Meter, loop: _Loop) -> None:
        self._coroutine = coroutine
        self._meter = meter
        self._loop = loop

    def send(self, value: object) -> object:
        if self._meter.left_s < 0:
            self._meter.left_s = _MORE_S
            return self.throw(CpuTimeError())
        return self._step(self._coroutine.send, value)

    def throw(
        self, kind: Any, value: BaseException | object = None, traceback: TracebackType | None = None, /
    ) -> object:
        return self._step(self._coroutine.throw, kind)

    def _step(self, move: Callable[[Any], Any], value: object) -> object:
        began = time.thread_time()
        self._loop.note(self._meter.episode)
        try:
            return move(value)
        finally:
            if os.getpid() != self._loop.pid:
                os._exit(0)  # the code forked, and the child came here too: only the parent goes on
            self._loop.note(NOBODY)
            self._meter.left_s -= time.thread_time() - began

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coroutine.__await__()

    def __getattr__(self, name: str) -> Any:
        # Libraries look at the state of a task's coroutine.
        return getattr(self._coroutine, name)


def _make_task(
    own: _Loop,
    loop: asyncio.AbstractEventLoop,
    coroutine: Coroutine[Any, Any, Any],
    *,
    context: Context | None = None,
    **options: Any,
) -> asyncio.Task[Any]:
    """Make a task; one that an episode's code starts is that episode's."""
    meter = _meter.get() if context is None else context.get(_meter)
    work = coroutine if meter is None else _Metered(coroutine, meter, own)
    return asyncio.Task(work, loop=loop, context=context, **options)


class SharedLoop:
    """Answers the requests of many episodes on one event loop, until the other side closes the channel."""

    def __init__(self, started: StartedWorker) -> None:
        self._channel = started.channel.socket
        self._cpu_s = started.task["cpu_s"]
        witness, deadline_s = started.task["witness"], started.task["call_deadline_s"]
        assert isinstance(witness, int), f"the witness is {witness!r}"
        assert isinstance(deadline_s, int | float), f"the deadline is {deadline_s!r}"
        self._loop = _Loop(witness, deadline_s=deadline_s)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._out = asyncio.Queue[bytes]()

    async def serve(self, answer: AnswersBeside) -> None:
        loop = asyncio.get_running_loop()
        loop.set_task_factory(partial(_make_task, self._loop))
        # Code that waits in threads has one for each episode.
        loop.set_default_executor(ThreadPoolExecutor(_MAX_THREADS))
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # each episode may have connections
        self._loop.watch()
        reader, writer = await asyncio.open_connection(sock=self._channel)
        services = [asyncio.create_task(self._write(writer)), asyncio.create_task(self._beat())]
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                self._take(json.loads(await reader.readexactly(size)), answer)
        for service in services:
            service.cancel()

    def _take(self, message: dict[str, Any], answer: AnswersBeside) -> None:
        if (cancelled := message.get("cancels")) is not None:
            if (task := self._tasks.get(cancelled)) is not None:
                task.cancel()
            return
        number, cpu_s = message["id"], self._cpu_s
        context = Context()
        context.run(_meter.set, _Meter(message["episode"], float(cpu_s) if isinstance(cpu_s, int) else math.inf))
        replying = self._reply(number, answer(message, self.within), message["limit_s"])
        self._tasks[number] = task = asyncio.get_running_loop().create_task(replying, context=context)
        task.add_done_callback(lambda _: self._tasks.pop(number, None))

    async def _reply(self, number: int, answering: Coroutine[Any, Any, Reply], limit_s: float) -> None:
        try:
            reply = await self.within(limit_s, answering)
        except TimeoutError:
            reply = {"is_late": True}
        self._send({"id": number, **reply})

    async def within(self, seconds: float, work: Awaitable[_T]) -> _T:
        """Return the result of an episode's work; a TimeoutError if it is not there in time.

        Time in which another episode kept the loop from running does not count.
        """
        task = asyncio.ensure_future(_outcome(work))
        ends = self._loop.clock() + seconds
        try:
            while not task.done() and (left_s := ends - self._loop.clock()) > 0:
                await asyncio.wait([task], timeout=left_s)
        finally:
            if not task.done():
                task.cancel()
                # Longer than it may take: what refuses to end is left behind.
                await asyncio.wait([task], timeout=_LEAVE_S)
                self._loop.is_stuck |= not task.done()
        if not task.done() or task.cancelled():
            raise TimeoutError(f"not over after {seconds:g} s")
        value, error = task.result()
        if isinstance(error, MemoryError):
            os._exit(_BROKEN)
        if error is not None:
            raise error
        return cast("_T", value)

    def _send(self, message: Mapping[str, object]) -> None:
        payload = json.dumps(message).encode()
        self._out.put_nowait(LENGTH.pack(len(payload)) + payload)

    async def _write(self, writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(await self._out.get())
            await writer.drain()

    async def _beat(self) -> None:
        while True:
            self._send({"num_bytes": own_address_space_bytes(), "is_stuck": self._loop.is_stuck})
            await asyncio.sleep(BEAT_S)


async def _outcome(work: Awaitable[_T]) -> tuple[_T | None, BaseException | None]:
    """Return the result or the error: a task that raises SystemExit would end the loop."""
    try:
        return await work, None
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001 - the user's code may raise anything
        return None, error
