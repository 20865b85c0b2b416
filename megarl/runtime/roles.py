"""Starting the roles and connecting them: trainer ranks, engines, and the weights' way from one to the other."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import ray

from megarl.checkpoint.manifest import CRITIC_FOLDER
from megarl.checkpoint.resume import ResumePoint
from megarl.config.model import ModelShape, read_model_shape
from megarl.config.recipe import ModelParallelConfig, Recipe, RolloutRoleConfig
from megarl.observe.observer import Observer
from megarl.rollout.client import EngineClient, EngineEndpoint
from megarl.rollout.control import EngineControl
from megarl.rollout.fleet import Fleet
from megarl.rollout.lifecycle import RestartPolicy
from megarl.rollout.orders import Route
from megarl.runtime.cluster import Cluster, Place, gpu_numbers
from megarl.runtime.engines import Engines, start_engines
from megarl.runtime.fleet_events import observe_fleet
from megarl.runtime.operator import open_to_operator
from megarl.runtime.phases import SeparatePhases, SharedPhases
from megarl.runtime.publisher import NoPublisher, TransferPublisher
from megarl.runtime.ranks import (
    ActorProcess,
    ActorRanks,
    CriticProcess,
    CriticRanks,
    Origin,
    ReferenceProcess,
    ReferenceRanks,
    start_processes,
)
from megarl.runtime.supervisor import Supervisor
from megarl.runtime.tasks import task_group
from megarl.stages import Phases, Publisher
from megarl.train.rank import RankSpec
from megarl.weights.assignment import nearest_order
from megarl.weights.megatron import MegatronParallel


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Everything that runs in a process of its own."""

    actor: ActorRanks
    critic: CriticRanks | None
    reference: ReferenceRanks | None
    """None where there is none, and where the actor's ranks keep it."""
    fleet: Fleet | None
    """None where nobody generates."""
    supervisor: Supervisor | None
    """Of the fleet."""
    publisher: Publisher
    phases: Phases


async def start_roles(
    recipe: Recipe,
    shape: ModelShape,
    cluster: Cluster,
    stack: AsyncExitStack,
    *,
    resume: ResumePoint | None,
    observer: Observer,
) -> Roles:
    """All roles start side by side: each takes a while. `stack` takes down what was started."""
    rollout = recipe.roles.rollout
    pools = {name: _Pool(places, _users(recipe, name)) for name, places in cluster.reserve(recipe.pools).items()}
    async with task_group() as tasks:
        actor = tasks.create_task(_start_actor(recipe, shape, pools, resume))
        critic = tasks.create_task(_start_critic(recipe, shape, pools, resume))
        reference = tasks.create_task(_start_reference(recipe, shape, pools))
        seats = _engine_places(recipe, shape, pools)
        engines = tasks.create_task(_start_engines(recipe, pools, seats))
    fleet: Fleet | None = None
    supervisor: Supervisor | None = None
    publisher: Publisher = NoPublisher()
    phases: Phases = SeparatePhases()
    running = engines.result()
    if rollout is not None and running is not None:
        fleet, supervisor = await _open_fleet(recipe, rollout, *running, stack, observer)
        trainer_gpus, engine_gpus = gpu_numbers(pools[recipe.roles.actor.pool].places, seats)
        route = route_of(recipe, rollout, shape, num_engines=len(fleet.engines))
        route = replace(route, trainer_gpus=trainer_gpus, engine_gpus=engine_gpus)
        publisher = await _connect(rollout, route, actor.result(), fleet, supervisor, stack, observer)
        phases = SharedPhases([fleet]) if pools[rollout.pool].is_shared else SeparatePhases()
    return Roles(
        actor=actor.result(),
        critic=critic.result(),
        reference=reference.result(),
        fleet=fleet,
        supervisor=supervisor,
        publisher=publisher,
        phases=phases,
    )


class _Pool:
    """The places of a pool, and how the roles that have it share it."""

    def __init__(self, places: Sequence[Place], num_roles: int) -> None:
        self.places = places
        self.is_shared = num_roles > 1
        # Ray counts in ten-thousandths of a device.
        self.share = math.floor(10_000 / num_roles) / 10_000
        self.turn = asyncio.Lock()


def _users(recipe: Recipe, pool: str) -> int:
    """How many roles have processes in a pool."""
    roles = recipe.roles
    named = (roles.actor, roles.critic, roles.reference, roles.rollout)
    return sum(role is not None and role.pool == pool for role in named)


async def _start_actor(
    recipe: Recipe, shape: ModelShape, pools: Mapping[str, _Pool], resume: ResumePoint | None
) -> ActorRanks:
    config, reference, critic = recipe.roles.actor, recipe.roles.reference, recipe.roles.critic
    pool = pools[config.pool]
    origin = Origin(folder=recipe.model.path.absolute())
    if resume is not None:
        origin = Origin(folder=resume.folder, resumed=resume.state.trainer)
    kept = (reference.path or recipe.model.path).absolute() if reference and reference.pool is None else None
    workers = await start_processes(
        "actor",
        ActorProcess,
        pool.places,
        _rank_spec(recipe, config, shape),
        origin,
        recipe.algorithm,
        recipe.train,
        recipe.run.steps - (critic.warmup_steps if critic else 0),
        kept,
        share=pool.share,
    )
    return ActorRanks(workers, pool.turn)


