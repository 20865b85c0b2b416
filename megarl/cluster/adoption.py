"""A driver takes over from one that died: actors by name, and engines in a known state."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from uuid import uuid4

import ray
from ray.actor import ActorHandle

from megarl.config.roles import RolloutRoleConfig
from megarl.engine.client import EngineClient, EngineEndpoint
from megarl.errors import EngineError

logger = logging.getLogger(__name__)

_NUMBER = "#"
"""Precedes a part that no other actor's name has: Ray frees the name of a dead actor only later."""


class KeptActors:
    """The names by which the next driver of a run finds actors that outlived this one."""

    def __init__(self, *, keeps: bool, finds: bool = False) -> None:
        """Without `keeps` actors end with their driver. With `finds` there may be some of an earlier driver."""
        self._keeps = keeps
        self.left: dict[str, ActorHandle] = {}
        """Actors of an earlier driver that this one has not taken."""
        if finds:
            self._find()

    def _find(self) -> None:
        names = [name for name in ray.util.list_named_actors() if _NUMBER in name]
        counts = Counter(name.partition(_NUMBER)[0] for name in names)
        for name in names:
            plain = name.partition(_NUMBER)[0]
            with suppress(ValueError):  # it has ended meanwhile
                actor = ray.get_actor(name)
                if counts[plain] == 1:
                    self.left[plain] = actor
                else:  # one of them was just being replaced
                    ray.kill(actor)

    def options(self, name: str) -> dict[str, object]:
        """Return Ray's options for a new actor that outlives the driver as `name`."""
        return {"name": f"{name}{_NUMBER}{uuid4().hex[:8]}", "lifetime": "detached"} if self._keeps else {}

    def take(self, name: str) -> ActorHandle | None:
        """Return the actor of this name that an earlier driver left, once."""
        return self.left.pop(name, None)


class Adoption:
    """The adoption of the engines that an earlier driver left. Each is adopted, or started again."""

    def __init__(
        self,
        actors: KeptActors,
        config: RolloutRoleConfig,
        num_engines: int,
        *,
        is_possible: bool,
        noted: Callable[[str], None],
    ) -> None:
        """`is_possible` is False in pools of GPUs that trainers share: no call tells which memory an engine gave up."""
        self.actors = actors
        self.timeout_s = config.silence_timeout_s
        self._num_engines = num_engines
        self._is_possible = is_possible
        self._noted = noted
        numbers = {name: int(name.split("-")[1]) for name in actors.left if name.startswith("engine-")}
        for name in [name for name, number in numbers.items() if number >= num_engines]:
            ray.kill(actors.left.pop(name))  # the operator had added it
        self._num_left = len({number for number in numbers.values() if number < num_engines})
        self._outcomes: list[bool] = []

    async def take_over(self, index: int, ask: Callable[[], Awaitable[EngineEndpoint]]) -> EngineEndpoint | None:
        """Bring the engine at the endpoint that `ask` returns into a known state; return None if it cannot be used."""
        endpoint = None
        try:
            if not self._is_possible:
                raise EngineError(f"engine {index}: it may have given up memory to trainers of its GPUs")
            endpoint = await ask()
            version = await take_over(endpoint, timeout_s=self.timeout_s)
            logger.info("adopted engine=%d version=%s address=%s:%d", index, version, endpoint.host, endpoint.port)
        except EngineError as error:
            endpoint = None
            logger.warning("engine=%d is not adopted, but started again: %s", index, error)
        self._outcomes.append(endpoint is not None)
        if len(self._outcomes) == self._num_left:
            self._noted(f"adopted {sum(self._outcomes)} engines of {self._num_engines}")
        return endpoint


class LeftEngine(EngineClient):
    """The client of an engine that another driver left."""

    async def close_update(self) -> None:
        """End an update that was left open. Without one SGLang refuses, and nothing changes."""
        with suppress(EngineError):
            await self._control("end weight update", "/end_weight_update", {})

    async def forget_adapters(self, *, timeout_s: float) -> None:
        models = (await self._get("list adapters", "/v1/models", timeout_s=timeout_s)).get("data")
        cards = [card for card in models if isinstance(card, dict)] if isinstance(models, list) else []
        for card in cards:
            if card.get("parent"):
                await self.unload_adapter(str(card["id"]), timeout_s=timeout_s)


async def take_over(endpoint: EngineEndpoint, *, timeout_s: float) -> str:
    """Bring an engine that another driver left into a known state; return the version that it reports.

    Its requests are aborted, an update that was left open is closed, a pause is ended, and its adapters are forgotten.
    Its weights may be of two versions: it gets no request before a publish.
    """
    client = LeftEngine(endpoint, request_timeout_s=timeout_s)
    try:
        version = await client.probe(timeout_s=timeout_s)
        await client.abort_all()
        await client.close_update()
        await client.resume()
        await client.forget_adapters(timeout_s=timeout_s)
        return version
    finally:
        await client.close()
