"""The side that generates, and its connection with the trainer ranks, which `trainers` starts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

from megarl.config.model import ModelShape
from megarl.config.recipe import Recipe
from megarl.config.roles import RolloutRoleConfig
from megarl.observe.observer import Observer
from megarl.rollout.client import EngineClient, EngineEndpoint
from megarl.rollout.control import EngineControl
from megarl.rollout.fleet import Fleet
from megarl.rollout.lifecycle import RestartPolicy
from megarl.runtime.cluster import Cluster, Place, Pool, gpu_numbers, open_cluster, own_address
from megarl.runtime.engines.file_publisher import PUBLISH_FOLDER, FilePublisher, endpoints_of
from megarl.runtime.engines.fleet_events import observe_fleet
from megarl.runtime.engines.operator import open_to_operator
from megarl.runtime.engines.processes import Engines, start_engines
from megarl.runtime.engines.publisher import NoPublisher, TransferPublisher
from megarl.runtime.engines.supervisor import Supervisor
from megarl.runtime.phases import Offloader, SeparatePhases, SharedPhases
from megarl.runtime.tasks import task_group
from megarl.runtime.trainers.actor import ActorWeights
from megarl.runtime.trainers.ranks import RankGroup
from megarl.runtime.trainers.start import Trainers, start_trainers
from megarl.stages import Phases, Publisher
from megarl.train.trained import TrainedRank
from megarl.weights.algebra.locality import nearest_order
from megarl.weights.layouts.megatron import MegatronParallel
from megarl.weights.layouts.transfer_spec import TransferSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """The side that generates. It outlives the trainer ranks that it gets its weights from."""

    fleet: Fleet | None
    """None where nobody generates."""
    supervisor: Supervisor | None
    """Of the fleet."""
    transfer: TransferSpec | None
    """From trainer ranks to all engines of the fleet."""
    phases: Phases


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Everything that runs in a process of its own, for one life of the trainer ranks."""

    trainers: Trainers
    fleet: Fleet | None
    """None where nobody generates."""
    supervisor: Supervisor | None
    """Of the fleet."""
    publisher: Publisher
    phases: Phases


def reserve_pools(recipe: Recipe, cluster: Cluster) -> dict[str, Pool]:
    return {name: Pool(places, _users(recipe, name)) for name, places in cluster.reserve(recipe.pools).items()}


def _users(recipe: Recipe, pool: str) -> int:
    """How many roles have processes in a pool."""
    roles = recipe.roles
    named = (roles.actor, roles.critic, roles.reference, roles.rollout)
    return sum(role is not None and role.pool == pool for role in named)


async def start_rollout(
    recipe: Recipe, shape: ModelShape, pools: Mapping[str, Pool], stack: AsyncExitStack, *, observer: Observer
) -> Rollout:
    """`stack` takes down what was started."""
    config = recipe.roles.rollout
    if config is None:
        return Rollout(fleet=None, supervisor=None, transfer=None, phases=SeparatePhases())
    if config.pool is None:
        fleet = _join_fleet(recipe, config, stack, observer)
        return Rollout(fleet=fleet, supervisor=None, transfer=None, phases=SeparatePhases())
    pool = pools[config.pool]
    seats = _engine_places(recipe, config, config.pool, shape, pools)
    engines, endpoints = await start_engines(recipe, config, seats, share=pool.share, is_shared=pool.is_shared)
    fleet, supervisor = await _open_fleet(recipe, config, engines, endpoints, stack, observer)
    trainer_gpus, engine_gpus = gpu_numbers(pools[recipe.roles.actor.pool].places, seats)
    transfer = transfer_spec(recipe, config, shape, num_engines=len(fleet.engines))
    if transfer.is_cpu_engine and transfer.shares_devices:
        # Host memory is one device: every engine rank of a node reads what any trainer rank there holds.
        trainer_gpus, engine_gpus = (tuple((node, 0) for node, _ in gpus) for gpus in (trainer_gpus, engine_gpus))
    return Rollout(
        fleet=fleet,
        supervisor=supervisor,
        transfer=replace(transfer, trainer_gpus=trainer_gpus, engine_gpus=engine_gpus),
        phases=SharedPhases([fleet]) if pool.is_shared else SeparatePhases(),
    )


