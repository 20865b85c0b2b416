"""All engines of a run: which of them may answer, at which version, and who gets the next request.

Knows no tokens, no weights and no processes: the generator asks for an engine, the publisher says what each one serves,
the supervisor says what became of each. It outlives the trainer ranks and their publisher.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence, Set
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from megarl.errors import EngineError, FleetError
from megarl.rollout.client import EngineClient
from megarl.rollout.lifecycle import (
    Answered,
    Confirmed,
    Doubted,
    Ended,
    EngineState,
    Event,
    FellBehind,
    Life,
    RestartPolicy,
    advance,
)
from megarl.types import PolicyVersion

logger = logging.getLogger(__name__)

__all__ = ["Engine", "EngineLostError", "EngineState", "Fleet"]

_NUM_REMEMBERED_PREFIXES = 4096
_IMBALANCE = 8
"""A cached prefix is worth this part of an engine's places: beyond it another engine is sooner done."""
_PROBE_TIMEOUT_S = 10.0


class EngineLostError(EngineError):
    """An engine did not survive the request. The request is as good as new."""


@dataclass(slots=True, kw_only=True, eq=False)
class Engine:
    """One engine as the fleet sees it. Only the fleet changes it."""

    index: int
    """Its seat: a restarted engine keeps it."""
    client: EngineClient
    version: PolicyVersion
    """Of the weights it serves."""
    life: Life
    num_outstanding: int = 0
    is_syncing: bool = False
    """Weights are on their way to it, for which its scheduler waits: it cannot be asked anything else."""
    leases: set[asyncio.Timeout] = field(default_factory=set)

    @property
    def state(self) -> EngineState:
        return self.life.state

    @property
    def reason(self) -> str:
        """Why it is not live."""
        return self.life.reason

    @property
    def is_live(self) -> bool:
        return self.state is EngineState.HEALTHY

    def __str__(self) -> str:
        return str(self.client.endpoint)


StateListener = Callable[[Engine, Life], None]
"""Told of an engine whose state has changed, and the life before that."""


class RequestListener(Protocol):
    """Who counts what becomes of requests."""

    def request_retried(self, cause: str) -> None: ...


class _Uncounted:
    def request_retried(self, cause: str) -> None: ...


