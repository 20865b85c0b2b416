"""Publishing while requests are running: engines are paused; the mode decides what happens to their requests.

Engines are paused from before the first byte until the version is committed. So no token is chosen by weights that
are half old and half new, and an engine serves a version only after the fleet has recorded it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from megarl.config.roles import InFlight
from megarl.errors import EngineError
from megarl.results import PublishResult
from megarl.rollout.client import PauseMode
from megarl.rollout.fleet import Engine, Fleet
from megarl.stages import Publisher
from megarl.types import PolicyVersion

logger = logging.getLogger(__name__)


class Pauses:
    """Counts the pauses and resumes of each engine; a changed count means that a publish may have happened."""

    def __init__(self, mode: InFlight) -> None:
        self.mode: InFlight = mode
        self._counts: Counter[int] = Counter()

    def count(self, engine: Engine) -> int:
        return self._counts[engine.index]

    @asynccontextmanager
    async def around(self, fleet: Fleet) -> AsyncIterator[None]:
        """Pause all reachable engines inside the block; new requests wait."""
        engines = fleet.reachable
        self._count(engines)
        try:
            await _ask_all(fleet, engines, self._pause)
            yield
        finally:
            self._count(engines)
            await _ask_all(fleet, engines, _resume)

    def _count(self, engines: Sequence[Engine]) -> None:
        self._counts.update(engine.index for engine in engines)

    async def _pause(self, engine: Engine) -> None:
        await engine.client.pause(PauseMode(self.mode))


async def _resume(engine: Engine) -> None:
    if not engine.is_live:
        # Its weights are wrong: its requests are sent to other engines.
        await engine.client.abort_all()
    await engine.client.resume()


async def _ask_all(fleet: Fleet, engines: Sequence[Engine], call: Callable[[Engine], Awaitable[None]]) -> None:
    """Call all engines. One that fails is stale and gets no request until a publish reaches it."""
    outcomes = await asyncio.gather(*(call(engine) for engine in engines), return_exceptions=True)
    for engine, outcome in zip(engines, outcomes, strict=True):
        match outcome:
            case EngineError():
                logger.warning("pause or resume failed engine=%d reason=%s", engine.index, outcome)
                await fleet.mark_stale(engine, str(outcome))
            case BaseException():
                raise outcome


class PausingPublisher:
    """A Publisher (see `stages`) that pauses the engines during each publish."""

    def __init__(self, publisher: Publisher, fleet: Fleet, pauses: Pauses) -> None:
        self._publisher = publisher
        self._fleet = fleet
        self._pauses = pauses

    async def publish(self, version: PolicyVersion) -> PublishResult:
        async with self._pauses.around(self._fleet):
            return await self._publisher.publish(version)