def _engine_places(
    recipe: Recipe, config: RolloutRoleConfig, pool: str, shape: ModelShape, pools: Mapping[str, Pool]
) -> Sequence[Place]:
    """In the order engine after engine takes them: beside the trainers, where most of their weights are already."""
    actor, places = recipe.roles.actor, pools[pool].places
    places = places[: len(places) // config.tensor * config.tensor]
    if pool != actor.pool:
        return places
    transfer = transfer_spec(recipe, config, shape, num_engines=1)
    trainer_gpus, engine_gpus = gpu_numbers(pools[actor.pool].places, places)
    order = nearest_order(transfer.trainer_layout(), transfer.engine_layout(), trainer_gpus, engine_gpus)
    return [places[index] for index in order]


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


def _join_fleet(recipe: Recipe, config: RolloutRoleConfig, stack: AsyncExitStack, observer: Observer) -> Fleet:
    """Engines that run already: nobody here can start one again."""
    endpoints = endpoints_of(config.endpoints, device=recipe.run.device)
    fleet = Fleet(
        [EngineClient(endpoint, request_timeout_s=config.request_timeout_s) for endpoint in endpoints],
        max_outstanding=config.max_running_requests,
        publish_timeout_s=config.publish_timeout_s + recipe.train.operation_timeout_s,
    )
    stack.push_async_callback(fleet.close)
    observe_fleet(fleet, observer)
    return fleet


async def connect(
    recipe: Recipe,
    trainers: Trainers,
    rollout: Rollout,
    stack: AsyncExitStack,
    *,
    observer: Observer,
) -> Roles:
    """Both sides together, with the weights' way from these ranks to the engines, as long as `stack` lasts."""
    config, fleet, supervisor, transfer = recipe.roles.rollout, rollout.fleet, rollout.supervisor, rollout.transfer
    publisher: Publisher = NoPublisher()
    if config is not None and fleet is not None and supervisor is not None and transfer is not None:
        host = own_address(recipe.network.bind)
        weights = ActorWeights(trainers.actor)
        publisher = await _connect(config, transfer, weights, fleet, supervisor, stack, observer, host=host)
    elif config is not None and fleet is not None:
        publisher = await _connect_by_files(recipe, config, ActorWeights(trainers.actor), fleet)
    if isinstance(rollout.phases, SharedPhases):
        rollout.phases.take_turns_with(_offloaders(recipe, trainers))
    return Roles(trainers=trainers, fleet=fleet, supervisor=supervisor, publisher=publisher, phases=rollout.phases)


def _offloaders(recipe: Recipe, trainers: Trainers) -> list[Offloader]:
    actor, critic = recipe.roles.actor, recipe.roles.critic
    offloaders = [_offloader(trainers.actor)] if actor.offload != "nothing" else []
    if trainers.critic is not None and critic is not None and critic.offload != "nothing":
        offloaders.append(_offloader(trainers.critic))
    return offloaders


def _offloader(ranks: RankGroup[TrainedRank]) -> Offloader:
    return Offloader(release=ranks.computing(TrainedRank.release), reload=ranks.computing(TrainedRank.reload))


async def _connect(
    config: RolloutRoleConfig,
    transfer: TransferSpec,
    ranks: ActorWeights,
    fleet: Fleet,
    supervisor: Supervisor,
    stack: AsyncExitStack,
    observer: Observer,
    *,
    host: str,
) -> TransferPublisher:
    """The weights' way from these ranks to the engines, whatever those serve now, as long as `stack` lasts."""
    publisher = TransferPublisher(
        ranks=ranks,
        fleet=fleet,
        control=EngineControl(
            fleet, timeout_s=config.publish_timeout_s, host=host, flushes_cache=config.in_flight != "in_place"
        ),
        transfer=transfer,
        timeout_s=config.publish_timeout_s,
        host=host,
        failed=observer.publish_failed,
    )
    await publisher.connect()
    supervisor.attach(publisher)
    stack.callback(supervisor.attach, None)
    return publisher


async def _connect_by_files(
    recipe: Recipe, config: RolloutRoleConfig, ranks: ActorWeights, fleet: Fleet
) -> FilePublisher:
    folder = config.publish_folder or recipe.run_folder / PUBLISH_FOLDER
    publisher = FilePublisher(
        ranks=ranks,
        fleet=fleet,
        folder=folder.absolute(),
        source_folder=recipe.model.path.absolute(),
        timeout_s=config.publish_timeout_s,
    )
    await publisher.connect()
    return publisher


@asynccontextmanager
async def started_roles(recipe: Recipe, shape: ModelShape, *, ray_address: str | None) -> AsyncIterator[Roles]:
    """Start every role of a recipe from its model, for a tool, and stop them when the block ends."""
    observer = Observer(())
    recipe.run_folder.mkdir(parents=True, exist_ok=True)
    with open_cluster(recipe, address=ray_address) as cluster:
        pools = reserve_pools(recipe, cluster)
        async with AsyncExitStack() as stack:
            async with task_group() as tasks:
                trainers = tasks.create_task(start_trainers(recipe, shape, pools, stack, resume=None))
                rollout = tasks.create_task(start_rollout(recipe, shape, pools, stack, observer=observer))
            yield await connect(recipe, trainers.result(), rollout.result(), stack, observer=observer)


def transfer_spec(recipe: Recipe, config: RolloutRoleConfig, shape: ModelShape, *, num_engines: int) -> TransferSpec:
    return TransferSpec(
        shape=shape,
        parallel=MegatronParallel.of(recipe.roles.actor, data=recipe.data_parallel),
        trainer_dtype=recipe.run.dtype,
        num_engines=num_engines,
        tensor=config.tensor,
        engine_dtype=recipe.run.dtype,
        is_cpu_engine=recipe.run.device == "cpu",
        expert=config.expert,
        shares_devices=config.pool == recipe.roles.actor.pool,
        relays=config.relays_weights,
        keeps_open=recipe.roles.actor.offload != "everything",
    )
