"""Connects a set of trainer ranks with the engines: how they publish, and when each side uses the devices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import assert_never

from megarl.cluster.cluster import open_cluster
from megarl.cluster.tasks import task_group
from megarl.config.recipe import Recipe
from megarl.config.roles import RolesConfig
from megarl.engine.control import EngineControl
from megarl.families.shape import ModelShape
from megarl.observe.observer import Observer
from megarl.ranks.calls import ActorCalls
from megarl.ranks.start import Trainers, start_trainers
from megarl.ranks.trainer import ModelsTrainer
from megarl.rollout.task import RolloutSource
from megarl.serving.adapter_publisher import AdapterPublisher
from megarl.serving.canary import Canary, CanaryProbe
from megarl.serving.draft_publisher import DraftPublisher
from megarl.serving.file_publisher import FilePublisher
from megarl.serving.phases import SharedPhases
from megarl.serving.publisher import EnginePublisher, NoPublisher, TransferPublisher
from megarl.serving.serving import (
    ExternalServing,
    ManagedServing,
    NoServing,
    Serving,
    reserve_pools,
    start_serving,
)
from megarl.stages import Phases, Publisher, SeparatePhases
from megarl.types import ONE_POLICY, PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """One set of trainer ranks, connected with the serving side."""

    trainers: Trainers
    serving: Serving
    publisher: EnginePublisher | NoPublisher
    phases: Phases


async def make_room(roles: RolesConfig, serving: asyncio.Task[Serving]) -> None:
    """Return when trainers may start: at once, or in a shared pool when the engines have started and sleep."""
    if roles.beside_engines and roles.rollout is not None and roles.rollout.gives_up_memory:
        # Shielded: engines go on starting when ranks are lost meanwhile.
        engines = await asyncio.shield(serving)
        if isinstance(engines, ManagedServing) and isinstance(engines.phases, SharedPhases):
            await engines.phases.make_room()


async def connect(
    roles: RolesConfig,
    trainers: Trainers,
    serving: Serving,
    stack: AsyncExitStack,
    *,
    observer: Observer,
    policy: str = ONE_POLICY,
) -> Roles:
    """Check that these ranks can publish a policy to the engines. `stack` ends the connection."""
    publisher: EnginePublisher | NoPublisher
    phases: Phases = SeparatePhases()
    match serving:
        case NoServing():
            publisher = NoPublisher()
        case ExternalServing(config=config, fleet=fleet):
            files = FilePublisher(
                ranks=trainers.actor,
                fleet=fleet,
                folder=serving.publish_folder,
                source_folder=serving.model_folder,
                timeout_s=config.publish_timeout_s,
            )
            await files.connect()
            publisher = EnginePublisher(transport=files, fleet=fleet, phases=SeparatePhases())
        case ManagedServing(phases=phases):
            publisher = await _connect_managed(roles, trainers, serving, stack, observer, policy)
            stack.callback(serving.supervisor.attach, None, policy=policy)
        case _:
            assert_never(serving)
    return Roles(trainers=trainers, serving=serving, publisher=publisher, phases=phases)


async def _connect_managed(
    roles: RolesConfig,
    trainers: Trainers,
    serving: ManagedServing,
    stack: AsyncExitStack,
    observer: Observer,
    policy: str,
) -> EnginePublisher:
    phases = serving.phases
    ranks = trainers.actor
    transport = _transport(trainers, serving, observer, policy)
    if isinstance(transport, AdapterPublisher):
        stack.push_async_callback(transport.close)
    drafts = _draft_publisher(trainers, serving, observer)
    publisher = EnginePublisher(
        transport=transport,
        fleet=serving.fleet,
        phases=phases,
        publish_draft=None if drafts is None else drafts.publish_new,
    )
    catch_up = transport.catch_up if drafts is None else drafts.before(transport.catch_up)
    if isinstance(phases, SharedPhases):

        async def refill() -> None:
            await publisher.publish(PolicyVersion((await ranks.call(ActorCalls.version))[0]))

        can_send_away = roles.actor.offload != "everything" or "actor" not in roles.beside_engines
        phases.alternate_with(trainers.among(roles.beside_engines), refill=refill, can_send_away=can_send_away)
        await phases.take_weights()
        catch_up = partial(phases.send_to_one, catch_up)
    if serving.adapters is None:
        await transport.connect()
    if drafts is not None:
        await drafts.connect()
    serving.supervisor.attach(catch_up, policy=policy)
    return publisher


def _transport(trainers: Trainers, serving: ManagedServing, observer: Observer, policy: str) -> TransferPublisher:
    config = serving.config
    timeout_s = config.publish_timeout_s
    control = EngineControl(
        serving.fleet,
        timeout_s=timeout_s,
        host=serving.host,
        flushes_cache=config.in_flight != "in_place",
        holds_requests=serving.adapters is not None,
    )
    publisher: Callable[..., TransferPublisher] = TransferPublisher
    if serving.adapters is not None:
        publisher = partial(AdapterPublisher, adapters=serving.adapters)
    return publisher(
        ranks=trainers.actor,
        fleet=serving.fleet,
        control=control,
        transfer=serving.transfer,
        timeout_s=timeout_s,
        host=serving.host,
        policy=policy,
        failed=observer.publish_failed,
    )


def _draft_publisher(trainers: Trainers, serving: ManagedServing, observer: Observer) -> DraftPublisher | None:
    if trainers.drafter is None or serving.draft_transfer is None:
        return None
    timeout_s = serving.config.publish_timeout_s
    return DraftPublisher(
        ranks=trainers.drafter,
        fleet=serving.fleet,
        control=EngineControl(serving.fleet, timeout_s=timeout_s, host=serving.host, is_for_drafts=True),
        transfer=serving.draft_transfer,
        timeout_s=timeout_s,
        host=serving.host,
        failed=lambda _, reason: observer.warned(f"engines go on with the draft they have: {reason}"),
    )


def publisher_of(
    roles: Roles,
    recipe: Recipe,
    workers: RolloutSource | None,
    shape: ModelShape,
    eos_ids: tuple[int, ...],
    models: ModelsTrainer,
    observer: Observer,
) -> Publisher:
    """Return the publisher of a loop, with the steps around it that this run takes."""
    publisher, serving = roles.publisher, roles.serving
    if isinstance(publisher, NoPublisher) or isinstance(serving, NoServing) or workers is None:
        return publisher
    canary, config = None, serving.config
    if config.canary_every is not None:
        dtype = recipe.run.dtype if config.fp8_keep is None else "fp8"
        probe = CanaryProbe.of(recipe, shape, eos_ids=eos_ids, dtype=dtype)
        canary = Canary(
            serving.fleet,
            probe=probe,
            logprobs=models.logprobs,
            phases=roles.phases,
            warn=observer.warned,
            # Only the canary shows that an external engine computes with the files that were written.
            every=1 if isinstance(serving, ExternalServing) else config.canary_every,
        )
    takes_turns = isinstance(roles.phases, SharedPhases)
    if canary is not None and isinstance(publisher.transport, AdapterPublisher) and not takes_turns:
        # Probed before the first request uses the version. Where trainers take turns with engines none does before
        # the check anyway, and engines compute nothing inside a publish.
        publisher.transport.compare_with(canary.differences, every=canary.every)
        canary = None
    return replace(publisher, in_flight=recipe.in_flight, announce=workers.announce, canary=canary)


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
