"""The serving side of a run: starts or joins the engines of rollout, and has them watched and repaired.

`supervisor` notices deaths and silence, `stragglers` slow engines, `nodes` faulty and lost nodes; `operator` lets a
person retire and add engines. Each reports to the fleet what happened to an engine.

It outlives the trainer ranks: `connect` connects each new set of ranks with the engines that run then.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

from megarl.cluster.cluster import Cluster, Pool, own_address
from megarl.config.recipe import ClusterConfig, Recipe
from megarl.config.roles import PoolConfig, RolesConfig, RolloutRoleConfig
from megarl.engine.admin import endpoints_of
from megarl.engine.client import EngineClient, EngineEndpoint
from megarl.engine.fleet import UNFILLED, Fleet
from megarl.engine.lifecycle import FellBehind, RestartPolicy
from megarl.engine.process import EngineDeadlines, deadlines_of, restart_policy
from megarl.families.shape import ModelShape
from megarl.observe.observer import Observer
from megarl.serving.adapter_publisher import ServedAdapters
from megarl.serving.nodes import EngineNodes, following_nodes, moving_engines
from megarl.serving.operator import Growth, open_to_operator
from megarl.serving.phases import SharedPhases, SleepingFleet
from megarl.serving.processes import Adoption, Engines, start_engines
from megarl.serving.specs import draft_transfer, located, near_trainers, rollout_engine, transfer_spec
from megarl.serving.stragglers import EngineWatch
from megarl.serving.supervisor import Supervisor, observe_fleet
from megarl.stages import SeparatePhases
from megarl.weights.layouts.transfer_spec import TransferSpec

_PUBLISH_FOLDER = "published"
"""Name of the folder in the run's folder from which external engines load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoServing:
    """A run without engines: supervised fine-tuning without an evaluation."""

    fleet: None = None


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
    draft_transfer: Callable[[], TransferSpec] | None
    """The same from the drafter's ranks to the drafts of the engines; None where those stay as they are."""
    host: str
    """The driver's address for the engines."""
    phases: SeparatePhases | SharedPhases
    nodes: tuple[str, ...]
    """Ray's id of the first node of every engine."""
    adapters: ServedAdapters | None
    """The adapters that engines serve beside their base; None: their weights are published."""


Serving: TypeAlias = NoServing | ExternalServing | ManagedServing


def reserve_pools(cluster: Cluster, pools: Mapping[str, PoolConfig], roles: RolesConfig) -> dict[str, Pool]:
    """Reserve the places of every pool. Roles of one pool share its devices."""
    users = list(roles.used_pools.values())
    ranks = {role.pool for role in roles.megatron_roles.values()}
    return {
        name: Pool(
            places,
            users.count(name),
            cluster.actors,
            cluster.faults,
            has_ranks=name in ranks,
            is_private=cluster.is_private,
        )
        for name, places in cluster.reserve(pools).items()
    }


async def start_serving(
    recipe: Recipe, shape: ModelShape, pools: Mapping[str, Pool], stack: AsyncExitStack, *, observer: Observer
) -> Serving:
    """Start the engines, or join those that run already. `stack` takes down what is started."""
    config = recipe.roles.rollout
    if config is None:
        return NoServing()
    deadlines = deadlines_of(
        config, shape, device=recipe.run.device, max_response_tokens=recipe.longest_response_tokens
    )
    publish_timeout_s = config.publish_timeout_s + recipe.train.deadline_s
    if config.pool is None:
        endpoints = endpoints_of(config.endpoints, device=recipe.run.device)
        return ExternalServing(
            config=config,
            fleet=_open_fleet(config, endpoints, deadlines, stack, observer, publish_timeout_s=publish_timeout_s),
            model_folder=recipe.model.path.absolute(),
            publish_folder=(config.publish_folder or recipe.run_folder / _PUBLISH_FOLDER).absolute(),
        )
    return await _start_managed(
        recipe, config, shape, deadlines, pools, stack, observer=observer, publish_timeout_s=publish_timeout_s
    )


