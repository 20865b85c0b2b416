"""The choice of the engine for the next request, by load and cached prefix, in time that does not grow with engines.

Knows how busy each engine is, how fast it answers and which one has seen a prompt; not why an engine is live, nor what
a request is. `serving.stragglers` decides which engine is slow.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar

_NUM_REMEMBERED_PREFIXES = 65_536  # of prompts and of episodes under way
_IMBALANCE = 8
"""An engine with a cached prefix may have `max_outstanding` / 8 more requests than the least busy one."""
_MAX_ENTRIES = 8
"""Entries per engine in the heap of loads, above which those that no longer hold are removed."""
_LEAST_REQUESTS = 8
"""Fewer requests say little about an engine: one may have waited for a publish."""


class Dispatched(Protocol):
    """An engine as the dispatcher sees it; only the dispatcher changes `num_outstanding`."""

    num_outstanding: int

    @property
    def index(self) -> int: ...
    @property
    def is_live(self) -> bool: ...


EngineT = TypeVar("EngineT", bound=Dispatched)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiter(Generic[EngineT]):
    """A request that has no engine yet."""

    avoid: Set[int]
    prefixes: Sequence[str]
    engine: asyncio.Future[EngineT]


class Dispatcher(Generic[EngineT]):
    """Gives each request the live engine with the fewest outstanding ones; others wait in the order they came."""

    def __init__(self, engines: Sequence[EngineT], *, max_outstanding: int, lent: Set[int] = frozenset()) -> None:
        """At most `max_outstanding` requests per engine are given out; to `lent` ones only if no other is live."""
        self._lent = lent
        self._engines = {engine.index: engine for engine in engines}
        self._max_outstanding = max_outstanding
        self._live = {engine.index for engine in engines if engine.is_live}
        # One entry per change; those that no longer hold are skipped.
        self._loads: list[tuple[int, int]] = []  # (outstanding, index), a heap
        self._prefixes: OrderedDict[str, int] = OrderedDict()
        self._waiting: deque[_Waiter[EngineT]] = deque()
        self._rebuild()

    def add(self, engine: EngineT) -> None:
        """Give out another engine from now on."""
        self._engines[engine.index] = engine
        self.changed(engine)

    @property
    def has_live(self) -> bool:
        return bool(self._live)

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def take(self, avoid: Set[int], prefixes: Sequence[str]) -> EngineT | None:
        """Count one more request to the best free engine and return it; None if the request has to wait.

        An engine in `avoid` is taken only if no other is live. Requests share an engine if they have one of their
        `prefixes` in common; the first that was seen before decides.
        """
        least = self._least_busy(avoid)
        if least is None:
            return None
        engine = self._with_prefix(prefixes, least, avoid) if prefixes else least
        engine.num_outstanding += 1
        self._note(engine)
        return engine

    async def wait(self, avoid: Set[int], prefixes: Sequence[str]) -> EngineT:
        """Return the engine of a request that had to wait. It may have been lost since it was chosen."""
        engine: asyncio.Future[EngineT] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiter(avoid=avoid, prefixes=prefixes, engine=engine))
        try:
            return await engine
        except asyncio.CancelledError:
            if not engine.cancelled() and engine.exception() is None:
                self.release(engine.result())
            raise

    def release(self, engine: EngineT) -> None:
        """Count one request less, and give the engine to the next that waits."""
        engine.num_outstanding -= 1
        self._note(engine)
        self.serve()

    def changed(self, engine: EngineT) -> None:
        """Note that an engine is live or not; `serve` gives it out."""
        if engine.is_live:
            self._live.add(engine.index)
            self._note(engine)
        else:
            self._live.discard(engine.index)

    def serve(self) -> None:
        """Give free engines to waiting requests, in the order in which they came."""
        passed_over: list[_Waiter[EngineT]] = []
        while self._waiting and self._least_busy(frozenset()) is not None:
            waiter = self._waiting.popleft()
            if waiter.engine.done():
                continue
            engine = self.take(waiter.avoid, waiter.prefixes)
            if engine is None:
                passed_over.append(waiter)
            else:
                waiter.engine.set_result(engine)
        self._waiting.extendleft(reversed(passed_over))

    def refuse(self, reason: Callable[[], BaseException]) -> None:
        """Raise an error in all waiting requests."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.engine.done():
                waiter.engine.set_exception(reason())

    def _least_busy(self, avoid: Set[int]) -> EngineT | None:
        if self._lent and self._live - self._lent - avoid:
            avoid = avoid | self._lent
        if self._live <= avoid:
            avoid = frozenset()
        put_back: list[tuple[int, int]] = []
        least = None
        while least is None and self._loads and self._loads[0][0] < self._max_outstanding:
            num_outstanding, index = self._loads[0]
            engine = self._engines[index]
            holds = index in self._live and engine.num_outstanding == num_outstanding
            if holds and index not in avoid:
                least = engine
                continue
            entry = heappop(self._loads)
            if holds:
                put_back.append(entry)
        for entry in put_back:
            heappush(self._loads, entry)
        return least

    def _with_prefix(self, prefixes: Sequence[str], least: EngineT, avoid: Set[int]) -> EngineT:
        """Return the engine that has a prefix cached, if it is hardly busier than the least busy one."""
        index = next((self._prefixes[prefix] for prefix in prefixes if prefix in self._prefixes), least.index)
        cached = self._engines[index]
        limit = min(least.num_outstanding + max(1, self._max_outstanding // _IMBALANCE), self._max_outstanding - 1)
        if cached.index in self._live and cached.index not in avoid and cached.num_outstanding <= limit:
            return self._remember(prefixes, cached)
        return self._remember(prefixes, least)

    def _remember(self, prefixes: Sequence[str], engine: EngineT) -> EngineT:
        for prefix in prefixes:
            self._prefixes[prefix] = engine.index
            self._prefixes.move_to_end(prefix)
        while len(self._prefixes) > _NUM_REMEMBERED_PREFIXES:
            self._prefixes.popitem(last=False)
        return engine

    def _note(self, engine: EngineT) -> None:
        if engine.index in self._live:
            heappush(self._loads, (engine.num_outstanding, engine.index))
        if len(self._loads) > _MAX_ENTRIES * len(self._engines):
            self._rebuild()

    def _rebuild(self) -> None:
        self._loads = [(self._engines[index].num_outstanding, index) for index in self._live]
        heapify(self._loads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Requests that were answered, with their tokens and the time of all of them together."""

    num_requests: int = 0
    num_tokens: int = 0
    seconds: float = 0.0

    def __add__(self, other: Throughput) -> Throughput:
        return Throughput(
            num_requests=self.num_requests + other.num_requests,
            num_tokens=self.num_tokens + other.num_tokens,
            seconds=self.seconds + other.seconds,
        )

    @property
    def token_s(self) -> float | None:
        """The time of a token; None if there were too few requests to tell."""
        if self.num_requests < _LEAST_REQUESTS or not self.num_tokens:
            return None
        return self.seconds / self.num_tokens


class RequestListener(Protocol):
    """Counts the requests that are sent again, the tokens that requests bring, and those of passes over drafts."""

    def request_retried(self, cause: str) -> None: ...
    def prompt_read(self, num_tokens: int, *, num_cached: int) -> None: ...
    def draft_checked(self, num_tokens: int, *, num_passes: int) -> None: ...


class Uncounted:
    """A `RequestListener` that counts nothing."""

    def request_retried(self, cause: str) -> None: ...
    def prompt_read(self, num_tokens: int, *, num_cached: int) -> None: ...
    def draft_checked(self, num_tokens: int, *, num_passes: int) -> None: ...
