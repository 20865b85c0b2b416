"""Who may use the devices when: the only place that knows whether trainer and engines share a pool."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol


class Sleeper(Protocol):
    """An engine that can give its memory, or at least its time, back."""

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Offloader:
    """A model that can leave its device to others."""

    release: Callable[[], Awaitable[None]]
    reload: Callable[[], Awaitable[None]]


class SeparatePhases:
    """Everyone has a pool of its own: nobody waits."""

    @asynccontextmanager
    async def generating(self) -> AsyncIterator[None]:
        yield

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        yield


class SharedPhases:
    """Trainers and engines take turns on one pool: engines sleep except while generating, and trainers that offload are
    away meanwhile. Between the two, when weights are published, both are there.
    """

    def __init__(self, engines: Sequence[Sleeper]) -> None:
        self._engines = engines
        self._trainers: Sequence[Offloader] = ()
        self._are_awake = True
        self._are_away = False

    def take_turns_with(self, trainers: Sequence[Offloader]) -> None:
        """With these, which have just started, from now on."""
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