async def _start_managed(
    recipe: Recipe,
    config: RolloutRoleConfig,
    shape: ModelShape,
    deadlines: EngineDeadlines,
    pools: Mapping[str, Pool],
    stack: AsyncExitStack,
    *,
    observer: Observer,
    publish_timeout_s: float,
) -> ManagedServing:
    assert config.pool is not None, "engines that megarl starts have a pool"
    pool = pools[config.pool]
    trainer_pool = pools[recipe.roles.actor.pool]
    num_engines = len(pool.places) // config.tensor
    transfer = transfer_spec(recipe, config, shape, num_engines=num_engines)
    places = near_trainers(transfer, trainer_pool.places, pool.places)
    first = rollout_engine(recipe, config, shape, shares_devices=pool.is_shared, start_timeout_s=deadlines.start_s)
    # No call tells which memory an engine has given up to trainers on its GPUs.
    gives_up_memory = pool.is_shared and config.gives_up_memory
    is_adoptable = not (gives_up_memory and recipe.run.device == "cuda")
    adoption = Adoption(pool.actors, config, num_engines, is_possible=is_adoptable, noted=observer.noted)
    specs = [replace(first, index=index) for index in range(num_engines)]
    engines, endpoints = await start_engines(specs, places, gpu_fraction=pool.gpu_fraction, adoption=adoption)
    stack.push_async_callback(engines.stop)
    fleet = _open_fleet(
        config,
        endpoints,
        deadlines,
        stack,
        observer,
        # The longest time without news of an engine that is being restarted.
        publish_timeout_s=publish_timeout_s + deadlines.start_s,
        policy=restart_policy(config, deadlines.start_s),
        policies=tuple(recipe.policies),
    )
    watching = watched_engines(
        recipe.run_folder,
        fleet,
        engines,
        pool,
        cluster=recipe.cluster,
        observer=observer,
        request_timeout_s=deadlines.request_s,
    )
    return ManagedServing(
        config=config,
        fleet=fleet,
        supervisor=await stack.enter_async_context(watching),
        transfer=partial(located, transfer, trainer_pool, engines),
        draft_transfer=draft_transfer(recipe, config, pools, engines, num_engines=num_engines),
        host=own_address(recipe.network.bind),
        phases=SharedPhases(SleepingFleet(fleet), releases_weights=config.release == "everything")
        if gives_up_memory
        else SeparatePhases(),
        nodes=tuple(place.node for place in places[:: config.tensor]),
        adapters=ServedAdapters.of(recipe, shape, first),
    )


def _open_fleet(
    config: RolloutRoleConfig,
    endpoints: Sequence[EngineEndpoint],
    deadlines: EngineDeadlines,
    stack: AsyncExitStack,
    observer: Observer,
    *,
    publish_timeout_s: float,
    policy: RestartPolicy | None = None,
    policies: Sequence[str] = (),
) -> Fleet:
    fleet = Fleet(
        [EngineClient(endpoint, request_timeout_s=deadlines.request_s) for endpoint in endpoints],
        max_outstanding=config.outstanding_requests,
        publish_timeout_s=publish_timeout_s,
        policy=policy,
        policies=policies,
    )
    stack.push_async_callback(fleet.close)
    if policy is not None:
        # Engines that megarl starts have random weights at first.
        for engine in fleet.engines:
            fleet.report(engine, FellBehind(reason=UNFILLED))
    observe_fleet(fleet, observer)
    return fleet


@asynccontextmanager
async def watched_engines(
    run_folder: Path,
    fleet: Fleet,
    engines: Engines,
    pool: Pool,
    *,
    cluster: ClusterConfig,
    observer: Observer,
    request_timeout_s: float,
) -> AsyncIterator[Supervisor]:
    """Watch the engines inside the block; yield their supervisor."""
    connect = partial(EngineClient, request_timeout_s=request_timeout_s)
    supervisor = Supervisor(fleet, engines, connect=connect)
    slow = EngineWatch(fleet, cluster.stragglers, observer, drain=supervisor.drain)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(supervisor.running())
        move = await stack.enter_async_context(moving_engines(pool, fleet, engines, supervisor, warn=observer.warned))
        nodes = EngineNodes(
            fleet,
            supervisor,
            max_faults=cluster.max_node_faults,
            observer=observer,
            faults=pool.faults,
            grow=Growth(pool, fleet, engines, connect=connect).add,
            notify_excluded=move,
        )
        await stack.enter_async_context(open_to_operator(run_folder, fleet, supervisor, nodes, warn=observer.warned))
        await stack.enter_async_context(slow.running())
        await stack.enter_async_context(following_nodes(pool, fleet, engines, warn=observer.warned))
        yield supervisor
