"""Engines as Ray actors: an SGLang server is a child of an actor on its node, and ends with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import ray

from megarl.config.recipe import Recipe, RolloutRoleConfig
from megarl.env import ENGINE_HOST_ENVIRONMENT, visible_gpus
from megarl.rollout.client import EngineEndpoint, EngineKeys
from megarl.rollout.process import EngineProcess, EngineSpec
from megarl.runtime.cluster import Place
from megarl.runtime.workers import WorkerGroup

_STOP_TIMEOUT_S = 60.0


class EngineHost:
    """The process that starts one engine, waits for it and stops it."""

    def __init__(self) -> None:
        self._engine: EngineProcess | None = None

    async def start(self, spec: EngineSpec) -> EngineEndpoint:
        # This node's address as Ray knows it: loopback where the whole cluster is this machine.
        self._engine = EngineProcess(replace(spec, host=ray.util.get_node_ip_address()))
        self._engine.start()
        await self._engine.wait_ready()
        return self._engine.endpoint

    async def stop(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.stop()


class Engines:
    """All engines of the rollout role, as processes. Who serves what is the fleet's business."""

    def __init__(self, workers: WorkerGroup, endpoints: Sequence[EngineEndpoint]) -> None:
        self.endpoints = tuple(endpoints)
        self._workers = workers

    async def stop(self) -> None:
        await self._workers.call("stop")


async def start_engines(
    recipe: Recipe, config: RolloutRoleConfig, places: Sequence[Place], *, share: float, is_shared: bool
) -> Engines:
    """As many engines as the pool holds; returns when all of them generate."""
    keys = EngineKeys.fresh()
    num_engines = len(places) // config.tensor
    specs = [
        EngineSpec(
            index=index,
            model_folder=recipe.model.path.absolute(),
            config=config,
            device=recipe.run.device,
            seed=recipe.run.seed,
            run_folder=recipe.run_folder.absolute(),
            keys=keys,
            can_sleep=is_shared,
        )
        for index in range(num_engines)
    ]
    host = ray.remote(EngineHost)
    seats = [places[index * config.tensor : (index + 1) * config.tensor] for index in range(num_engines)]
    workers = WorkerGroup(
        "rollout",
        [host.options(**seat[0].options(_environment(seat), share=share)).remote() for seat in seats],
        timeout_s=config.start_timeout_s + _STOP_TIMEOUT_S,
    )
    endpoints = cast("list[EngineEndpoint]", await workers.call_each("start", [(spec,) for spec in specs]))
    return Engines(workers, endpoints)


def _environment(seat: Sequence[Place]) -> dict[str, str]:
    """An engine sees all its GPUs, though its host is placed on the first: a Ray actor cannot span bundles."""
    gpus = [str(place.gpu) for place in seat if place.gpu is not None]
    return {**ENGINE_HOST_ENVIRONMENT, **(visible_gpus(gpus) if gpus else {})}
