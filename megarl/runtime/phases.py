"""When trainers and engines may use the devices. Only this module distinguishes shared from separate pools."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol


class Sleeper(Protocol):
    """Engines that can stop using their devices for a while."""

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Offloader:
    """A model that can leave its device to others."""

    release: Callable[[], Awaitable[None]]
    reload: Callable[[], Awaitable[None]]


class SeparatePhases:
    """Trainers and engines have separate pools: neither waits for the other."""

    @asynccontextmanager
    async def generating(self) -> AsyncIterator[None]:
        yield

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        yield


class SharedPhases:
    """Trainers and engines take turns on one pool; while weights are published, both are on the devices."""

    def __init__(self, engines: Sequence[Sleeper]) -> None:
        self._engines = engines
        self._trainers: Sequence[Offloader] = ()
        self._are_awake = True
        self._are_away = False

    def take_turns_with(self, trainers: Sequence[Offloader]) -> None:
        """Take turns with these trainers, which have just started and are on the devices."""
        self._trainers = trainers
        self._are_away = False

    @asynccontextmanager
    async def generating(self) -> AsyncIterator[None]:
        if not self._are_away:
            await asyncio.gather(*(trainer.release() for trainer in self._trainers))
            self._are_away = True
        if not self._are_awake:
            await asyncio.gather(*(engine.wake() for engine in self._engines))
            self._are_awake = True
        yield

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        if self._are_awake:
            await asyncio.gather(*(engine.sleep() for engine in self._engines))
            self._are_awake = False
        if self._are_away:
            await asyncio.gather(*(trainer.reload() for trainer in self._trainers))
            self._are_away = False
        yield
