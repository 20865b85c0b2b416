"""How many episodes of a rollout worker are open: as many as keep its engines busy while others wait for tools.

An episode that waits for a tool, or for its environment to start, leaves its engine to another one. The share of time
in which episodes wait is measured as the run goes; it says how many must be open so that engines never lack turns.
Memory and the processes of environments bound the number. Knows no engine and no environment.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

_DEVIATIONS = 2
"""The number of turns varies by the root of its mean: so many deviations more are open, for engines not to run dry."""
_REMEMBERED = 4
"""The measured share is that of about so many times the episodes that engines compute at once."""
_FIXED_BYTES = 32 << 10
"""An open episode in the worker's process, with its connection; `python -m bench agents` measures about half of it."""
_TOKEN_BYTES = 32
"""A token is an id in the history and in its turn, a log-probability, a version, and its text."""
_MEMORY_DIVISOR = 4
"""A quarter of the memory that is free at the start is for open episodes; replies, groups and tools have the rest."""


def most_open(available_bytes: int, max_context_tokens: int) -> int:
    """Return how many episodes of the longest context a worker has the memory for."""
    each = _FIXED_BYTES + _TOKEN_BYTES * max_context_tokens
    return max(1, available_bytes // _MEMORY_DIVISOR // each)


class Admission:
    """The places of a worker's episodes."""

    def __init__(self, *, max_running: int, max_open: int, clock: Callable[[], float] = time.monotonic) -> None:
        """The engines compute `max_running` turns at once; there is memory, and there are processes, for `max_open`."""
        assert max_running >= 1, f"{max_running} turns at once"
        assert max_open >= 1, f"{max_open} episodes at once"
        self.max_running = max_running
        self.max_open = max_open
        self.num_open = 0
        self.num_turns = 0
        """Turns under way."""
        self.num_starting = 0
        """Episodes that have had no turn."""
        self.clock = clock
        self._num_over = 0
        self._computed_s = 0.0
        """Time in engines of the last episodes that are over."""
        self._waited_s = 0.0
        """Time of the same in which they had no turn."""
        self._waiting: deque[asyncio.Future[None]] = deque()

    def limit(self, most_open: int | None) -> None:
        """Bound the open episodes by the processes that there are for them."""
        if most_open is not None:
            self.max_open = min(self.max_open, most_open)

    def place(self) -> EpisodePlace:
        """Return the place of one episode, which is waited for where it is entered."""
        return EpisodePlace(self)

    @property
    def num_wanted(self) -> float:
        """The number of open episodes that keep the engines busy, by the share of time that they wait."""
        if self._num_over < self.max_running or not self._computed_s:
            return self.max_running
        num_on_average = self.max_running * (1 + self._waited_s / self._computed_s)
        return num_on_average + _DEVIATIONS * math.sqrt(self.max_running)

    @property
    def has_room(self) -> bool:
        """Whether another episode may be opened: engines lack turns now, or will while it starts."""
        if self.num_open >= self.max_open:
            return False
        return self.num_turns + self.num_starting < self.max_running or self.num_open < self.num_wanted

    async def enter(self) -> None:
        if not self._waiting and self.has_room:
            self._open()
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.num_starting -= 1
                self.leave()
            raise

    def note(self, *, computed_s: float, waited_s: float) -> None:
        """Count the times of an episode that is over."""
        kept = 1 - 1 / (_REMEMBERED * self.max_running)
        self._num_over += 1
        self._computed_s = kept * self._computed_s + computed_s
        self._waited_s = kept * self._waited_s + waited_s

    def leave(self) -> None:
        self.num_open -= 1
        self.serve()

    def _open(self) -> None:
        self.num_open += 1
        self.num_starting += 1

    def serve(self) -> None:
        """Open episodes that wait, in the order in which they came."""
        while self._waiting and self.has_room:
            waiter = self._waiting.popleft()
            if not waiter.done():
                self._open()
                waiter.set_result(None)


class EpisodePlace:
    """The place of one episode, inside of the block."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._opened = 0.0
        self._had_turn = False
        self._turns_s = 0.0
        self._computed_s = 0.0
        """Without the time in which turns waited for an engine."""

    async def __aenter__(self) -> None:
        await self._admission.enter()
        self._opened = self._admission.clock()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        admission = self._admission
        if self._had_turn:
            # An agent may have several turns at once.
            waited_s = max(admission.clock() - self._opened - self._turns_s, 0.0)
            admission.note(computed_s=self._computed_s, waited_s=waited_s)
        else:
            admission.num_starting -= 1
        admission.leave()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Count a turn that is under way."""
        admission = self._admission
        if not self._had_turn:
            self._had_turn = True
            admission.num_starting -= 1
        admission.num_turns += 1
        began, num_before = admission.clock(), admission.num_turns
        try:
            yield
        finally:
            seconds, num_meanwhile = admission.clock() - began, (num_before + admission.num_turns) / 2
            self._turns_s += seconds
            self._computed_s += seconds * min(1.0, admission.max_running / num_meanwhile)
            admission.num_turns -= 1
            admission.serve()
