"""One run, from recipe to result: starts everything in the order it can fail, and takes it down.

Ray comes before roles, roles before the first publish; data and ports were checked before.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, AsyncExitStack
from functools import partial
from pathlib import Path

from megarl.checkpoint.carried import write_open_step
from megarl.checkpoint.mirroring import Mirroring
from megarl.checkpoint.resume import ResumePoint
from megarl.cluster.cluster import Cluster, Pool, accelerators, open_cluster
from megarl.cluster.lost_nodes import RankNodes, wait_for_nodes
from megarl.cluster.tasks import task_group
from megarl.config.recipe import Recipe
from megarl.config.reward import longest_reply
from megarl.config.roles import RolesConfig
from megarl.episodes.play import EpisodeSetup
from megarl.errors import DamagedError, MegarlError, PreemptedError, StoppedError, WorkerError
from megarl.observe.events import ALL_TRAINERS
from megarl.observe.observer import Observer
from megarl.planner.fit import check_fit
from megarl.planner.hardware import other_gpu, reported_gpu
from megarl.ranks.start import running_trainers
from megarl.rollout.groups import KeptGroups
from megarl.rollout.worker import Answering
from megarl.run.build import LoopBuilder, open_workers
from megarl.run.inputs import Inputs
from megarl.run.preemption import Preemption, preemptible
from megarl.run.resume import Restarts, last_good
from megarl.serving.connect import connect, make_room
from megarl.serving.frozen import FrozenRole, start_frozen
from megarl.serving.frozen_phases import alternating, score_after_generation, sleeping_beside_trainers
from megarl.serving.serving import NoServing, Serving, reserve_pools, start_serving
from megarl.serving.stragglers import watched_ranks
from megarl.system.lease import Lease

COLLECT_EVERY = 20_000
"""New objects before garbage is looked for: a step makes several for each of its rollouts, and none is garbage."""


def run_recipe(
    recipe: Recipe,
    inputs: Inputs,
    observer: Observer,
    *,
    ray_address: str | None,
    lease: Lease | None,
    resume: ResumePoint | None,
    choose_earlier: Callable[[Collection[Path]], ResumePoint | None],
    asks_ray_for_gpu: bool,
    tasks_file: Path | None,
) -> None:
    """Take every step of a run that is left. Ctrl-C and SIGTERM end it in order, with nothing left running.

    With a `lease` a private Ray outlives this process if it is killed. `choose_earlier` returns another checkpoint
    where ranks find some damaged. With `asks_ray_for_gpu` a run that does not fit the GPUs that Ray reports is refused
    before a role starts. `tasks_file` gets a trace of Ray's tasks.
    """
    observer.data_read(num_prompts=len(inputs.train.prompts), num_dropped=inputs.train.num_dropped)
    if inputs.train.num_dropped:
        observer.warned(f"{inputs.train.num_dropped} prompts are too long and were dropped (data.overlong_prompts)")
    run = _Run(recipe, inputs, observer, choose_earlier)
    opened = partial(open_cluster, recipe.run, recipe.pools, address=ray_address, lease=lease, tasks_file=tasks_file)
    asyncio.run(run.take_steps(resume, opened, asks_ray_for_gpu=asks_ray_for_gpu))


class _Run:
    """A run with one serving side and one set of trainer ranks after another: lost ranks are replaced by a new set."""

    def __init__(
        self,
        recipe: Recipe,
        inputs: Inputs,
        observer: Observer,
        choose_earlier: Callable[[Collection[Path]], ResumePoint | None],
    ) -> None:
        self._recipe = recipe
        self._inputs = inputs
        self._observer = observer
        self._choose_earlier = choose_earlier
        self._saved_steps: list[int] = []
        self._mirroring = Mirroring(recipe.checkpoint, recipe.run_folder, observer)
        self._kept = KeptGroups()
        self._outlive_driver: Callable[[], None] = lambda: None
        self._damaged: set[Path] = set()
        """Checkpoints that ranks found damaged."""

    async def take_steps(
        self,
        resume: ResumePoint | None,
        opened: Callable[[], AbstractContextManager[Cluster]],
        *,
        asks_ray_for_gpu: bool,
    ) -> None:
        recipe, observer = self._recipe, self._observer
        with opened() as cluster, preemptible(grace_s=recipe.checkpoint.grace_s) as preemption:
            self._outlive_driver = cluster.outlive_driver
            kinds = accelerators()
            warning = check_fit(recipe, reported_gpu(kinds)) if asks_ray_for_gpu else other_gpu(recipe.cluster, kinds)
            if warning is not None:
                observer.warned(warning)
            pools = reserve_pools(cluster, recipe.pools, recipe.roles)
            observer.noted(f"Ray is ready; starting {_roles_of(recipe.roles)}")
            async with self._mirroring, AsyncExitStack() as stack, task_group() as tasks:
                starting_frozen = start_frozen(
                    recipe.roles.frozen,
                    pools,
                    stack,
                    run=recipe.run,
                    network=recipe.network,
                    observer=observer,
                    longest_reply=longest_reply(recipe.reward),
                    temperature=recipe.sampling.temperature,
                )
                frozen = tasks.create_task(starting_frozen)
                serving = tasks.create_task(self._start_serving(frozen, pools, stack))
                workers = tasks.create_task(self._open_workers(serving, frozen, stack))
                async with self._kept.watched(partial(_can_answer, serving)):
                    await self._replace_lost_ranks(resume, pools, serving, frozen, workers, preemption)

    async def _start_serving(
        self, frozen: asyncio.Task[dict[str, FrozenRole]], pools: Mapping[str, Pool], stack: AsyncExitStack
    ) -> Serving:
        if self._recipe.roles.scores_after_generation:
            # These models have the engines' devices until they sleep.
            await asyncio.shield(frozen)
        return await start_serving(self._recipe, self._inputs.shape, pools, stack, observer=self._observer)

    async def _open_workers(
        self,
        serving: asyncio.Task[Serving],
        frozen: asyncio.Task[dict[str, FrozenRole]],
        stack: AsyncExitStack,
    ) -> Answering | None:
        engines = await asyncio.shield(serving)
        if isinstance(engines, NoServing):
            return None
        recipe, environment = self._recipe, self._recipe.environment
        episodes = None
        if environment is not None:
            tokenizer, context = self._inputs.tokenizer, recipe.max_context_tokens
            episodes = EpisodeSetup.of(environment, tokenizer, engines.config, max_context_tokens=context)
        models = await asyncio.shield(frozen)
        open_with = partial(
            open_workers,
            engines,
            self._inputs,
            stack,
            episodes=episodes,
            rollouts_per_prompt=recipe.sampling.rollouts_per_prompt,
            run_folder=recipe.run_folder,
            observer=self._observer,
        )
        if not recipe.roles.scores_after_generation:
            return await open_with(recipe.reward, models)
        workers = await open_with(None, {role: model for role, model in models.items() if not model.is_shared})
        return score_after_generation(
            workers,
            recipe.reward,
            engines,
            models,
            stack,
            run_folder=recipe.run_folder,
            observer=self._observer,
        )

    async def _replace_lost_ranks(
        self,
        first: ResumePoint | None,
        pools: Mapping[str, Pool],
        serving: asyncio.Task[Serving],
        frozen: asyncio.Task[dict[str, FrozenRole]],
        workers: asyncio.Task[Answering | None],
        preemption: Preemption,
    ) -> None:
        """Train with one set of ranks after another, until one of them takes the last step."""
        train, cluster = self._recipe.train, self._recipe.cluster
        # Engines wait for their nodes by themselves.
        of_ranks = {name: pool for name, pool in pools.items() if pool.has_ranks}
        nodes = RankNodes(of_ranks, max_faults=cluster.max_node_faults, observer=self._observer)
        restarts = Restarts(max_restarts=train.max_restarts, pause_s=train.restart_pause_s)
        point = first
        while True:
            try:
                await self._train(point, pools, serving, frozen, workers, preemption)
                return
            except WorkerError as error:
                if serving.done() and serving.exception() is not None:
                    raise  # the engines did not start
                pause_s = restarts.spend(error, saved_step=max(self._saved_steps, default=0))
                point = await self._last_good(first)
                self._restarted(point, error)
                await asyncio.sleep(pause_s)
                await asyncio.to_thread(nodes.note, error, self._recipe.roles.used_pools)
                await wait_for_nodes(of_ranks, timeout_s=cluster.node_timeout_s, waiting=self._observer.warned)
                await asyncio.to_thread(nodes.leave_excluded)
            except DamagedError as error:
                if point is None or point.folder in self._damaged:
                    raise
                self._damaged.add(point.folder)
                if self._saved_steps:
                    point = await self._last_good(first)
                else:
                    point = first = await asyncio.to_thread(self._choose_earlier, self._damaged)
                self._restarted(point, error)

    async def _last_good(self, first: ResumePoint | None) -> ResumePoint | None:
        notes: list[str] = []
        choose = partial(
            last_good,
            self._recipe,
            first=first,
            saved_steps=self._saved_steps,
            warn=notes.append,
            damaged=self._damaged,
        )
        point = await asyncio.to_thread(choose)
        for note in notes:
            self._observer.warned(note)
        return point

    def _restarted(self, point: ResumePoint | None, error: MegarlError) -> None:
        place = "the beginning" if point is None else f"step {point.step}"
        self._observer.restarted(ALL_TRAINERS, 0, f"from {place}: {error}")

    async def _train(
        self,
        point: ResumePoint | None,
        pools: Mapping[str, Pool],
        serving: asyncio.Task[Serving],
        frozen: asyncio.Task[dict[str, FrozenRole]],
        workers: asyncio.Task[Answering | None],
        preemption: Preemption,
    ) -> None:
        """Start trainer ranks and train until the last step, or until a rank is lost."""
        recipe, shape = self._recipe, self._inputs.shape
        async with AsyncExitStack() as stack:
            with self._observer.phase("start"):
                if recipe.roles.beside_engines or recipe.roles.frozen_in_turns:
                    await self._kept.cancel()  # the ranks need the devices that answer
                await make_room(recipe.roles, serving)
                frozen_phases = await sleeping_beside_trainers(recipe.roles, frozen)
                starting = running_trainers(recipe, shape, pools, resume=point)
                trainers = await stack.enter_async_context(starting)
                if not serving.done():
                    self._observer.noted("trainer ranks are ready; waiting for the engines")
                # Shielded: engines go on starting when ranks are lost meanwhile.
                engines = await asyncio.shield(serving)
                if num_kept := await self._kept.finish():
                    self._observer.noted(f"{num_kept} groups of the step are kept")
                roles = await connect(recipe.roles, trainers, engines, stack, observer=self._observer)
                if frozen_phases is not None:
                    roles = alternating(roles, recipe.roles, frozen_phases)
            builder = LoopBuilder(
                recipe=recipe,
                inputs=self._inputs,
                roles=roles,
                workers=await asyncio.shield(workers),
                observer=self._observer,
                preemption=preemption,
                resume=point,
                saved=self._note_saved,
                kept=self._kept,
            )
            loop = builder.loop()
            if point is not None:
                self._outlive_driver()
            self._observer.noted("everything is started; the first step begins")
            preemption.begin_steps()
            # Objects from the start stay for good: looking for garbage among them costs more than a step's own work.
            gc.freeze()
            gc.set_threshold(COLLECT_EVERY)
            async with watched_ranks(trainers.actor, recipe.cluster.stragglers, self._observer):
                with self._kept.used():
                    try:
                        await loop.run()
                    except PreemptedError as error:
                        await self._leave_answers(error, engines)
                        raise

    async def _leave_answers(self, error: PreemptedError, engines: Serving) -> None:
        """Write what was answered for the step that is not taken any more; the next start of the run trains on it."""
        # After Ctrl-C a person may change the code of the reward.
        if isinstance(engines, NoServing) or isinstance(error, StoppedError):
            return
        version = engines.fleet.committed_version
        groups = self._kept.answered(version)
        if not groups:
            return
        write = partial(write_open_step, self._recipe.run_folder.absolute(), groups, version=version)
        try:
            await asyncio.to_thread(write, identity=self._inputs.answers_digest(self._recipe.model_dump_json()))
        except (OSError, WorkerError) as failure:
            self._observer.warned(f"{len(groups)} groups of the next step are not kept: {failure}")
            return
        self._observer.noted(f"{len(groups)} groups of the next step are written for the next start")

    def _note_saved(self, step: int) -> None:
        self._saved_steps.append(step)
        self._mirroring.saved()
        if self._recipe.checkpoint.contents == "everything":
            self._outlive_driver()


def _can_answer(serving: asyncio.Task[Serving]) -> bool:
    """Whether an engine serves what was published last; True as long as engines start."""
    if not serving.done() or serving.cancelled() or serving.exception() is not None:
        return True
    engines = serving.result()
    return isinstance(engines, NoServing) or any(engine.is_live for engine in engines.fleet.engines)


def _roles_of(roles: RolesConfig) -> str:
    names = [f"{len(roles.megatron_roles)} trained or reference model(s)"]
    return " and ".join([*names, "the engines"] if roles.rollout is not None else names)