async def _start_critic(
    recipe: Recipe, shape: ModelShape, pools: Mapping[str, _Pool], resume: ResumePoint | None
) -> CriticRanks | None:
    config = recipe.roles.critic
    if config is None:
        return None
    pool = pools[config.pool]
    folder = critic_folder(recipe)
    origin = Origin(folder=folder.absolute())
    if resume is not None:
        assert resume.state.critic is not None, f"{resume.folder} has no critic"
        origin = Origin(folder=resume.folder / CRITIC_FOLDER, resumed=resume.state.critic)
    workers = await start_processes(
        "critic",
        CriticProcess,
        pool.places,
        _rank_spec(recipe, config, critic_shape(recipe, shape)),
        origin,
        recipe.algorithm,
        config,
        recipe.run.steps,
        share=pool.share,
    )
    return CriticRanks(workers, pool.turn)


async def _start_reference(recipe: Recipe, shape: ModelShape, pools: Mapping[str, _Pool]) -> ReferenceRanks | None:
    config = recipe.roles.reference
    if config is None or config.pool is None:
        return None
    pool = pools[config.pool]
    workers = await start_processes(
        "reference",
        ReferenceProcess,
        pool.places,
        _rank_spec(recipe, config, shape),
        (config.path or recipe.model.path).absolute(),
        share=pool.share,
    )
    return ReferenceRanks(workers, pool.turn)


def _engine_places(recipe: Recipe, shape: ModelShape, pools: Mapping[str, _Pool]) -> Sequence[Place]:
    """In the order engine after engine takes them: beside the trainers, where most of their weights are already."""
    config, actor = recipe.roles.rollout, recipe.roles.actor
    if config is None:
        return ()
    places = pools[config.pool].places
    places = places[: len(places) // config.tensor * config.tensor]
    if config.pool != actor.pool:
        return places
    route = route_of(recipe, config, shape, num_engines=1)
    trainer_gpus, engine_gpus = gpu_numbers(pools[actor.pool].places, places)
    order = nearest_order(route.trainer_layout(), route.engine_layout(), trainer_gpus, engine_gpus)
    return [places[index] for index in order]


async def _start_engines(
    recipe: Recipe, pools: Mapping[str, _Pool], seats: Sequence[Place]
) -> tuple[Engines, list[EngineEndpoint]] | None:
    config = recipe.roles.rollout
    if config is None:
        return None
    pool = pools[config.pool]
    return await start_engines(recipe, config, seats, share=pool.share, is_shared=pool.is_shared)


def critic_folder(recipe: Recipe) -> Path:
    """Where the critic's first weights, its configuration and its tokenizer are."""
    critic = recipe.roles.critic
    return recipe.model.path if critic is None or critic.path is None else critic.path


def critic_shape(recipe: Recipe, policy: ModelShape) -> ModelShape:
    critic = recipe.roles.critic
    body = policy if critic is None or critic.path is None else read_model_shape(critic.path)
    return body.as_critic()


def _rank_spec(recipe: Recipe, split: ModelParallelConfig, shape: ModelShape) -> RankSpec:
    return RankSpec(
        rank=0,
        world=1,
        master_address="",
        master_port=0,
        device=recipe.run.device,
        split=split,
        shape=shape,
        seed=recipe.run.seed,
        timeout_s=recipe.train.operation_timeout_s,
    )


async def _open_fleet(
    recipe: Recipe,
    config: RolloutRoleConfig,
    engines: Engines,
    endpoints: Sequence[EngineEndpoint],
    stack: AsyncExitStack,
    observer: Observer,
) -> tuple[Fleet, Supervisor]:
    """Engines that are looked after until `stack` ends, which ends them, too."""
    stack.push_async_callback(engines.stop)
    connect = partial(EngineClient, request_timeout_s=config.request_timeout_s)
    fleet = Fleet(
        [connect(endpoint) for endpoint in endpoints],
        max_outstanding=config.max_running_requests,
        # The longest that nothing happens to an engine which is on its way back.
        publish_timeout_s=config.start_timeout_s + config.publish_timeout_s + recipe.train.operation_timeout_s,
        policy=RestartPolicy(
            max_restarts=config.max_restarts,
            back_off_s=config.restart_back_off_s,
            silence_timeout_s=config.silence_timeout_s,
            start_timeout_s=config.start_timeout_s,
        ),
    )
    stack.push_async_callback(fleet.close)
    observe_fleet(fleet, observer)
    supervisor = Supervisor(fleet, engines, connect=connect)
    await stack.enter_async_context(supervisor.running())
    await stack.enter_async_context(open_to_operator(recipe.run_folder, fleet, supervisor))
    return fleet, supervisor


async def _connect(
    config: RolloutRoleConfig,
    route: Route,
    ranks: ActorRanks,
    fleet: Fleet,
    supervisor: Supervisor,
    stack: AsyncExitStack,
    observer: Observer,
) -> TransferPublisher:
    """The weights' way from these ranks to the engines, whatever those serve now, as long as `stack` lasts."""
    host = ray.util.get_node_ip_address()
    publisher = TransferPublisher(
        ranks=ranks,
        fleet=fleet,
        control=EngineControl(fleet, timeout_s=config.publish_timeout_s, host=host),
        route=route,
        timeout_s=config.publish_timeout_s,
        host=host,
        failed=observer.publish_failed,
    )
    await publisher.connect()
    supervisor.attach(publisher)
    stack.callback(supervisor.attach, None)
    return publisher


def route_of(recipe: Recipe, config: RolloutRoleConfig, shape: ModelShape, *, num_engines: int) -> Route:
    dtype = "float32" if recipe.run.device == "cpu" else "bfloat16"
    return Route(
        shape=shape,
        parallel=MegatronParallel.of(recipe.roles.actor, data=recipe.data_parallel),
        trainer_dtype=dtype,
        num_engines=num_engines,
        tensor=config.tensor,
        engine_dtype=dtype,
        is_cpu_engine=recipe.run.device == "cpu",
        expert=config.expert,
        shares_devices=recipe.run.device == "cuda" and config.pool == recipe.roles.actor.pool,
        relays=config.relays_weights,
    )
