"""Engines as Ray actors: an SGLang server is a child of an actor on its node and ends with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import TypeVar, TypeVarTuple

import ray
from ray.actor import ActorHandle

from megarl.env import ENGINE_HOST_ENVIRONMENT, visible_gpus
from megarl.errors import EngineError, MegarlError
from megarl.rollout.client import EngineEndpoint
from megarl.rollout.process import EngineProcess, EngineSpec, PortTakenError
from megarl.runtime.cluster import Place, own_address

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")

_STOP_TIMEOUT_S = 60.0
_MAX_STARTS = 3
"""Starts of one engine, if each finds a port taken."""


class EngineHost:
    """The actor that starts, watches and stops one engine. It runs several calls at a time."""

    def __init__(self) -> None:
        self._engine: EngineProcess | None = None

    async def start(self, spec: EngineSpec) -> EngineEndpoint:
        """Start an engine; return when it generates. If another process took a port, it is tried again with others."""
        for attempt in range(1, _MAX_STARTS + 1):
            await self.stop()
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
        """Wait for the end of the engine; return the reason."""
        assert self._engine is not None, "start comes first"
        return await self._engine.wait_end()

    async def stop(self) -> None:
        """Stop the engine."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await asyncio.to_thread(engine.stop)


class Engines:
    """The processes of all engines, by index. The fleet knows what they serve."""

    def __init__(self, specs: Sequence[EngineSpec], places: Sequence[Sequence[Place]], *, share: float) -> None:
        """`places` has those of each engine."""
        self._specs = tuple(specs)
        self._places = tuple(places)
        self._share = share
        self._hosts: dict[int, ActorHandle] = {}

    async def start(self, index: int) -> EngineEndpoint:
        """Start or restart an engine in its places; a MegarlError has the reason of a failure."""
        spec = self._specs[index]
        if index not in self._hosts:
            places = self._places[index]
            options = places[0].options(_environment(places), share=self._share)
            self._hosts[index] = ray.remote(EngineHost).options(**options).remote()
        deadline_s = spec.config.start_timeout_s + _STOP_TIMEOUT_S
        return await self._call(index, EngineHost.start, spec, timeout_s=deadline_s)

    async def wait_end(self, index: int) -> str:
        """Wait for the end of an engine or of its host; return the reason."""
        try:
            return await self._call(index, EngineHost.wait_end, timeout_s=None)
        except EngineError as error:
            return str(error)

    async def end(self, index: int) -> None:
        """End an engine at once, in any state."""
        if index not in self._hosts:
            return
        try:
            await self._call(index, EngineHost.stop, timeout_s=_STOP_TIMEOUT_S)
        except EngineError:
            # A host that cannot end its engine is killed; the engine ends with it.
            host = self._hosts.pop(index, None)
            if host is not None:
                ray.kill(host)

    async def stop(self) -> None:
        """Stop all engines."""
        calls = [self._call(index, EngineHost.stop, timeout_s=_STOP_TIMEOUT_S) for index in self._hosts]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, EngineError):
                raise outcome

    async def _call(
        self,
        index: int,
        method: Callable[[EngineHost, *Arguments], Coroutine[None, None, Result]],
        *arguments: *Arguments,
        timeout_s: float | None,
    ) -> Result:
        name = method.__name__
        reference = getattr(self._hosts[index], name).remote(*arguments)
        try:
            async with asyncio.timeout(timeout_s):
                result: Result = await reference
                return result
        except TimeoutError:
            raise EngineError(f"engine {index}: {name} did not finish within {timeout_s:.0f} s") from None
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, MegarlError):
                raise error.cause from None
            raise EngineError(f"engine {index}: {name} failed: {error.cause}") from error
        except ray.exceptions.RayActorError as error:
            self._hosts.pop(index, None)
            raise EngineError(f"engine {index}: its host process died during {name}") from error


async def start_engines(
    specs: Sequence[EngineSpec], places: Sequence[Place], *, share: float
) -> tuple[Engines, list[EngineEndpoint]]:
    """Start one engine per spec, each on the next `tensor` places; returns when all of them generate."""
    tensor = len(places) // len(specs)
    engines = Engines(specs, [places[index * tensor :][:tensor] for index in range(len(specs))], share=share)
    return engines, await asyncio.gather(*(engines.start(index) for index in range(len(specs))))


def _environment(places: Sequence[Place]) -> dict[str, str]:
    """Let an engine see all its GPUs. Its host is placed on the first: a Ray actor cannot span bundles."""
    gpus = [str(place.gpu) for place in places if place.gpu is not None]
    return {**ENGINE_HOST_ENVIRONMENT, **(visible_gpus(gpus) if gpus else {})}
