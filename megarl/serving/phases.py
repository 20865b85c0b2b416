"""When trainers and engines may use their devices: at any time, or one after the other in a pool without room for both.

The order in such a shared pool, where one step follows the other (docs/operations.md, "Memory of a shared pool"):

    engines start   ->  engines release their KV cache [and weights]  ->  trainers start
    publish:            trainers free all but their weights           ->  engines take the memory of theirs
    generating:         trainers give their memory back               ->  engines take their KV cache
    scoring:            engines release their KV cache                ->  frozen models of the pool wake, score, sleep
    training:           engines release their KV cache [and weights]  ->  trainers take their memory
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol

from megarl.engine import admin
from megarl.engine.client import EngineClient
from megarl.engine.fleet import RELEASED, Engine, Fleet
from megarl.engine.lifecycle import Ended, EngineState, FellBehind
from megarl.errors import EngineError
from megarl.ranks.calls import ModelCalls
from megarl.ranks.ranks import RankGroup


class Sleeper(Protocol):
    """Engines that can stop using their devices for a while."""

    @property
    def reachable(self) -> Sequence[object]: ...

    async def any_reachable(self) -> Sequence[object]: ...

    async def sleep(self, *, releases_weights: bool) -> None: ...

    async def take_weights(self) -> None: ...

    async def wake(self) -> None: ...


class SleepingFleet:
    """The engines of a fleet as a `Sleeper`."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    @property
    def reachable(self) -> Sequence[Engine]:
        return self._fleet.reachable

    async def any_reachable(self) -> Sequence[Engine]:
        return await self._fleet.any_reachable()

    async def sleep(self, *, releases_weights: bool = False) -> None:
        """Release the devices. Waits for engines that are starting, which would take the devices back.

        An engine that releases its weights is stale until a publish has confirmed others.
        """
        fleet = self._fleet
        fleet.set_awake(is_awake=False)
        await fleet.until(lambda: all(engine.state is not EngineState.RESTARTING for engine in fleet.engines))
        if releases_weights:
            for engine in fleet.reachable:
                fleet.report(engine, FellBehind(reason=RELEASED))
        await self._call_all(partial(admin.sleep, releases_weights=releases_weights))

    async def take_weights(self) -> None:
        """Take the memory of the weights again, for a publish."""
        await self._call_all(admin.take_weights)

    async def wake(self) -> None:
        await self._call_all(admin.wake)
        self._fleet.set_awake(is_awake=True)

    async def _call_all(self, call: Callable[[EngineClient], Awaitable[None]]) -> None:
        await asyncio.gather(*(self._call(engine, call) for engine in self._fleet.reachable))

    async def _call(self, engine: Engine, call: Callable[[EngineClient], Awaitable[None]]) -> None:
        try:
            await call(engine.client)
        except EngineError as error:
            # An engine that does not release its memory or does not wake is useless.
            self._fleet.report(engine, Ended(reason=str(error)))


class SharedPhases:
    """Trainers and engines are time-shared on one pool; while weights are published, both are on the devices."""

    def __init__(self, engines: Sleeper, *, releases_weights: bool = False) -> None:
        """With `releases_weights` engines keep nothing while trainers work, and a publish must follow."""
        self._engines = engines
        self._releases_weights = releases_weights
        self._trainers: Sequence[RankGroup[ModelCalls]] = ()
        self._refill: Callable[[], Awaitable[object]] | None = None
        self._can_send_away = True
        self._are_awake = True
        self._are_away = False
        self._are_empty = False
        """Whether the engines have given up their weights, and no publish has filled them since."""
        self._device_lock = asyncio.Lock()
        """Held while weights are sent, and while engines give up memory."""

    async def make_room(self) -> None:
        """Let the engines sleep before a set of trainers starts on their devices."""
        self._trainers = ()
        self._refill = None
        self._are_away = False
        # Whatever was under way when the trainers before were lost may have been cut off.
        self._are_awake = True
        await self._sleep(releases_weights=self._releases_weights)

    def alternate_with(
        self,
        trainers: Sequence[RankGroup[ModelCalls]],
        *,
        refill: Callable[[], Awaitable[object]] | None = None,
        can_send_away: bool = True,
    ) -> None:
        """Alternate with these trainers, which have just started and are on the devices.

        `refill` publishes the version that they hold. `can_send_away` says whether weights can be sent while engines
        generate, which is not so when the trainers release them.
        """
        self._trainers = trainers
        self._refill = refill
        self._can_send_away = can_send_away
        self._are_away = False

    @asynccontextmanager
    async def generating(self) -> AsyncIterator[None]:
        if self._are_empty:
            # The step before changed no weights and published none.
            assert self._refill is not None, "engines without weights, and no trainers to fill them"
            await self._refill()
        await self._leave()
        if not self._are_awake:
            await self._engines.wake()
            self._are_awake = True
        yield

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        await self._sleep(releases_weights=self._releases_weights)
        await self._reload()
        yield

    @asynccontextmanager
    async def comparing(self) -> AsyncIterator[None]:
        """Let trainers compute, and engines keep the weights that both are compared by."""
        await self._sleep(releases_weights=False)
        await self._reload()
        yield

    @asynccontextmanager
    async def publishing(self) -> AsyncIterator[None]:
        """Enclose a publish. After one that fails, engines that had given up their weights are still empty."""
        async with self._device_lock:
            await self.take_weights()
            yield
            self._are_empty = False

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[None]:
        """Let other engines have the devices inside the block, between `generating` and `training`."""
        async with self._device_lock:
            await self._engines.sleep(releases_weights=False)
            yield
            if self._are_awake:
                await self._engines.wake()

    async def take_weights(self) -> None:
        """Let engines have memory for their weights, before they get any command: SGLang looks at them each time."""
        if not self._engines.reachable:
            await self._let_one_start()
        await self._compute(ModelCalls.trim)
        await self._engines.take_weights()

    async def send_to_one(self, send: Callable[[Engine], Awaitable[bool]], engine: Engine) -> bool:
        """Send weights to one engine, which keeps its memory meanwhile; return False if that is not possible now."""
        async with self._device_lock:
            can_send = not self._are_empty and (self._can_send_away or not self._are_away)
            return can_send and await send(engine)

    async def _let_one_start(self) -> None:
        """Wait until an engine has started in place of those that were lost; engines start while trainers are away."""
        await self._leave()
        await self._engines.wake()
        await self._engines.any_reachable()
        await self._engines.sleep(releases_weights=False)
        await self._reload()

    async def _sleep(self, *, releases_weights: bool) -> None:
        if not self._are_awake and not (releases_weights and not self._are_empty):
            return
        async with self._device_lock:
            self._are_empty = self._are_empty or releases_weights
            await self._engines.sleep(releases_weights=releases_weights)
            self._are_awake = False

    async def _leave(self) -> None:
        if not self._are_away:
            await self._compute(ModelCalls.release)
            self._are_away = True

    async def _reload(self) -> None:
        if self._are_away:
            await self._compute(ModelCalls.reload)
            self._are_away = False

    async def _compute(self, method: Callable[[ModelCalls], None]) -> None:
        """Call a method of every trainer: one that offloads nothing still gives back what torch keeps for later."""
        await asyncio.gather(*(ranks.compute(method) for ranks in self._trainers))
