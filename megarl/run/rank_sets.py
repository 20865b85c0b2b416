"""Trains with one set of trainer ranks after another: a set that loses a rank is replaced, and training resumes."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Collection, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from megarl.checkpoint.mirror import Mirroring
from megarl.checkpoint.resume import ResumePoint
from megarl.cluster.cluster import Pool
from megarl.cluster.lost_nodes import RankNodes, wait_for_nodes
from megarl.config.recipe import Recipe
from megarl.errors import DamagedError, MegarlError, PreemptedError, WorkerError
from megarl.observe.events import ALL_TRAINERS
from megarl.observe.observer import Observer
from megarl.ranks.start import running_trainers
from megarl.rollout.frozen import FrozenRole
from megarl.rollout.journal import GroupJournal
from megarl.rollout.task import RolloutSource
from megarl.run.build import LoopBuilder
from megarl.run.inputs import Inputs
from megarl.run.preemption import Preemption
from megarl.run.resume import Restarts, last_good
from megarl.serving.connect import connect, make_room
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
    workers: asyncio.Task[RolloutSource | None]
    """None without engines."""
    preemption: Preemption
    outlive_driver: Callable[[], None]
    """Lets Ray outlive this process from now on."""


@dataclass(eq=False)
class RankSets:
    recipe: Recipe
    inputs: Inputs
    observer: Observer
    choose_earlier: Callable[[Collection[Path]], ResumePoint | None]
    """Returns another checkpoint where ranks find some damaged."""
    mirror_claim: str | None = None
    """Returned by `claim_mirror`."""
    _saved_steps: list[int] = field(default_factory=list, init=False)
    _damaged: set[Path] = field(default_factory=set, init=False)
    """Checkpoints that ranks found damaged."""

    def __post_init__(self) -> None:
        recipe = self.recipe
        self.mirroring = Mirroring(recipe.checkpoint, recipe.run_folder, self.observer, claim=self.mirror_claim)
        self._journal = GroupJournal(
            run_folder=recipe.run_folder.absolute(),
            identity=self.inputs.answers_digest(recipe.model_dump_json()),
            warn=self.observer.warned,
        )
        self._retained = self._journal.retained

    async def take_steps(self, first: ResumePoint | None, started: StartedRoles) -> None:
        """Train with one set of ranks after another, until one of them takes the last step."""
        async with self._retained.watched(lambda: _can_answer(started.serving)), self._journal.kept():
            await self._replace_lost(first, started)

    async def _replace_lost(self, first: ResumePoint | None, started: StartedRoles) -> None:
        train, cluster = self.recipe.train, self.recipe.cluster
        pools, serving = started.pools, started.serving
        # Engines wait for their nodes by themselves.
        of_ranks = {name: pool for name, pool in pools.items() if pool.has_ranks}
        nodes = RankNodes(of_ranks, max_faults=cluster.max_node_faults, observer=self.observer)
        restarts = Restarts(max_restarts=train.max_restarts, pause_s=train.restart_pause_s)
        point = first
        while True:
            try:
                await self._train(point, started)
                return
            except WorkerError as error:
                if serving.done() and serving.exception() is not None:
                    raise  # the engines did not start
                pause_s = restarts.spend(error, saved_step=max(self._saved_steps, default=0))
                point = await self._last_good(first)
                self._restarted(point, error)
                await asyncio.sleep(pause_s)
                await asyncio.to_thread(nodes.note, error, self.recipe.roles.used_pools)
                await wait_for_nodes(of_ranks, timeout_s=cluster.node_timeout_s, waiting=self.observer.warned)
                await asyncio.to_thread(nodes.leave_excluded)
            except DamagedError as error:
                if point is None or point.folder in self._damaged:
                    raise
                self._damaged.add(point.folder)
                if self._saved_steps:
                    point = await self._last_good(first)
                else:
                    point = first = await asyncio.to_thread(self.choose_earlier, self._damaged)
                self._restarted(point, error)

    async def _last_good(self, first: ResumePoint | None) -> ResumePoint | None:
        notes: list[str] = []
        point = await asyncio.to_thread(
            last_good,
            self.recipe,
            first=first,
            saved_steps=self._saved_steps,
            warn=notes.append,
            damaged=self._damaged,
        )
        for note in notes:
            self.observer.warned(note)
        return point

    def _restarted(self, point: ResumePoint | None, error: MegarlError) -> None:
        place = "the beginning" if point is None else f"step {point.step}"
        self.observer.restarted(ALL_TRAINERS, 0, f"from {place}: {error}")

    async def _train(self, point: ResumePoint | None, started: StartedRoles) -> None:
        """Start trainer ranks and train until the last step, or until a rank is lost."""
        recipe = self.recipe
        async with AsyncExitStack() as stack:
            with self.observer.phase("start"):
                if recipe.roles.beside_engines or recipe.roles.frozen_in_turns:
                    await self._retained.cancel()  # the ranks need the devices that answer
                await make_room(recipe.roles, started.serving)
                frozen_phases = await sleeping_beside_trainers(recipe.roles, started.frozen)
                trainers = await stack.enter_async_context(
                    running_trainers(recipe, self.inputs.shape, started.pools, resume=point)
                )
                if not started.serving.done():
                    self.observer.noted("trainer ranks are ready; waiting for the engines")
                # Shielded: engines go on starting when ranks are lost meanwhile.
                engines = await asyncio.shield(started.serving)
                if num_retained := await self._retained.finish():
                    self.observer.noted(f"{num_retained} groups of the step are kept")
                roles = await connect(recipe.roles, trainers, engines, stack, observer=self.observer)
                if frozen_phases is not None:
                    roles = alternating(roles, recipe.roles, frozen_phases)
            builder = LoopBuilder(
                recipe=recipe,
                inputs=self.inputs,
                roles=roles,
                workers=await asyncio.shield(started.workers),
                observer=self.observer,
                preemption=started.preemption,
                resume=point,
                saved=lambda step: self._note_saved(step, started),
                journal=self._journal,
            )
            loop = builder.loop()
            if point is not None:
                started.outlive_driver()
            self.observer.noted("everything is started; the first step begins")
            started.preemption.begin_steps()
            # Objects from the start stay for good: looking for garbage among them costs more than a step's own work.
            gc.freeze()
            gc.set_threshold(COLLECT_EVERY)
            async with watched_ranks(trainers.actor, recipe.cluster.stragglers, self.observer):
                with self._retained.used():
                    try:
                        await loop.run()
                    except PreemptedError:
                        await self._leave_groups(engines)
                        raise

    async def _leave_groups(self, engines: Serving) -> None:
        """Write the groups of the step that is not taken any more; the next start of the run trains on them."""
        if isinstance(engines, NoServing):
            return
        version = engines.fleet.committed_version
        num_groups = len(self._retained.finished(version))
        if not num_groups:
            return
        try:
            await self._journal.write(version)
        except (OSError, WorkerError) as failure:
            self.observer.warned(f"{num_groups} groups of the next step are not kept: {failure}")
            return
        self.observer.noted(f"{num_groups} groups of the next step are written for the next start")

    def _note_saved(self, step: int, started: StartedRoles) -> None:
        self._saved_steps.append(step)
        self.mirroring.saved()
        if self.recipe.checkpoint.contents == "everything":
            started.outlive_driver()


def _can_answer(serving: asyncio.Task[Serving]) -> bool:
    """Whether an engine serves what was published last; True as long as engines start."""
    if not serving.done() or serving.cancelled() or serving.exception() is not None:
        return True
    engines = serving.result()
    return isinstance(engines, NoServing) or any(engine.is_live for engine in engines.fleet.engines)