class Fleet:
    """Engines in the order of their index, all starting with the model folder's weights (version 0)."""

    def __init__(
        self,
        clients: Sequence[EngineClient],
        *,
        max_outstanding: int,
        publish_timeout_s: float,
        policy: RestartPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_outstanding` requests per engine are sent; others wait here, where they are still free to go anywhere.

        `publish_timeout_s` bounds how long a request waits while nothing happens and no engine is live. Without a
        `policy` nobody supervises the engines: one that is lost stays lost.
        """
        assert clients, "a fleet needs an engine"
        self.committed_version = PolicyVersion(0)
        self.is_awake = True
        """Whether engines may use their devices: not while others train there."""
        self.policy = policy or RestartPolicy(max_restarts=0)
        self.engines = tuple(
            Engine(
                index=client.endpoint.index,
                client=client,
                version=self.committed_version,
                life=Life.begin(clock()),
            )
            for client in clients
        )
        self.requests: RequestListener = _Uncounted()
        self._is_supervised = policy is not None
        self._clock = clock
        self._max_outstanding = max_outstanding
        self._publish_timeout_s = publish_timeout_s
        self._listeners: list[StateListener] = []
        self._prefixes: OrderedDict[str, int] = OrderedDict()
        self._changed = asyncio.Condition()
        self._notifying: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None

    def listen(self, listener: StateListener) -> None:
        self._listeners.append(listener)

    @asynccontextmanager
    async def lease(self, avoid: Set[int] = frozenset(), *, prefix: str | None = None) -> AsyncIterator[Engine]:
        """The live engine with the fewest outstanding requests; one in `avoid` only where there is no other.

        Requests with the same `prefix` share an engine, within bounds: it has the prompt cached. The block ends with an
        EngineLostError when the engine dies before it.
        """
        async with self._changed:
            engine = await self._next_free(avoid, prefix)
            engine.num_outstanding += 1
        scope = asyncio.timeout(None)
        engine.leases.add(scope)
        try:
            async with scope:
                yield engine
        except TimeoutError:
            if not scope.expired():
                raise
            raise EngineLostError(f"{engine}: lost: {engine.reason}") from None
        finally:
            engine.leases.discard(scope)
            engine.num_outstanding -= 1
            async with self._changed:
                self._changed.notify()

    async def _next_free(self, avoid: Set[int], prefix: str | None) -> Engine:
        while True:
            live = [engine for engine in self.engines if engine.is_live]
            candidates = [engine for engine in live if engine.index not in avoid] or live
            free = [engine for engine in candidates if engine.num_outstanding < self._max_outstanding]
            if free:
                return self._choose(free, prefix)
            await self._wait_for_change(has_live=bool(live))

    def _choose(self, free: Sequence[Engine], prefix: str | None) -> Engine:
        least = min(free, key=_load)
        if prefix is None:
            return least
        known = self._prefixes.get(prefix)
        slack = max(1, self._max_outstanding // _IMBALANCE)
        for engine in free:
            if engine.index == known and engine.num_outstanding <= least.num_outstanding + slack:
                return engine
        self._prefixes[prefix] = least.index
        self._prefixes.move_to_end(prefix)
        if len(self._prefixes) > _NUM_REMEMBERED_PREFIXES:
            self._prefixes.popitem(last=False)
        return least

    async def _wait_for_change(self, *, has_live: bool) -> None:
        """Until something is different; the condition is held. Raises where nothing better can come."""
        self._check()
        # With a live engine some request ends within its own deadline; without one a publish or a restart has to come.
        try:
            async with asyncio.timeout(None if has_live else self._publish_timeout_s):
                await self._changed.wait()
        except asyncio.CancelledError:
            self._changed.notify()  # the turn that woke this one is another's
            raise
        except TimeoutError:
            raise FleetError(
                f"no engine has served version {self.committed_version} for {self._publish_timeout_s:.0f} s: "
                f"{self._reasons()}"
            ) from None

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if all(engine.life.is_over for engine in self.engines):
            spent = f" and {self.policy.max_restarts} restarts each are spent" if self.policy.max_restarts else ""
            raise FleetError(f"no engine is left{spent}: {self._reasons()}")

    @property
    def reachable(self) -> list[Engine]:
        """Those that weights can be sent to, whatever they serve now."""
        return [engine for engine in self.engines if engine.life.is_reachable]

    async def any_reachable(self) -> list[Engine]:
        """As `reachable`, but waits for the first one; raises FleetError when none will come."""
        async with self._changed:
            while not self.reachable:
                await self._wait_for_change(has_live=False)
            return self.reachable

    @contextmanager
    def syncing(self, engines: Iterable[Engine]) -> Iterator[None]:
        """Inside, weights are on their way to `engines`."""
        busy = list(engines)
        for engine in busy:
            engine.is_syncing = True
        try:
            yield
        finally:
            for engine in busy:
                engine.is_syncing = False

    async def committed(self, version: PolicyVersion, engines: Iterable[Engine]) -> None:
        """`version` is the run's version now; `engines` serve it, all others are stale."""
        current = list(engines)
        assert current, f"version {version} is committed, but no engine serves it"
        self.committed_version = version
        for engine in self.engines:
            if engine in current:
                engine.version = version
                self.report(engine, Confirmed())
            else:
                self.report(engine, FellBehind(reason=f"serves version {engine.version}"))

    async def joined(self, engine: Engine) -> None:
        """`engine` has caught up with the others."""
        engine.version = self.committed_version
        self.report(engine, Confirmed())

    async def mark_stale(self, engine: Engine, reason: str) -> None:
        """What it serves is not what the run thinks it serves."""
        self.report(engine, FellBehind(reason=reason))

    async def doubt(self, engine: Engine, reason: str) -> None:
        """A request failed on the way to or from an engine. It gets no other one before it has answered a probe."""
        if not engine.is_live:
            return
        self.report(engine, Doubted(reason=reason))
        if not self._is_supervised:
            await self.examine(engine, reason)

    async def examine(self, engine: Engine, reason: str) -> bool:
        """Whether an engine that failed is there at all; it is dead from now on if not."""
        client = engine.client
        is_there = await client.is_healthy(timeout_s=_PROBE_TIMEOUT_S)
        if engine.client is client:
            self.report(engine, Answered() if is_there else Ended(reason=reason))
        return is_there

    def report(self, engine: Engine, event: Event) -> None:
        """Say what was seen of an engine. What it was asked for dies with it."""
        before = engine.life
        engine.life = after = advance(before, event, now=self._clock(), policy=self.policy)
        if after.state is before.state:
            return
        logger.info("engine=%d state=%s reason=%s", engine.index, after.state, after.reason)
        if after.state is EngineState.DEAD:
            for scope in engine.leases:
                if not scope.expired():
                    scope.reschedule(asyncio.get_running_loop().time())
        for listener in self._listeners:
            listener(engine, before)
        self._notify()

    def replace_client(self, engine: Engine, client: EngineClient) -> EngineClient:
        """A restarted engine listens elsewhere. Gives the client back that was there before."""
        before, engine.client = engine.client, client
        engine.version = PolicyVersion(0)
        return before

    def fail(self, error: BaseException) -> None:
        """Nobody looks after the engines any more: whoever waits for one shall not wait for ever."""
        self._failure = error
        self._notify()

    async def sleep(self) -> None:
        """Give the devices to others. An engine that is just starting is waited for: it would take them back."""
        self.is_awake = False
        async with self._changed:
            while any(engine.state is EngineState.RESTARTING for engine in self.engines):
                await self._wait_for_change(has_live=False)
        await asyncio.gather(*(self._ask(engine, engine.client.sleep()) for engine in self.reachable))

    async def wake(self) -> None:
        await asyncio.gather(*(self._ask(engine, engine.client.wake()) for engine in self.reachable))
        self.is_awake = True
        self._notify()

    async def _ask(self, engine: Engine, call: Awaitable[None]) -> None:
        try:
            await call
        except EngineError as error:
            # One that keeps its memory while others need it, or never wakes, is of no use.
            self.report(engine, Ended(reason=str(error)))

    async def close(self) -> None:
        await asyncio.gather(*(engine.client.close() for engine in self.engines))

    def _reasons(self) -> str:
        return "; ".join(f"{engine} is {engine.state}: {engine.reason}" for engine in self.engines if engine.reason)

    def _notify(self) -> None:
        """Wake whoever waits. Not awaited: states change in places that cannot wait."""
        task = asyncio.get_running_loop().create_task(self._notify_all())
        self._notifying.add(task)
        task.add_done_callback(self._notifying.discard)

    async def _notify_all(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _load(engine: Engine) -> tuple[int, int]:
    return engine.num_outstanding, engine.index
