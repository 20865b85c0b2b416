"""Trains with one set of trainer ranks after another: a set that loses a rank is replaced, and training resumes."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from megarl.cluster.cluster import Pool
from megarl.cluster.lost_nodes import RankNodes, wait_for_nodes
from megarl.cluster.tasks import task_group
from megarl.config.recipe import Recipe
from megarl.errors import ConfigError, DamagedError, MegarlError, PreemptedError, WorkerError
from megarl.observe.events import ALL_TRAINERS
from megarl.observe.observer import Observer
from megarl.ranks.start import PolicyStart, running_trainers
from megarl.rollout.frozen import FrozenRole
from megarl.rollout.task import RolloutSource
from megarl.run.build import LoopBuilder
from megarl.run.loop import Loop
from megarl.run.policy_run import PolicyRun
from megarl.run.preemption import Preemption
from megarl.run.resume import Restarts
from megarl.serving.connect import Roles, connect, make_room
from megarl.serving.frozen import alternating, sleeping_beside_trainers
from megarl.serving.serving import NoServing, Serving
from megarl.serving.stragglers import watched_ranks

COLLECT_EVERY = 20_000
"""New objects before garbage is looked for: a step makes several for each of its rollouts, and none is garbage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedRoles:
    """All that outlives a set of ranks. Tasks are awaited with a shield: they go on when ranks are lost meanwhile."""

    pools: Mapping[str, Pool]
    serving: asyncio.Task[Serving]
    frozen: asyncio.Task[dict[str, FrozenRole]]
    workers: Mapping[str, asyncio.Task[RolloutSource | None]]
    """By policy; None without engines."""
    preemption: Preemption
    outlive_driver: Callable[[], None]
    """Lets Ray outlive this process from now on."""


