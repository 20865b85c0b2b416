"""Engines as Ray actors: an SGLang server is a child of an actor on its node, and ends with it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import ray
from ray.actor import ActorHandle

from megarl.env import ENGINE_HOST_ENVIRONMENT, visible_gpus
from megarl.errors import EngineError, MegarlError
from megarl.rollout.client import EngineEndpoint
from megarl.rollout.process import EngineProcess, EngineSpec, PortTakenError
from megarl.runtime.cluster import Place, own_address

_STOP_TIMEOUT_S = 60.0
_MAX_STARTS = 3
"""Of one engine, as far as ports are concerned."""


class EngineHost:
    """The process that starts one engine, watches it and stops it. Several calls may be under way in it."""

    def __init__(self) -> None:
        self._engine: EngineProcess | None = None

    async def start(self, spec: EngineSpec) -> EngineEndpoint:
        """A new engine; returns when it generates. Tried again, with other ports, where somebody took one of them."""
        for attempt in range(1, _MAX_STARTS + 1):
            await self.kill()
            engine = EngineProcess(replace(spec, host=own_address(spec.bind)))
            self._engine = engine
            engine.start()
            try:
                await engine.wait_ready()
            except PortTakenError:
                if attempt == _MAX_STARTS or spec.port is not None:
                    raise
            else:
                return engine.endpoint
        raise AssertionError("the last attempt returns or raises")

    async def wait_end(self) -> str:
        """Until the engine is no more: why."""
        assert self._engine is not None, "start comes first"
        return await self._engine.wait_end()

    async def stop(self) -> None:
        """Ask it to end, then see that it does."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await asyncio.to_thread(engine.stop)

    async def kill(self) -> None:
        """End an engine that has nothing left to say."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await asyncio.to_thread(engine.stop, grace_s=0)


class Engines:
    """All engines of the rollout role, as processes, by their index. Who serves what is the fleet's business."""

    def __init__(self, specs: Sequence[EngineSpec], seats: Sequence[Sequence[Place]], *, share: float) -> None:
        """`seats`: the places of each engine."""
        self._specs = tuple(specs)
        self._seats = tuple(seats)
        self._share = share
        self._hosts: dict[int, ActorHandle] = {}

    def __len__(self) -> int:
        return len(self._specs)

    async def start(self, index: int) -> EngineEndpoint:
        """Start an engine in its places, for the first time or again. MegarlError says why it does not generate."""
        spec = self._specs[index]
        if index not in self._hosts:
            seat = self._seats[index]
            options = seat[0].options(_environment(seat), share=self._share)
            self._hosts[index] = ray.remote(EngineHost).options(**options).remote()
        deadline_s = spec.config.start_timeout_s + _STOP_TIMEOUT_S
        return cast("EngineEndpoint", await self._call(index, "start", spec, timeout_s=deadline_s))

    async def wait_end(self, index: int) -> str:
        """Until an engine, or the host it cannot live without, is no more: why."""
        try:
            return cast("str", await self._call(index, "wait_end", timeout_s=None))
        except EngineError as error:
            return str(error)

    async def end(self, index: int) -> None:
        """End an engine at once, whatever state it is in."""
        if index not in self._hosts:
            return
        try:
            await self._call(index, "kill", timeout_s=_STOP_TIMEOUT_S)
        except EngineError:
            # A host that cannot end its engine is ended itself, and takes it along.
            host = self._hosts.pop(index, None)
            if host is not None:
                ray.kill(host)

    async def stop(self) -> None:
        """Ask all engines to end, and see that they do."""
        calls = [self._call(index, "stop", timeout_s=_STOP_TIMEOUT_S) for index in self._hosts]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, EngineError):
                raise outcome

    async def _call(self, index: int, method: str, *arguments: object, timeout_s: float | None) -> object:
        reference = getattr(self._hosts[index], method).remote(*arguments)
        try:
            async with asyncio.timeout(timeout_s):
                return await reference
        except TimeoutError:
            raise EngineError(f"engine {index}: {method} did not finish within {timeout_s:.0f} s") from None
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, MegarlError):
                raise error.cause from None
            raise EngineError(f"engine {index}: {method} failed: {error.cause}") from error
        except ray.exceptions.RayActorError as error:
            self._hosts.pop(index, None)
            raise EngineError(f"engine {index}: its host process died during {method}") from error


async def start_engines(
    specs: Sequence[EngineSpec], places: Sequence[Place], *, share: float
) -> tuple[Engines, list[EngineEndpoint]]:
    """Start one engine per spec, each on the next `tensor` places; returns when all of them generate."""
    tensor = len(places) // len(specs)
    engines = Engines(specs, [places[index * tensor :][:tensor] for index in range(len(specs))], share=share)
    return engines, await asyncio.gather(*(engines.start(index) for index in range(len(specs))))


def _environment(seat: Sequence[Place]) -> dict[str, str]:
    """An engine sees all its GPUs, though its host is placed on the first: a Ray actor cannot span bundles."""
    gpus = [str(place.gpu) for place in seat if place.gpu is not None]
    return {**ENGINE_HOST_ENVIRONMENT, **(visible_gpus(gpus) if gpus else {})}
