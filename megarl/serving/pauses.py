"""Pauses the engines around a publish under running requests, and counts each pause before it happens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from megarl.config.roles import InFlight
from megarl.engine import admin
from megarl.engine.fleet import Engine, Fleet
from megarl.errors import EngineError

logger = logging.getLogger(__name__)


@asynccontextmanager
async def paused(
    fleet: Fleet, in_flight: InFlight, *, announce: Callable[[], Awaitable[None]] | None = None
) -> AsyncIterator[None]:
    """Pause all reachable engines inside the block; new requests wait.

    `announce` returns when rollout workers in other processes know the counts of pauses.
    """
    engines = fleet.reachable

    async def count() -> None:
        fleet.count_pause(engines)
        if announce is not None:
            # An engine that is paused answers at once: the count must be there before the tokens.
            await announce()

    async def pause(engine: Engine) -> None:
        await admin.pause(engine.client, admin.PauseMode(in_flight))

    await count()
    try:
        await _call_all(fleet, engines, pause)
        yield
    finally:
        await count()
        await _call_all(fleet, engines, _resume)


async def _resume(engine: Engine) -> None:
    if not engine.is_live:
        # Its weights are wrong: its requests are sent to other engines.
        await admin.abort_all(engine.client)
    await admin.resume(engine.client)


async def _call_all(fleet: Fleet, engines: Sequence[Engine], call: Callable[[Engine], Awaitable[None]]) -> None:
    """Call all engines. One that fails is stale and gets no request until a publish reaches it."""
    outcomes = await asyncio.gather(*(call(engine) for engine in engines), return_exceptions=True)
    for engine, outcome in zip(engines, outcomes, strict=True):
        match outcome:
            case EngineError():
                logger.warning("pause or resume failed engine=%d reason=%s", engine.index, outcome)
                await fleet.mark_stale(engine, str(outcome))
            case BaseException():
                raise outcome
