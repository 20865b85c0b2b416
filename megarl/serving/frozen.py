"""The engines of frozen models: started or joined like those of rollout, supervised, and never published to.

Rollout workers in other processes read what the driver records of them from a directory (`rollout.frozen`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path

import ray

from megarl.cluster.cluster import Pool
from megarl.config.model import ModelShape, read_model_shape
from megarl.config.recipe import NetworkConfig, RunConfig
from megarl.config.roles import FrozenRoleConfig, TeacherEnginesConfig
from megarl.engine.admin import check_running, endpoints_of
from megarl.engine.client import EngineClient, EngineKeys
from megarl.engine.fleet import Engine, Fleet
from megarl.engine.lifecycle import EngineState, EngineStatus
from megarl.engine.process import EngineDeadlines, EngineSpec, deadlines_of, restart_policy
from megarl.observe.observer import Observer
from megarl.rollout.following import EngineView
from megarl.rollout.frozen import FrozenAccess, FrozenEngines, FrozenSetup
from megarl.serving.nodes import following_nodes
from megarl.serving.processes import start_engines
from megarl.serving.supervisor import Supervisor

_NUM_SAMPLES = 64
_SAMPLE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenRole:
    """The engines of one role in the driver."""

    setup: FrozenSetup
    fleet: Fleet
    is_shared: bool
    """Whether it is time-shared with other roles of its pool."""


async def start_frozen(
    roles: Mapping[str, FrozenRoleConfig],
    pools: Mapping[str, Pool],
    stack: AsyncExitStack,
    *,
    run: RunConfig,
    network: NetworkConfig,
    observer: Observer,
    longest_reply: int | None,
    temperature: float = 1.0,
) -> dict[str, FrozenRole]:
    """Start or join the engines of all frozen roles, by their key below `roles`. `stack` takes them down.

    `longest_reply` is the most tokens that a judge writes; None: the engines need no tokenizer. `temperature` is the
    one at which teachers score.
    """
    await check_running(roles, device=run.device)
    starts = [
        _start(
            role,
            config,
            None if config.pool is None else pools[config.pool],
            stack,
            run,
            network,
            observer,
            longest_reply if role.startswith("judge.") else None,
            temperature if role.startswith("teacher.") else 1.0,
        )
        for role, config in roles.items()
    ]
    started = dict(zip(roles, await asyncio.gather(*starts), strict=True))
    # The other roles of their pools start now.
    await asyncio.gather(*(role.fleet.sleep(releases_weights=True) for role in started.values() if role.is_shared))
    return started


async def _start(
    role: str,
    config: FrozenRoleConfig,
    pool: Pool | None,
    stack: AsyncExitStack,
    run: RunConfig,
    network: NetworkConfig,
    observer: Observer,
    longest_reply: int | None,
    temperature: float,
) -> FrozenRole:
    shape = read_model_shape(config.model)
    deadlines = deadlines_of(config, shape, device=run.device, max_response_tokens=longest_reply or 1)
    connect = partial(EngineClient, request_timeout_s=deadlines.request_s)
    policy = None
    processes = None
    if pool is None:
        endpoints = endpoints_of(config.endpoints, device=run.device)
    else:
        first = _first_spec(role, config, shape, deadlines, run, network)
        first = replace(
            first, has_grammars=longest_reply is not None, shares_devices=pool.is_shared, temperature=temperature
        )
        specs = [replace(first, index=index) for index in range(len(pool.places) // config.tensor)]
        processes, endpoints = await start_engines(specs, pool.places, gpu_fraction=pool.gpu_fraction)
        stack.push_async_callback(processes.stop)
        policy = restart_policy(config, deadlines.start_s)
    observer.noted(f"roles.{role} is {config.model}, version {await asyncio.to_thread(model_version, config.model)}")
    setup = FrozenSetup(
        role=role,
        folder=config.model.absolute(),
        shape=shape,
        max_attempts=config.max_attempts,
        max_outstanding=config.max_running_requests,
        request_timeout_s=deadlines.request_s,
        # The longest time without news of an engine that is being restarted.
        patience_s=deadlines.start_s + config.silence_timeout_s,
        endpoints=tuple(endpoints),
    )
    fleet = Fleet(
        [connect(endpoint) for endpoint in endpoints],
        max_outstanding=setup.max_outstanding,
        publish_timeout_s=setup.patience_s,
        policy=policy,
    )
    stack.push_async_callback(fleet.close)
    if pool is not None and processes is not None:
        supervisor = Supervisor(fleet, processes, connect=connect, may_start=processes.has_nodes)
        supervisor.attach(partial(_catch_up, fleet))
        await stack.enter_async_context(supervisor.running())
        fleet.listen(partial(_report, role, fleet, observer))
        await stack.enter_async_context(following_nodes(pool, fleet, processes, warn=observer.warned))
    return FrozenRole(setup=setup, fleet=fleet, is_shared=pool is not None and pool.is_shared)


async def _catch_up(fleet: Fleet, engine: Engine) -> bool:
    """Record that an engine which has started again serves its only weights: it has loaded them from their folder."""
    await fleet.joined(engine)
    return True


def _first_spec(
    role: str,
    config: FrozenRoleConfig,
    shape: ModelShape,
    deadlines: EngineDeadlines,
    run: RunConfig,
    network: NetworkConfig,
) -> EngineSpec:
    return EngineSpec(
        index=0,
        model_folder=config.model.absolute(),
        config=config,
        device=run.device,
        seed=run.seed,
        run_folder=(run.folder / run.name).absolute(),
        keys=EngineKeys.fresh(),
        start_timeout_s=deadlines.start_s,
        bind=network.bind,
        role=role,
        is_classifier=shape.has_value_head,
        has_float32_head=isinstance(config, TeacherEnginesConfig),  # its numbers become a part of the loss
    )


def model_version(folder: Path) -> str:
    """Return a digest of the model in a folder: of its JSON files, and of samples of its weights, which are large."""
    digest = sha256()
    for path in sorted(path for path in folder.iterdir() if path.suffix in (".json", ".jinja", ".safetensors")):
        size, is_large = path.stat().st_size, path.suffix == ".safetensors"
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for place in range(_NUM_SAMPLES if is_large else 1):
                file.seek(place * size // _NUM_SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES if is_large else -1))
    return digest.hexdigest()[:12]


def _report(role: str, fleet: Fleet, observer: Observer, engine: Engine, _before: EngineStatus) -> None:
    status = engine.status
    if status.state is EngineState.RESTARTING:
        attempt = f"restart {status.num_restarts} of {fleet.policy.max_restarts}"
        observer.restarted(role, engine.index, f"{attempt}: {status.reason}")
    elif status.is_over:
        observer.warned(f"roles.{role}: engine {engine.index} is given up: {status.reason}")


def models_of(roles: Mapping[str, FrozenRole]) -> dict[str, FrozenEngines]:
    """Return the models for a rollout worker in the driver's process."""
    return {name: role.setup.model(role.fleet) for name, role in roles.items()}


class FrozenDirectory:
    """The actor from which rollout workers read the engines of frozen models as the driver records them."""

    def __init__(self) -> None:
        self._views: dict[str, list[EngineView]] = {}

    async def put(self, role: str, views: list[EngineView]) -> None:
        self._views[role] = views

    async def views(self) -> dict[str, list[EngineView]]:
        return self._views


def open_access(roles: Mapping[str, FrozenRole], stack: AsyncExitStack) -> FrozenAccess | None:
    """Return the access of rollout workers to frozen engines; None where there are none."""
    if not roles:
        return None
    directory = ray.remote(num_cpus=0)(FrozenDirectory).remote()
    stack.callback(ray.kill, directory)

    def announce(role: FrozenRole) -> None:
        directory.put.remote(role.setup.role, [EngineView.of(engine, number=1) for engine in role.fleet.engines])

    for role in roles.values():
        role.fleet.listen(lambda _engine, _before, role=role: announce(role))  # type: ignore[misc]
        announce(role)
    return FrozenAccess(directory=directory, setups=tuple(role.setup for role in roles.values()))
