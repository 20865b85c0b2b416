"""Processes that several episodes share, seen from outside; `shared_worker` is the inside.

A request names its episode, and replies come as they are done. A process that dies or is silent loses all its episodes:
the one that computed then is to blame, the others lost a neighbour. A process whose memory is half used takes no more.
"""

from __future__ import annotations

import asyncio
import json
import logging
import mmap
import os
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from megarl.system.shared_worker import BEAT_S, BLOCK_S, NOBODY, WITNESS
from megarl.system.user_process import (
    ForeignReplyError,
    LateReplyError,
    NoReplyError,
    SourceWatch,
    UserProcess,
    refuse_change,
)

logger = logging.getLogger(__name__)

_SILENCE_S = 2 * BLOCK_S
"""Code that blocks is interrupted before; a process that is silent for longer is ended."""

_CLOSE = {"does": "close", "name": "", "arguments": dict[str, object]()}

_FIRST_EPISODES = 16
"""A process takes so many before its memory is measured with episodes in it."""


class NeighbourLostError(NoReplyError):
    """The process ended while another episode computed in it."""


class SharedProcess(UserProcess):
    """One process of many episodes. `load` is called first, then `listen`."""

    def __init__(self, module: str, task: Mapping[str, object], *, log_path: Path | None = None) -> None:
        descriptor = os.memfd_create("megarl-witness")
        os.truncate(descriptor, WITNESS.size)
        self._witness = mmap.mmap(descriptor, WITNESS.size)
        try:
            super().__init__(module, {**task, "witness": descriptor}, log_path=log_path, pass_fds=(descriptor,))
        finally:
            os.close(descriptor)
        self.num_episodes = 0
        self.num_bytes = 0
        """Its address space, as it said last."""
        self.num_measured = 0
        """Its episodes at that time."""
        self.heard: Callable[[], None] = lambda: None
        """Is called when it has said so."""
        self.is_stuck = False
        """Code of an episode does not end."""
        self._numbers = count(1)
        self._waiting: dict[int, tuple[int, asyncio.Future[dict[str, object]]]] = {}
        """Episode and reply of each request."""
        self._sending = asyncio.Lock()
        self._num_silent = 0
        self._is_read = False
        self._reason: str | None = None
        """How it ended."""
        self._blamed = NOBODY
        self._tasks: set[asyncio.Task[None]] = set()

    def listen(self) -> None:
        """Begin to read replies."""
        self._is_read = True
        watching = self._begin(self._watch())
        self._begin(self._read_replies(watching))

    async def ask_for(self, episode: int, request: Mapping[str, object], *, timeout_s: float) -> dict[str, object]:
        """Return the reply to a request of one episode; a NoReplyError if there is none.

        The worker keeps the time: what another episode takes does not count.
        """
        number = next(self._numbers)
        self._waiting[number] = episode, asyncio.get_running_loop().create_future()
        try:
            if self._reason is not None:
                raise self._loss(episode)
            await self._tell({"id": number, "episode": episode, "limit_s": timeout_s, **request})
            reply = await self._waiting[number][1]
        except asyncio.CancelledError:
            if self._reason is None:
                self._begin(self._tell({"cancels": number}))
            raise
        finally:
            del self._waiting[number]
        if reply.get("is_late"):
            raise LateReplyError(f"gave no answer within {timeout_s:g} s", cpu_s=0.0)
        return reply

    def close_episode(self, episode: int) -> None:
        """Ask for its end, without waiting for it."""
        if self._reason is None:
            self._begin(self._tell({"id": next(self._numbers), "episode": episode, "limit_s": BLOCK_S, **_CLOSE}))

    def discard(self) -> None:
        self._end("was not needed any more")
        if self._is_read:
            self.kill()  # its end is read, and then the channel is closed
        else:
            super().discard()

    async def _tell(self, message: Mapping[str, object]) -> None:
        try:
            async with self._sending:
                await self._send(message)
        except OSError:
            self._end(self._exit_reason())

    async def _read_replies(self, watching: asyncio.Task[None]) -> None:
        try:
            while True:
                message: object = json.loads(await self._receive())
                self._num_silent = 0
                self._take(message)
        except (EOFError, OSError):
            self._end(self._exit_reason())
        except (ValueError, RecursionError, ForeignReplyError) as error:
            self._end(f"wrote something that is no reply: {error}")
            self.kill()
        finally:
            watching.cancel()
            self._channel.close()

    def _take(self, message: object) -> None:
        if not isinstance(message, dict):
            raise ForeignReplyError("it is no object")
        if "id" not in message:
            self.num_bytes, self.is_stuck = int(message["num_bytes"]), bool(message["is_stuck"])
            self.num_measured = self.num_episodes
            self.heard()
            return
        _, reply = self._waiting.get(message["id"], (NOBODY, None))
        if reply is not None and not reply.done():
            reply.set_result(message)

    async def _watch(self) -> None:
        """End a process that is silent. Beats are counted, not seconds: this process may have stood still itself."""
        while self._num_silent * BEAT_S < _SILENCE_S:
            await asyncio.sleep(BEAT_S)
            self._num_silent += 1
        self._end(f"gave no sign of life for {_SILENCE_S:g} s")
        await asyncio.to_thread(self.kill)

    def _end(self, reason: str) -> None:
        """Let all requests know that the process has ended."""
        if self._reason is not None:
            return
        self._reason, self.is_whole = reason, False
        (self._blamed,) = WITNESS.unpack_from(self._witness)
        for episode, reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(self._loss(episode))

    def _loss(self, episode: int) -> NoReplyError:
        assert self._reason is not None, "it has ended"
        if episode == self._blamed or self.num_episodes <= 1:
            return NoReplyError(f"ended its worker process: it {self._reason}")
        return NeighbourLostError(f"lost its process, which other episodes share: it {self._reason}")

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class Seat:
    """The place of one episode in a shared process."""

    def __init__(self, process: SharedProcess, episode: int) -> None:
        self.process = process
        self.episode = episode

    @property
    def is_whole(self) -> bool:
        return self.process.is_whole

    async def ask(self, request: Mapping[str, object], *, timeout_s: float) -> dict[str, object]:
        return await self.process.ask_for(self.episode, request, timeout_s=timeout_s)


