"""A second engine for the few requests that take much longer than the others.

The same request is sent to an engine with less to do, and the first answer counts. A rollout is a function of weights,
prompt and seed, so it is the same answer: hedging costs nothing but the work of an engine that had little to do.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

from megarl.errors import EngineError
from megarl.rollout.fleet import Engine, EngineLostError, Fleet

Answer = TypeVar("Answer")

_NUM_REMEMBERED = 512
_NUM_NEEDED = 16
"""Before so many requests are answered nobody knows what long is."""


class Hedging:
    """Hedges what takes longer than `quantile` of the requests answered last; without a quantile, nothing."""

    def __init__(self, fleet: Fleet, *, quantile: float | None) -> None:
        self._fleet = fleet
        self._quantile = quantile
        self._seconds: deque[float] = deque(maxlen=_NUM_REMEMBERED)

    async def first(self, engine: Engine, respond: Callable[[Engine], Awaitable[Answer]]) -> Answer:
        """What `respond` gives for an engine that is leased, or for another one that is sooner done."""
        if self._quantile is None:
            return await respond(engine)
        began = time.monotonic()
        task = asyncio.ensure_future(respond(engine))
        try:
            await asyncio.wait([task], timeout=self._patience_s(self._quantile))
            answer = await task if task.done() else await self._with_second(engine, task, respond)
        finally:
            task.cancel()
        self._seconds.append(time.monotonic() - began)
        return answer

    def _patience_s(self, quantile: float) -> float | None:
        """How long a request may take before it is hedged; None while that is not known."""
        if len(self._seconds) < _NUM_NEEDED:
            return None
        ordered = sorted(self._seconds)
        return ordered[min(len(ordered) - 1, math.floor(quantile * len(ordered)))]

    async def _with_second(
        self, engine: Engine, task: asyncio.Future[Answer], respond: Callable[[Engine], Awaitable[Answer]]
    ) -> Answer:
        try:
            async with self._fleet.lease_idle({engine.index}) as other:
                if other is None:
                    return await task
                second = asyncio.ensure_future(respond(other))
                try:
                    return await self._race(task, second)
                finally:
                    second.cancel()
        except EngineLostError:  # the second engine
            return await task

    async def _race(self, task: asyncio.Future[Answer], second: asyncio.Future[Answer]) -> Answer:
        """The first that succeeds; where none does, the failure that came last."""
        done, _ = await asyncio.wait([task, second], return_when=asyncio.FIRST_COMPLETED)
        winner, loser = (task, second) if task in done else (second, task)
        if isinstance(winner.exception(), EngineError):
            return await loser
        self._fleet.requests.request_hedged("first" if winner is task else "second")
        return winner.result()
