"""The serving side of a run: starts or joins the engines, and connects them with trainer ranks.

It outlives the trainer ranks: each new set of ranks is connected with the engines that run then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias, assert_never

from megarl.cluster.adoption import Adoption
from megarl.cluster.cluster import (
    Cluster,
    NodeBundle,
    Place,
    Pool,
    accelerators,
    gpu_numbers,
    open_cluster,
    own_address,
)
from megarl.cluster.lost_nodes import failure_of, followed, leave_for_spares
from megarl.cluster.tasks import logged_task, task_group
from megarl.config.model import ModelShape
from megarl.config.recipe import ClusterConfig, ModelConfig, Recipe
from megarl.config.roles import PoolConfig, RolesConfig, RolloutRoleConfig
from megarl.engine.client import EngineClient, EngineEndpoint, EngineKeys
from megarl.engine.control import EngineControl
from megarl.engine.fleet import UNFILLED, Engine, Fleet
from megarl.engine.lifecycle import EngineState, FellBehind, Relocated, RestartPolicy
from megarl.engine.process import EngineAdapters, EngineDeadlines, EngineSpec, deadlines_of, restart_policy
from megarl.errors import MachineError
from megarl.observe.observer import Observer
from megarl.planner.hardware import gpu_of
from megarl.planner.memory import adapter_slots, planned_cached_tokens
from megarl.ranks.calls import ActorCalls, ModelCalls
from megarl.ranks.ranks import RankGroup
from megarl.ranks.start import Trainers, start_trainers
from megarl.results import PublishResult
from megarl.serving.adapter_publisher import AdapterPublisher
from megarl.serving.file_publisher import PUBLISH_FOLDER, FilePublisher, endpoints_of
from megarl.serving.nodes import EngineNodes, Growth, nodes_of
from megarl.serving.operator import open_to_operator
from megarl.serving.phases import Offloader, SeparatePhases, SharedPhases, SharedPublisher
from megarl.serving.processes import Engines, start_engines
from megarl.serving.publisher import TransferPublisher
from megarl.serving.stragglers import EngineWatch
from megarl.serving.supervisor import Supervisor, observe_fleet
from megarl.stages import Phases, Publisher
from megarl.types import PolicyVersion
from megarl.weights.algebra.locality import nearest_order
from megarl.weights.algebra.slices import TensorSpec
from megarl.weights.layouts.canonical import canonical_tensors
from megarl.weights.layouts.fp8 import quantization_config
from megarl.weights.layouts.lora import LoraShape, served_tensors
from megarl.weights.layouts.megatron import MegatronParallel
from megarl.weights.layouts.transfer_spec import TransferSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class NoServing:
    """A run without engines: supervised fine-tuning without an evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalServing:
    """Engines that megarl did not start and cannot restart; they load each version from a folder."""

    config: RolloutRoleConfig
    fleet: Fleet
    model_folder: Path
    publish_folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagedServing:
    """Engines that megarl starts, supervises and sends weights to."""

    config: RolloutRoleConfig
    fleet: Fleet
    supervisor: Supervisor
    transfer: Callable[[], TransferSpec]
    """Returns the one from the trainer ranks to all engines of the fleet, where both are then."""
    host: str
    """The driver's address for the engines."""
    phases: SeparatePhases | SharedPhases
    nodes: tuple[str, ...]
    """Ray's id of the first node of every engine."""
    adapters: ServedAdapters | None
    """The adapters that engines serve beside their base; None: their weights are published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedAdapters:
    places: Engines
    base_folder: Path
    tensors: Mapping[str, TensorSpec]
    limits: EngineAdapters


Serving: TypeAlias = NoServing | ExternalServing | ManagedServing


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """One set of trainer ranks, connected with the serving side."""

    trainers: Trainers
    serving: Serving
    publisher: Publisher
    phases: Phases


class NoPublisher:
    """For runs without engines."""

    async def publish(self, version: PolicyVersion) -> PublishResult:
        return PublishResult(version=version, num_bytes=0, seconds=0.0, num_engines=0)


def reserve_pools(cluster: Cluster, pools: Mapping[str, PoolConfig], roles: RolesConfig) -> dict[str, Pool]:
    """Reserve the places of every pool. Roles of one pool share its devices."""
    users, ranks = list(roles.used_pools.values()), {role.pool for role in roles.megatron_roles.values()}
    return {
        name: Pool(places, users.count(name), cluster.actors, cluster.faults, has_ranks=name in ranks)
        for name, places in cluster.reserve(pools).items()
    }


async def start_serving(
    recipe: Recipe, shape: ModelShape, pools: Mapping[str, Pool], stack: AsyncExitStack, *, observer: Observer
) -> Serving:
    """Start the engines, or join those that run already. `stack` takes down what is started."""
    config = recipe.roles.rollout
    if config is None:
        return NoServing()
    publish_timeout_s = config.publish_timeout_s + recipe.train.operation_timeout_s
    deadlines = deadlines_of(
        config, shape, device=recipe.run.device, max_response_tokens=recipe.longest_response_tokens
    )
    if config.pool is None:
        endpoints = endpoints_of(config.endpoints, device=recipe.run.device)
        fleet = _open_fleet(config, endpoints, deadlines, stack, observer, publish_timeout_s=publish_timeout_s)
        return _external(config, fleet, model_folder=recipe.model.path, run_folder=recipe.run_folder)
    pool = pools[config.pool]
    num_engines = len(pool.places) // config.tensor
    transfer = transfer_spec(recipe, config, shape, num_engines=num_engines)
    places = _near_trainers(transfer, pools[recipe.roles.actor.pool].places, pool.places)
    lora, num_adapters = recipe.model.lora, adapter_slots(recipe.train.max_staleness)
    gpu = gpu_of(recipe.cluster, accelerators()) if pool.is_shared and recipe.run.device == "cuda" else None
    first = EngineSpec(
        index=0,
        model_folder=recipe.model.path.absolute(),
        config=config,
        device=recipe.run.device,
        seed=recipe.run.seed,
        run_folder=recipe.run_folder.absolute(),
        keys=EngineKeys.fresh(),
        start_timeout_s=deadlines.start_s,
        loads_weights=lora is not None,  # the base of adapters is loaded from its folder, and stays
        adapters=EngineAdapters(rank=lora.rank, modules=lora.served_modules(shape), num_loaded=num_adapters)
        if lora
        else None,
        has_float32_head=recipe.model.has_float32_head,
        quantization=quantization_config(shape, config.fp8_keep),
        returns_routes=recipe.replays_routing(shape),
        shares_devices=pool.is_shared,
        cached_tokens=planned_cached_tokens(shape, config, gpu, lora=lora, num_adapters=num_adapters) if gpu else None,
        bind=recipe.network.bind,
    )
    specs = [replace(first, index=index) for index in range(num_engines)]
    adoption = Adoption(pool.actors, config, num_engines, is_possible=gpu is None, noted=observer.noted)
    engines, endpoints = await start_engines(specs, places, share=pool.share, adoption=adoption)
    stack.push_async_callback(engines.stop)
    # The longest time without news of an engine that is being restarted.
    patience_s, policy = publish_timeout_s + deadlines.start_s, restart_policy(config, deadlines.start_s)
    fleet = _open_fleet(config, endpoints, deadlines, stack, observer, publish_timeout_s=patience_s, policy=policy)
    keeping = partial(kept_engines, recipe.run_folder, fleet, engines, pool, cluster=recipe.cluster)
    supervisor = await stack.enter_async_context(keeping(observer=observer, request_timeout_s=deadlines.request_s))
    return ManagedServing(
        config=config,
        fleet=fleet,
        supervisor=supervisor,
        transfer=partial(_located, transfer, pools[recipe.roles.actor.pool], engines),
        host=own_address(recipe.network.bind),
        phases=_shared_phases(fleet, config) if pool.is_shared else SeparatePhases(),
        nodes=tuple(place.node for place in places[:: config.tensor]),
        adapters=_served_adapters(recipe.model, shape, first, engines),
    )


def _shared_phases(fleet: Fleet, config: RolloutRoleConfig) -> SharedPhases:
    return SharedPhases(fleet, releases_weights=config.release == "everything")


def _external(config: RolloutRoleConfig, fleet: Fleet, *, model_folder: Path, run_folder: Path) -> ExternalServing:
    publish_folder = config.publish_folder or run_folder / PUBLISH_FOLDER
    return ExternalServing(
        config=config, fleet=fleet, model_folder=model_folder.absolute(), publish_folder=publish_folder.absolute()
    )


def _served_adapters(
    model: ModelConfig, shape: ModelShape, spec: EngineSpec, engines: Engines
) -> ServedAdapters | None:
    if model.lora is None or spec.adapters is None:
        return None
    tensors = served_tensors(canonical_tensors(shape), LoraShape.of(model.lora), dtype=spec.dtype)
    return ServedAdapters(places=engines, base_folder=spec.model_folder, tensors=tensors, limits=spec.adapters)


def _near_trainers(
    transfer: TransferSpec, trainer_places: Sequence[Place], engine_places: Sequence[Place]
) -> Sequence[Place]:
    """Return the places of the engines, in the order in which the engines take them.

    In a shared pool each engine is near the trainer ranks that hold most of its weights.
    """
    places = engine_places[: transfer.num_targets]
    if not transfer.shares_devices:
        return places
    one = replace(transfer, num_engines=1)
    order = nearest_order(one.trainer_layout(), one.engine_layout(), *gpu_numbers(trainer_places, places))
    return [places[index] for index in order]


def _located(transfer: TransferSpec, trainers: Pool, engines: Engines) -> TransferSpec:
    """Return the transfer to the engines of now, where they and the trainer ranks are: nodes are lost and added."""
    trainer_gpus, engine_gpus = gpu_numbers(trainers.places, engines.places)
    if transfer.shares_devices and transfer.is_cpu_engine:
        # Host memory is one device: every engine rank of a node reads what any trainer rank there holds.
        trainer_gpus, engine_gpus = (tuple((node, 0) for node, _ in gpus) for gpus in (trainer_gpus, engine_gpus))
    num_engines = len(engine_gpus) // transfer.tensor
    return replace(transfer, num_engines=num_engines, trainer_gpus=trainer_gpus, engine_gpus=engine_gpus)


def _open_fleet(
    config: RolloutRoleConfig,
    endpoints: Sequence[EngineEndpoint],
    deadlines: EngineDeadlines,
    stack: AsyncExitStack,
    observer: Observer,
    *,
    publish_timeout_s: float,
    policy: RestartPolicy | None = None,
) -> Fleet:
    fleet = Fleet(
        [EngineClient(endpoint, request_timeout_s=deadlines.request_s) for endpoint in endpoints],
        max_outstanding=config.max_running_requests,
        publish_timeout_s=publish_timeout_s,
        policy=policy,
    )
    stack.push_async_callback(fleet.close)
    if policy is not None:
        # Engines that megarl starts have random weights at first.
        for engine in fleet.engines:
            fleet.report(engine, FellBehind(reason=UNFILLED))
    observe_fleet(fleet, observer)
    return fleet


async def connect(
    roles: RolesConfig, trainers: Trainers, serving: Serving, stack: AsyncExitStack, *, observer: Observer
) -> Roles:
    """Check that these ranks can publish to the engines. `stack` ends the connection."""
    publisher: Publisher
    phases: Phases = SeparatePhases()
    match serving:
        case NoServing():
            publisher = NoPublisher()
        case ExternalServing(config=config):
            publisher = FilePublisher(
                ranks=trainers.actor,
                fleet=serving.fleet,
                folder=serving.publish_folder,
                source_folder=serving.model_folder,
                timeout_s=config.publish_timeout_s,
            )
            await publisher.connect()
        case ManagedServing(phases=phases):
            sending = await _connect_managed(roles, trainers, serving, observer)
            publisher = sending
            serving.supervisor.attach(sending)
            stack.callback(serving.supervisor.attach, None)
        case _:
            assert_never(serving)
    return Roles(trainers=trainers, serving=serving, publisher=publisher, phases=phases)


async def _connect_managed(
    roles: RolesConfig, trainers: Trainers, serving: ManagedServing, observer: Observer
) -> TransferPublisher | AdapterPublisher | SharedPublisher:
    phases, ranks = serving.phases, trainers.actor
    publisher = _sending_publisher(ranks, serving, observer)
    if not isinstance(phases, SharedPhases):
        if isinstance(publisher, TransferPublisher):
            await publisher.connect()
        return publisher
    shared = SharedPublisher(publisher, phases)

    async def refill() -> None:
        await shared.publish(PolicyVersion((await ranks.call(ActorCalls.version))[0]))

    can_send_away = roles.actor.offload != "everything" or "actor" not in roles.beside_engines
    phases.take_turns_with(offloaders(roles.beside_engines, trainers), refill=refill, can_send_away=can_send_away)
    await phases.take_weights()
    if isinstance(publisher, TransferPublisher):
        await publisher.connect()
    return shared


def _sending_publisher(
    ranks: RankGroup[ActorCalls], serving: ManagedServing, observer: Observer
) -> TransferPublisher | AdapterPublisher:
    config, fleet, host = serving.config, serving.fleet, serving.host
    timeout_s, flushes_cache = config.publish_timeout_s, config.in_flight != "in_place"
    if serving.adapters is not None:
        return AdapterPublisher(
            ranks=ranks,
            fleet=fleet,
            places=serving.adapters.places,
            base_folder=serving.adapters.base_folder,
            tensors=serving.adapters.tensors,
            num_loaded=serving.adapters.limits.num_loaded,
            timeout_s=timeout_s,
            failed=observer.publish_failed,
        )
    return TransferPublisher(
        ranks=ranks,
        fleet=fleet,
        control=EngineControl(fleet, timeout_s=timeout_s, host=host, flushes_cache=flushes_cache),
        transfer=serving.transfer,
        timeout_s=timeout_s,
        host=host,
        failed=observer.publish_failed,
    )


def offloaders(roles: Iterable[str], trainers: Trainers) -> list[Offloader]:
    """Return the models of these roles: one that offloads nothing still gives back what torch keeps for later."""
    beside = [model for role in roles if (model := trainers.by_role.get(role)) is not None]
    return [
        Offloader(
            trim=partial(ranks.compute, ModelCalls.trim),
            release=partial(ranks.compute, ModelCalls.release),
            reload=partial(ranks.compute, ModelCalls.reload),
        )
        for ranks in beside
    ]


@asynccontextmanager
async def started_roles(recipe: Recipe, shape: ModelShape, *, ray_address: str | None) -> AsyncIterator[Roles]:
    """Start every role of a recipe from its model, for a tool, and stop them when the block ends."""
    observer = Observer(())
    recipe.run_folder.mkdir(parents=True, exist_ok=True)
    with open_cluster(recipe.run, recipe.pools, address=ray_address) as cluster:
        pools = reserve_pools(cluster, recipe.pools, recipe.roles)
        async with AsyncExitStack() as stack:
            async with task_group() as tasks:
                serving = tasks.create_task(start_serving(recipe, shape, pools, stack, observer=observer))
                await make_room(recipe.roles, serving)
                trainers = tasks.create_task(start_trainers(recipe, shape, pools, stack, resume=None))
            yield await connect(recipe.roles, trainers.result(), serving.result(), stack, observer=observer)


async def make_room(roles: RolesConfig, serving: asyncio.Task[Serving]) -> None:
    """Return when trainers may start: at once, or in a shared pool when the engines have started and sleep."""
    if roles.beside_engines:
        # Shielded: engines go on starting when ranks are lost meanwhile.
        engines = await asyncio.shield(serving)
        if isinstance(engines, ManagedServing) and isinstance(engines.phases, SharedPhases):
            await engines.phases.make_room()


def transfer_spec(recipe: Recipe, config: RolloutRoleConfig, shape: ModelShape, *, num_engines: int) -> TransferSpec:
    is_shared = config.pool == recipe.roles.actor.pool
    return TransferSpec(
        shape=shape,
        parallel=MegatronParallel.of(recipe.roles.actor, data=recipe.data_parallel),
        trainer_dtype=recipe.run.dtype,
        num_engines=num_engines,
        tensor=config.tensor,
        engine_dtype=recipe.run.dtype,
        is_cpu_engine=recipe.run.device == "cpu",
        expert=config.expert,
        shares_devices=is_shared,
        relays=config.relays_weights,
        keeps_open=recipe.roles.actor.offload != "everything" and (config.fp8_keep is None or not is_shared),
        fp8_keep=config.fp8_keep,
    )


_HAND_OVER_S = 30.0
_POLL_S = 0.25
_RETRY_S = 10.0


@asynccontextmanager
async def kept_engines(
    run_folder: Path,
    fleet: Fleet,
    engines: Engines,
    pool: Pool,
    *,
    cluster: ClusterConfig,
    observer: Observer,
    request_timeout_s: float,
) -> AsyncIterator[Supervisor]:
    """Keep the engines inside the block; yield their supervisor."""
    connect = partial(EngineClient, request_timeout_s=request_timeout_s)
    supervisor = Supervisor(fleet, engines, connect=connect, may_start=engines.has_nodes)
    slow = EngineWatch(fleet, cluster.stragglers, observer, drain=supervisor.drain)

    async with AsyncExitStack() as stack:
        await stack.enter_async_context(supervisor.running())
        moves: list[asyncio.Task[None]] = []
        stack.push_async_callback(_cancel, moves)

        def move(node: str, retired: Sequence[Engine]) -> None:
            moving = _move(pool, fleet, engines, supervisor, node, retired, warn=observer.warned)
            moves.append(logged_task(moving))

        nodes = EngineNodes(
            fleet,
            supervisor,
            max_faults=cluster.max_node_faults,
            observer=observer,
            faults=pool.faults,
            grow=Growth(pool, fleet, engines, connect=connect).add,
            excluded=move,
        )
        await stack.enter_async_context(open_to_operator(run_folder, fleet, supervisor, nodes))
        await stack.enter_async_context(slow.running())
        await stack.enter_async_context(following_nodes(pool, fleet, engines, warn=observer.warned))
        yield supervisor


def following_nodes(
    pool: Pool, fleet: Fleet, engines: Engines, *, warn: Callable[[str], None]
) -> AbstractAsyncContextManager[None]:
    """Start the engines of a lost or excluded node, inside the block, on the node that their devices are moved to."""

    async def start_there(bundle: NodeBundle) -> None:
        for engine in fleet.engines:
            if bundle in engines.nodes_of(engine.index):
                if engines.is_elsewhere(engine.index):
                    await engines.leave(engine.index)
                fleet.report(engine, Relocated())

    return followed(pool, moved=start_there, warn=warn)


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _move(
    pool: Pool,
    fleet: Fleet,
    engines: Engines,
    supervisor: Supervisor,
    node: str,
    retired: Sequence[Engine],
    *,
    warn: Callable[[str], None],
) -> None:
    """Start the engines of an excluded node on a spare one, when their requests have left them."""
    deadline = time.monotonic() + _HAND_OVER_S
    while any(engine.num_requests for engine in retired) and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_S)
    for engine in retired:
        await engines.leave(engine.index)
    places = [pair for engine in retired for pair in zip(nodes_of(engine), engines.nodes_of(engine.index), strict=True)]
    left = {bundle: bundle.node for address, bundle in places if address == node}
    leave = partial(_left_with_ranks, left) if pool.has_ranks else partial(leave_for_spares, pool, list(left))
    told = ""
    # Until the operator takes the node or one of its engines back.
    while node in pool.faults.excluded and all(engine.state is EngineState.RETIRED for engine in retired):
        problem = await failure_of(leave)
        if problem is None and fleet.is_awake:
            warn(f"the engines of node {node} start on a spare node")
            for engine in retired:
                supervisor.add(engine.index)
            return
        if problem is not None and problem != told:
            warn(f"the engines of node {node} stay out for now: {problem}")
            told = problem
        await asyncio.sleep(_RETRY_S if problem else _POLL_S)


def _left_with_ranks(nodes: Mapping[NodeBundle, str]) -> None:
    """Raise MachineError while a bundle of a shared pool is still on its node."""
    if any(bundle.node == node for bundle, node in nodes.items()):
        raise MachineError("they leave the node with the ranks of their pool, when these start again")
