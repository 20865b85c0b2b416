"""Starting the roles and connecting them: trainer ranks, engines, and the weights' way from one to the other."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass

import ray

from megarl.checkpoint.resume import ResumePoint
from megarl.config.model import ModelShape
from megarl.config.recipe import Recipe, RolloutRoleConfig
from megarl.rollout.client import EngineClient
from megarl.rollout.control import EngineControl
from megarl.rollout.fleet import Fleet
from megarl.rollout.orders import Route
from megarl.runtime.cluster import Cluster
from megarl.runtime.engines import Engines, start_engines
from megarl.runtime.phases import SeparatePhases, SharedPhases
from megarl.runtime.publisher import NoPublisher, TransferPublisher
from megarl.runtime.ranks import Ranks, start_ranks
from megarl.runtime.tasks import task_group
from megarl.stages import Phases, Publisher
from megarl.train.rank import RankSpec
from megarl.weights.megatron import MegatronParallel


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Everything that runs in a process of its own."""

    ranks: Ranks
    fleet: Fleet | None
    """None where nobody generates."""
    publisher: Publisher
    phases: Phases


async def start_roles(
    recipe: Recipe, shape: ModelShape, cluster: Cluster, stack: AsyncExitStack, *, resume: ResumePoint | None
) -> Roles:
    """Ranks and engines start side by side: each takes a while. `stack` takes down what was started."""
    actor, rollout = recipe.roles.actor, recipe.roles.rollout
    places = cluster.reserve(recipe.pools)
    is_shared = rollout is not None and rollout.pool == actor.pool
    share = 0.5 if is_shared else 1.0
    starting_ranks = start_ranks(recipe, _rank_spec(recipe, shape), places[actor.pool], share=share, resume=resume)
    if rollout is None:
        return Roles(ranks=await starting_ranks, fleet=None, publisher=NoPublisher(), phases=SeparatePhases())
    starting_engines = start_engines(recipe, rollout, places[rollout.pool], share=share, is_shared=is_shared)
    async with task_group() as tasks:
        ranks = tasks.create_task(starting_ranks)
        engines = tasks.create_task(starting_engines)
    stack.push_async_callback(engines.result().stop)
    fleet = _open_fleet(rollout, engines.result(), stack)
    publisher = await _connect(recipe, rollout, shape, ranks.result(), fleet)
    phases = SharedPhases([fleet]) if is_shared else SeparatePhases()
    return Roles(ranks=ranks.result(), fleet=fleet, publisher=publisher, phases=phases)


def _rank_spec(recipe: Recipe, shape: ModelShape) -> RankSpec:
    return RankSpec(
        rank=0,
        world=1,
        master_address="",
        master_port=0,
        device=recipe.run.device,
        actor=recipe.roles.actor,
        shape=shape,
        optimizer=recipe.train.optimizer,
        algorithm=recipe.algorithm,
        total_steps=recipe.run.steps,
        seed=recipe.run.seed,
        timeout_s=recipe.train.operation_timeout_s,
    )


def _open_fleet(config: RolloutRoleConfig, engines: Engines, stack: AsyncExitStack) -> Fleet:
    clients = [EngineClient(endpoint, request_timeout_s=config.request_timeout_s) for endpoint in engines.endpoints]
    fleet = Fleet(clients, max_outstanding=config.max_running_requests, publish_timeout_s=config.request_timeout_s)
    stack.push_async_callback(fleet.close)
    return fleet


async def _connect(
    recipe: Recipe, config: RolloutRoleConfig, shape: ModelShape, ranks: Ranks, fleet: Fleet
) -> TransferPublisher:
    actor = recipe.roles.actor
    dtype = "float32" if recipe.run.device == "cpu" else "bfloat16"
    route = Route(
        shape=shape,
        parallel=MegatronParallel(
            tensor=actor.tensor,
            pipeline=actor.pipeline,
            virtual_pipeline=actor.virtual_pipeline,
            data=recipe.data_parallel,
        ),
        trainer_dtype=dtype,
        num_engines=len(fleet.engines),
        tensor=config.tensor,
        engine_dtype=dtype,
        is_cpu_engine=recipe.run.device == "cpu",
    )
    host = ray.util.get_node_ip_address()
    control = EngineControl(fleet, timeout_s=config.publish_timeout_s, host=host)
    publisher = TransferPublisher(
        ranks=ranks, control=control, route=route, timeout_s=config.publish_timeout_s, host=host
    )
    await publisher.connect()
    return publisher
