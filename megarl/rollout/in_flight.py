"""Publishing while requests are running: engines are paused; the mode decides what happens to their requests.

Engines are paused from before the first byte until the version is committed. So no token is chosen by weights that
are half old and half new, and an engine serves a version only after the fleet has recorded it.
"""

from __future__ import annotations

import asyncio
import logging
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
    """Pauses the engines around a publish, each counted before it happens."""

    def __init__(self, mode: InFlight, *, announce: Callable[[], Awaitable[None]] | None = None) -> None:
        """`announce` returns when rollout workers in other processes know the counts and the versions."""
        self.mode: InFlight = mode
        self._announce = announce

    @asynccontextmanager
    async def around(self, fleet: Fleet) -> AsyncIterator[None]:
        """Pause all reachable engines inside the block; new requests wait."""
        engines = fleet.reachable
        await self._count(fleet, engines)
        try:
            await _ask_all(fleet, engines, self._pause)
            yield
        finally:
            await self._count(fleet, engines)
            await _ask_all(fleet, engines, _resume)

    async def _count(self, fleet: Fleet, engines: Sequence[Engine]) -> None:
        fleet.count_pause(engines)
        if self._announce is not None:
            # An engine that is paused answers at once: the count must be there before the tokens.
            await self._announce()

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


class TellingPublisher:
    """A Publisher (see `stages`) after which every rollout worker knows what the engines serve."""

    def __init__(self, publisher: Publisher, announce: Callable[[], Awaitable[None]]) -> None:
        self._publisher = publisher
        self._announce = announce

    async def publish(self, version: PolicyVersion) -> PublishResult:
        result = await self._publisher.publish(version)
        await self._announce()
        return result
