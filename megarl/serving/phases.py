"""When trainers and engines of separate pools may use their devices: always. `shared_phases` has those of one pool."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class SeparatePhases:
    """Trainers and engines have separate pools: neither waits for the other."""

    @asynccontextmanager
    async def generating(self) -> AsyncIterator[None]:
        yield

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        yield

    @asynccontextmanager
    async def comparing(self) -> AsyncIterator[None]:
        yield

    @asynccontextmanager
    async def publishing(self) -> AsyncIterator[None]:
        yield
