"""All engines of a run: which of them may answer, at which version, and who gets the next request.

Knows no tokens and no weights: the generator asks for an engine, the publisher says what each one serves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum

from megarl.errors import FleetError
from megarl.rollout.client import EngineClient
from megarl.types import PolicyVersion

logger = logging.getLogger(__name__)


class EngineState(StrEnum):
    LIVE = "live"
    """Serves the committed version."""
    STALE = "stale"
    """Runs, but serves another version: gets no request until a publish reaches it."""
    LOST = "lost"
    """Does not answer any more."""


@dataclass(slots=True, kw_only=True)
class Engine:
    """One engine as the fleet sees it. Only the fleet changes it."""

    client: EngineClient
    version: PolicyVersion
    """Of the weights it serves."""
    state: EngineState = EngineState.LIVE
    reason: str = ""
    """Why it is not live."""
    num_outstanding: int = 0

    @property
    def index(self) -> int:
        return self.client.endpoint.index

    @property
    def is_live(self) -> bool:
        return self.state is EngineState.LIVE

    def __str__(self) -> str:
        return str(self.client.endpoint)


class Fleet:
    """Engines in the order of their index, all starting with the model folder's weights (version 0)."""

    def __init__(self, clients: Sequence[EngineClient], *, max_outstanding: int, publish_timeout_s: float) -> None:
        """`max_outstanding` requests per engine are sent; others wait here, where they are still free to go anywhere.

        `publish_timeout_s` bounds how long a request waits while every engine is stale.
        """
        assert clients, "a fleet needs an engine"
        self.committed_version = PolicyVersion(0)
        self.engines = tuple(Engine(client=client, version=self.committed_version) for client in clients)
        self._max_outstanding = max_outstanding
        self._publish_timeout_s = publish_timeout_s
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def lease(self, avoid: Set[int] = frozenset()) -> AsyncIterator[Engine]:
        """The live engine with the fewest outstanding requests; one in `avoid` only where there is no other."""
        async with self._changed:
            engine = await self._next_free(avoid)
            engine.num_outstanding += 1
        try:
            yield engine
        finally:
            engine.num_outstanding -= 1
            async with self._changed:
                self._changed.notify()

    async def _next_free(self, avoid: Set[int]) -> Engine:
        while True:
            live = [engine for engine in self.engines if engine.is_live]
            candidates = [engine for engine in live if engine.index not in avoid] or live
            free = [engine for engine in candidates if engine.num_outstanding < self._max_outstanding]
            if free:
                return min(free, key=lambda engine: (engine.num_outstanding, engine.index))
            if all(engine.state is EngineState.LOST for engine in self.engines):
                raise FleetError(f"no engine is left: {self._reasons()}")
            # With a live engine some request ends within its own deadline; without one a publish has to come.
            try:
                async with asyncio.timeout(None if live else self._publish_timeout_s):
                    await self._changed.wait()
            except asyncio.CancelledError:
                self._changed.notify()  # the turn that woke this one is another's
                raise
            except TimeoutError:
                raise FleetError(
                    f"no engine has served version {self.committed_version} for {self._publish_timeout_s:.0f} s: "
                    f"{self._reasons()}"
                ) from None

    async def committed(self, version: PolicyVersion, engines: Iterable[Engine]) -> None:
        """`version` is the run's version now; `engines` serve it, all others are stale."""
        current = {engine.index for engine in engines}
        assert current, f"version {version} is committed, but no engine serves it"
        self.committed_version = version
        for engine in self.engines:
            if engine.index in current:
                engine.version, engine.state, engine.reason = version, EngineState.LIVE, ""
            elif engine.is_live:
                self._leave_live(engine, EngineState.STALE, f"serves version {engine.version}")
        await self._notify()

    async def mark_stale(self, engine: Engine, reason: str) -> None:
        """What it serves is not what the run thinks it serves."""
        if engine.is_live:
            self._leave_live(engine, EngineState.STALE, reason)
        await self._notify()

    async def mark_lost(self, engine: Engine, reason: str) -> None:
        if engine.state is not EngineState.LOST:
            self._leave_live(engine, EngineState.LOST, reason)
        await self._notify()

    async def sleep(self) -> None:
        await asyncio.gather(*(engine.client.sleep() for engine in self._reachable()))

    async def wake(self) -> None:
        await asyncio.gather(*(engine.client.wake() for engine in self._reachable()))

    async def close(self) -> None:
        await asyncio.gather(*(engine.client.close() for engine in self.engines))

    def _reachable(self) -> list[Engine]:
        return [engine for engine in self.engines if engine.state is not EngineState.LOST]

    def _leave_live(self, engine: Engine, state: EngineState, reason: str) -> None:
        engine.state, engine.reason = state, reason
        logger.warning("engine=%d state=%s reason=%s", engine.index, state, reason)

    def _reasons(self) -> str:
        return "; ".join(f"{engine} is {engine.state}: {engine.reason}" for engine in self.engines if engine.reason)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