@dataclass(eq=False)
class RankSets:
    recipe: Recipe
    """Has the keys that all policies share."""
    policies: Sequence[PolicyRun]
    observer: Observer

    async def take_steps(self, started: StartedRoles) -> None:
        """Train with one set of ranks after another, until one of them takes the last step."""
        async with AsyncExitStack() as stack:
            for policy in self.policies:
                await stack.enter_async_context(policy.journal.retained.watched(lambda: _can_answer(started.serving)))
                await stack.enter_async_context(policy.journal.kept())
            await self._replace_lost(started)

    async def _replace_lost(self, started: StartedRoles) -> None:
        train, cluster = self.recipe.train, self.recipe.cluster
        pools, serving = started.pools, started.serving
        # Engines wait for their nodes by themselves.
        of_ranks = {name: pool for name, pool in pools.items() if pool.has_ranks}
        nodes = RankNodes(of_ranks, max_faults=cluster.max_node_faults, observer=self.observer)
        restarts = Restarts(max_restarts=train.max_restarts, pause_s=train.restart_pause_s)
        while True:
            try:
                await self._train(started)
                return
            except WorkerError as error:
                if serving.done() and serving.exception() is not None:
                    raise  # the engines did not start
                saved_steps = [step for policy in self.policies for step in policy.saved_steps]
                pause_s = restarts.spend(error, saved_step=max(saved_steps, default=0))
                for policy in self.policies:
                    await policy.go_back()
                self._restarted(error)
                await asyncio.sleep(pause_s)
                await asyncio.to_thread(nodes.note, error, self.recipe.roles.used_pools)
                await wait_for_nodes(of_ranks, timeout_s=cluster.node_timeout_s, waiting=self.observer.warned)
                await asyncio.to_thread(nodes.leave_excluded)
            except DamagedError as error:
                await self._damaged(error).pass_over(error)
                self._restarted(error)

    def _damaged(self, error: DamagedError) -> PolicyRun:
        """Return the policy whose checkpoint is damaged; raise the error where none is known."""
        resumed = {str(each.point.folder): each for each in self.policies if each.point is not None}
        # Of several the message names a file.
        found = [each for folder, each in resumed.items() if len(resumed) == 1 or folder in str(error)]
        if not found:
            raise error
        return found[0]

    def _restarted(self, error: MegarlError) -> None:
        for policy in self.policies:
            place = "the beginning" if policy.point is None else f"step {policy.point.step}"
            policy.observer.restarted(ALL_TRAINERS, 0, f"from {place}: {error}")

    async def _train(self, started: StartedRoles) -> None:
        """Start trainer ranks and train until the last step, or until a rank is lost."""
        recipe, policies = self.recipe, self.policies
        async with AsyncExitStack() as stack:
            with self.observer.phase("start"):
                if recipe.roles.beside_engines or recipe.roles.frozen_in_turns:
                    for policy in policies:
                        await policy.journal.retained.cancel()  # the ranks need the devices that answer
                await make_room(recipe.roles, started.serving)
                frozen_phases = await sleeping_beside_trainers(recipe.roles, started.frozen)
                first, *others = policies
                beside = None
                if recipe.policies:
                    beside = [PolicyStart(name=each.name, recipe=each.recipe, resume=each.point) for each in others]
                trainers = await stack.enter_async_context(
                    running_trainers(first.recipe, first.inputs.shape, started.pools, resume=first.point, beside=beside)
                )
                if not started.serving.done():
                    self.observer.noted("trainer ranks are ready; waiting for the engines")
                # Shielded: engines go on starting when ranks are lost meanwhile.
                engines = await asyncio.shield(started.serving)
                builders = []
                for policy in policies:
                    of_policy = trainers if policy is first else trainers.of_policy(policy.name)
                    if num_retained := await policy.journal.retained.finish():
                        policy.observer.noted(f"{num_retained} groups of the step are kept")
                    roles = await connect(
                        recipe.roles, of_policy, engines, stack, observer=policy.observer, policy=policy.name
                    )
                    if frozen_phases is not None:
                        roles = alternating(roles, recipe.roles, frozen_phases)
                    builders.append(await self._builder(policy, roles, started))
            loops = [builder.loop() for builder in builders]
            if any(policy.point is not None for policy in policies):
                started.outlive_driver()
            self.observer.noted("everything is started; the first step begins")
            started.preemption.begin_steps()
            # Objects from the start stay for good: looking for garbage among them costs more than a step's own work.
            gc.freeze()
            gc.set_threshold(COLLECT_EVERY)
            async with watched_ranks(trainers.actor, recipe.cluster.stragglers, self.observer):
                await self._run(loops, engines)

    async def _builder(self, policy: PolicyRun, roles: Roles, started: StartedRoles) -> LoopBuilder:
        return LoopBuilder(
            recipe=policy.recipe,
            inputs=policy.inputs,
            roles=roles,
            workers=await asyncio.shield(started.workers[policy.name]),
            observer=policy.observer,
            preemption=started.preemption,
            resume=policy.point,
            saved=lambda step: self._note_saved(policy, step, started),
            journal=policy.journal,
            policy=policy.name,
        )

    async def _run(self, loops: Sequence[Loop], engines: Serving) -> None:
        """Run the loops of all policies. One that fails ends the others; a preemption ends each where it can leave."""
        preempted: list[PreemptedError] = []

        async def run(policy: PolicyRun, loop: Loop) -> None:
            with policy.journal.retained.used():
                try:
                    await loop.run()
                except PreemptedError as error:
                    await _leave_groups(policy, engines)
                    preempted.append(error)
                except MegarlError as error:
                    if policy.name and not isinstance(error, WorkerError | ConfigError):
                        error.args = (f"policy {policy.name}: {error}",)
                    raise

        async with task_group() as tasks:
            for policy, loop in zip(self.policies, loops, strict=True):
                tasks.create_task(run(policy, loop))
        if preempted:
            raise preempted[0]

    def _note_saved(self, policy: PolicyRun, step: int, started: StartedRoles) -> None:
        policy.note_saved(step)
        if self.recipe.checkpoint.contents == "everything":
            started.outlive_driver()


async def _leave_groups(policy: PolicyRun, engines: Serving) -> None:
    """Write the groups of the step that is not taken any more; the next start of the run trains on them."""
    if isinstance(engines, NoServing):
        return
    version = engines.fleet.committed_version(policy.name)
    num_groups = len(policy.journal.retained.finished(version))
    if not num_groups:
        return
    try:
        await policy.journal.write(version)
    except (OSError, WorkerError) as failure:
        policy.observer.warned(f"{num_groups} groups of the next step are not kept: {failure}")
        return
    policy.observer.noted(f"{num_groups} groups of the next step are written for the next start")


def _can_answer(serving: asyncio.Task[Serving]) -> bool:
    """Whether an engine serves what was published last; True as long as engines start."""
    if not serving.done() or serving.cancelled() or serving.exception() is not None:
        return True
    engines = serving.result()
    return isinstance(engines, NoServing) or any(engine.is_live for engine in engines.fleet.engines)
