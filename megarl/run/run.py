"""One run, from recipe to result: starts everything in the order it can fail, and takes it down.

Ray comes before roles, roles before the first publish; data and ports were checked before.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack
from dataclasses import replace
from pathlib import Path

from megarl.cluster.cluster import Cluster, Pool, accelerators, nodes_of, open_cluster
from megarl.cluster.gpu_watch import watched_gpus
from megarl.cluster.tasks import task_group
from megarl.config.recipe import Recipe
from megarl.config.reward import longest_reply
from megarl.config.roles import RolesConfig
from megarl.observe.observer import Observer
from megarl.planner.fit import check_fit, planned, planned_limits
from megarl.planner.hardware import GpuModel, gpu_of, other_gpu, reported_gpu
from megarl.planner.limits import with_limits
from megarl.rollout.frozen import FrozenRole
from megarl.run.begin import BegunPolicy
from megarl.run.policy_run import PolicyRun
from megarl.run.preemption import preemptible
from megarl.run.rank_sets import RankSets, StartedRoles
from megarl.run.start_workers import start_workers
from megarl.serving.frozen import start_frozen
from megarl.serving.serving import Serving, reserve_pools, start_serving
from megarl.system.lease import Lease
from megarl.system.start_log import note_piece


def run_recipe(
    recipe: Recipe,
    policies: Sequence[tuple[BegunPolicy, Observer]],
    observer: Observer,
    *,
    ray_address: str | None,
    lease: Lease | None,
    asks_ray_for_gpu: bool,
    tasks_file: Path | None,
) -> None:
    """Take every step of a run that is left. Ctrl-C and SIGTERM end it in order, with nothing left running.

    Each policy has an observer; the other one gets what they share. With a `lease` a private Ray outlives this process
    if it is killed. With `asks_ray_for_gpu` a run that does not fit the GPUs that Ray reports is refused before a role
    starts. `tasks_file` gets a trace of Ray's tasks.
    """
    for policy, own in policies:
        train = policy.inputs.train
        own.data_read(num_prompts=len(train.prompts), num_dropped=train.num_dropped)
        if train.num_dropped:
            own.warned(f"{train.num_dropped} prompts are too long and were dropped (data.overlong_prompts)")
    cluster = open_cluster(recipe.run, recipe.pools, address=ray_address, lease=lease, tasks_file=tasks_file)
    asyncio.run(_take_steps(recipe, policies, observer, cluster, asks_ray_for_gpu=asks_ray_for_gpu))


async def _take_steps(
    recipe: Recipe,
    begun: Sequence[tuple[BegunPolicy, Observer]],
    observer: Observer,
    opening: AbstractContextManager[Cluster],
    *,
    asks_ray_for_gpu: bool,
) -> None:
    grace_s = recipe.checkpoint.time_to_save_s
    with opening as cluster, preemptible(grace_s=grace_s, run_folder=recipe.run_folder) as preemption:
        began = time.time()
        kinds = accelerators()
        warning = check_fit(recipe, reported_gpu(kinds)) if asks_ray_for_gpu else other_gpu(recipe.cluster, kinds)
        if warning is not None:
            observer.warned(warning)
        gpu = gpu_of(recipe.cluster, kinds)
        recipe = _limited(recipe, gpu, observer)
        recipe = planned(recipe, gpu)
        policies, preemption.grace_s = _planned(begun, recipe), recipe.checkpoint.time_to_save_s
        pools = reserve_pools(cluster, recipe.pools, recipe.roles)
        note_piece("places", began=began)
        observer.noted(f"Ray is ready; starting {_roles_of(recipe.roles)}")
        watched = watched_gpus(nodes_of(pools.values()) if recipe.run.device == "cuda" else [], observer)
        async with watched, AsyncExitStack() as stack, task_group() as tasks:
            for policy in policies:
                await stack.enter_async_context(policy.mirroring)
            frozen = tasks.create_task(
                start_frozen(
                    recipe.roles.frozen,
                    pools,
                    stack,
                    run=recipe.run,
                    network=recipe.network,
                    observer=observer,
                    longest_reply=longest_reply(recipe.reward),
                    temperature=recipe.sampling.temperature,
                )
            )
            serving = tasks.create_task(_start_serving(recipe, policies[0], frozen, pools, stack, observer))
            workers = {
                each.name: tasks.create_task(
                    start_workers(each.recipe, each.inputs, serving, frozen, stack, each.observer)
                )
                for each in policies
            }
            started = StartedRoles(
                pools=pools,
                serving=serving,
                frozen=frozen,
                workers=workers,
                preemption=preemption,
                outlive_driver=cluster.outlive_driver,
            )
            await RankSets(recipe, policies, observer).take_steps(started)


def _planned(begun: Sequence[tuple[BegunPolicy, Observer]], recipe: Recipe) -> list[PolicyRun]:
    """Return the policies with what the plan has completed in the recipe of all."""
    recipes = recipe.by_policy()
    planned = []
    for policy, observer in begun:
        # The number of steps may follow from the policy's data.
        own = recipes.get(policy.name, recipe).model_copy(update={"run": policy.recipe.run})
        planned.append(PolicyRun(replace(policy, recipe=own), observer))
    return planned


def _limited(recipe: Recipe, gpu: GpuModel, observer: Observer) -> Recipe:
    """Return the recipe with the limits that its plan on these GPUs has where it sets none, and say them."""
    limits = planned_limits(recipe, gpu)
    if limits is not None:
        observer.noted(
            f"by the plan a save takes {limits.save_s:.0f} s and the longest call to ranks {limits.longest_call_s:.0f} "
            f"s: {limits.grace_s:g} s to save after a signal (checkpoint.grace_s), {limits.operation_timeout_s:g} s "
            "for a call (train.operation_timeout_s)"
        )
    return with_limits(recipe, limits)


async def _start_serving(
    recipe: Recipe,
    policy: PolicyRun,
    frozen: asyncio.Task[dict[str, FrozenRole]],
    pools: Mapping[str, Pool],
    stack: AsyncExitStack,
    observer: Observer,
) -> Serving:
    rollout = recipe.roles.rollout
    if rollout is not None and rollout.draft is not None:
        observer.noted(rollout.draft.note(rollout.running_requests, learns_every=recipe.roles.draft_learns_every))
    if recipe.roles.scores_after_generation:
        # These models have the engines' devices until they sleep.
        await asyncio.shield(frozen)
    return await start_serving(recipe, policy.inputs.shape, pools, stack, observer=observer)


def _roles_of(roles: RolesConfig) -> str:
    names = [f"{len(roles.megatron_roles)} trained or reference model(s)"]
    return " and ".join([*names, "the engines"] if roles.rollout is not None else names)
