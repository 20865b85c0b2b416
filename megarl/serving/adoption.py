"""A driver takes over the engines of one that died: each is brought into a known state, or started again."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

import ray

from megarl.cluster.adoption import AdoptableActors
from megarl.config.roles import RolloutRoleConfig
from megarl.engine import admin
from megarl.engine.client import EngineClient, EngineEndpoint
from megarl.errors import EngineError

logger = logging.getLogger(__name__)


class Adoption:
    """The adoption of the engines that an earlier driver left. Each is adopted, or started again."""

    def __init__(
        self,
        actors: AdoptableActors,
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

    async def take_over(
        self, index: int, find_endpoint: Callable[[], Awaitable[EngineEndpoint]]
    ) -> EngineEndpoint | None:
        """Bring the engine at an endpoint into a known state; return None if it cannot be used."""
        endpoint = None
        try:
            if not self._is_possible:
                raise EngineError(f"engine {index}: it may have given up memory to trainers of its GPUs")
            endpoint = await find_endpoint()
            version = await take_over(endpoint, timeout_s=self.timeout_s)
            logger.info("adopted engine=%d version=%s address=%s:%d", index, version, endpoint.host, endpoint.port)
        except EngineError as error:
            endpoint = None
            logger.warning("engine=%d is not adopted, but started again: %s", index, error)
        self._outcomes.append(endpoint is not None)
        if len(self._outcomes) == self._num_left:
            self._noted(f"adopted {sum(self._outcomes)} engines of {self._num_engines}")
        return endpoint


async def take_over(endpoint: EngineEndpoint, *, timeout_s: float) -> str:
    """Bring an engine that another driver left into a known state; return the version that it reports.

    Its requests are aborted, an update that was left open is closed, a pause is ended, and its adapters are forgotten.
    Its weights may be of two versions: it gets no request before a publish.
    """
    client = EngineClient(endpoint, request_timeout_s=timeout_s)
    try:
        version = await client.probe(timeout_s=timeout_s)
        await admin.abort_all(client)
        with suppress(EngineError):  # without an open update SGLang refuses, and nothing changes
            await client.control("end weight update", "/end_weight_update", {})
        await admin.resume(client)
        await admin.unload_all_adapters(client, timeout_s=timeout_s)
        return version
    finally:
        await client.close()