class SharedPool:
    """At most `workers` processes; an episode goes to the one with the fewest, of at least as many as there are cores.

    With more, code that awaits would not compute sooner.
    """

    def __init__(
        self,
        module: str,
        task: Mapping[str, object],
        *,
        section: str,
        workers: int,
        episodes_per_process: int | None,
        log_path: Path | None = None,
    ) -> None:
        """`episodes_per_process` None: as many as fit half of the task's memory."""
        self._start = partial(SharedProcess, module, task, log_path=log_path)
        self._section = section
        self._workers = workers
        self._num_wanted = min(workers, len(os.sched_getaffinity(0)))
        self._most_episodes = episodes_per_process or sys.maxsize
        memory_bytes = task["memory_bytes"]
        self._most_bytes = memory_bytes // 2 if isinstance(memory_bytes, int) else sys.maxsize
        self._processes: dict[SharedProcess, asyncio.Task[None]] = {}
        """With the loading of their code."""
        self._numbers = count(NOBODY + 1)
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._sources = SourceWatch()
        self._is_closed = False

    async def take(self) -> Seat:
        """Wait for a place in a process that has loaded the code, for `give` to take back.

        Raises a UserLoadError, and a RewardError for a file that has changed.
        """
        while (process := self._with_room()) is None:
            self._waiting.append(waiter := asyncio.get_running_loop().create_future())
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self._wake()
                raise
        process.num_episodes += 1
        seat = Seat(process, next(self._numbers))
        try:
            # Cancelled with one of many that wait for it, it would be lost to the others.
            await asyncio.shield(self._processes[process])
        except BaseException:
            self.give(seat, is_usable=True)
            raise
        return seat

    def give(self, seat: Seat, *, is_usable: bool) -> None:
        """Take a place back; a process that gets no more episodes ends with its last one.

        What the episode has left in a process that goes on is closed.
        """
        process = seat.process
        if not is_usable and process.num_episodes > 1:
            process.close_episode(seat.episode)
        process.num_episodes -= 1
        self._end_spent()
        self._wake()

    def _wake(self) -> None:
        """Let the first that waits look for room."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def _fill(self, process: SharedProcess) -> None:
        """Let as many look for room as a process may take now that its memory is measured."""
        for _ in range(min(max(_FIRST_EPISODES, process.num_measured), len(self._waiting))):
            self._wake()

    def _with_room(self) -> SharedProcess | None:
        refuse_change(self._sources.changed())
        if self._is_closed:
            raise NoReplyError("has no worker process: the run is over")
        self._end_spent()
        roomy = [each for each in self._processes if self._takes_more(each) and each.num_episodes < self._most_episodes]
        # With twice the episodes that took up half of its memory a process is full: more wait until that is measured.
        free = [each for each in roomy if each.num_episodes < max(_FIRST_EPISODES, 2 * each.num_measured)]
        least = min(free, key=lambda each: each.num_episodes, default=None)
        if least is not None and not least.num_episodes:
            return least
        if len(roomy) >= self._num_wanted or len(self._processes) >= self._workers:
            return least
        process = self._start()
        process.heard = partial(self._fill, process)
        self._processes[process] = loading = asyncio.create_task(self._load(process))
        loading.add_done_callback(lambda task: task.cancelled() or task.exception())  # there may be nobody to tell
        return process

    def _end_spent(self) -> None:
        """End the processes without episodes that get no more."""
        for process in list(self._processes):
            if not process.num_episodes and (self._is_closed or not self._takes_more(process)):
                del self._processes[process]
                process.discard()

    def _takes_more(self, process: SharedProcess) -> bool:
        return process.is_whole and not process.is_stuck and process.num_bytes < self._most_bytes

    async def _load(self, process: SharedProcess) -> None:
        try:
            await process.load(section=self._section)
            refuse_change(self._sources.note(process.report["sources"]))
        except BaseException:
            process.is_whole = False  # it takes no other episode
            raise
        process.listen()

    def close(self) -> None:
        """Kill every process and what it has started. May be called twice."""
        self._is_closed = True
        self._end_spent()
        while self._waiting:
            self._wake()
        for process in self._processes:
            process.kill()  # its episodes read the end of the channel, and give their places back
