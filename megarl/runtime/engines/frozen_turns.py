"""Frozen models that share a pool: they have its devices only while they score.

In the pool of the rollout engines a step's groups are generated first; then these engines sleep, and the models score
all groups (`ScoredInTurns`). In a pool of trainers alone the models are awake while engines elsewhere generate: they
are then the engines of a `SharedPhases`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from megarl.algo.greedy import WithGreedyScore
from megarl.config.reward import RewardConfig
from megarl.config.roles import RolesConfig
from megarl.observe.observer import Observer
from megarl.reward.build import build_scorer
from megarl.reward.pool import WorkerPool
from megarl.rollout.worker import AnsweredPrompt, Answering, RolloutTask
from megarl.runtime.engines.frozen import FrozenRole, SleepingModels, models_of
from megarl.runtime.engines.serving import ExternalServing, ManagedServing, Roles, Serving, offloaders
from megarl.runtime.phases import SharedPhases
from megarl.stages import Scorer
from megarl.types import Prompt, RolloutGroup, ScoredGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class _WaitingGroup:
    group: RolloutGroup
    has_baseline: bool
    scored: asyncio.Future[ScoredGroup]


class ScoredInTurns:
    """An `Answering`: groups wait for their scores until none is being generated; the engines sleep meanwhile."""

    def __init__(self, workers: Answering, scorer: Scorer, *, phases: SharedPhases, models: SleepingModels) -> None:
        """`workers` return groups without scores."""
        self._workers = workers
        self._scorer = scorer
        self._phases = phases
        self._models = models
        self._num_generating = 0
        self._waiting: list[_WaitingGroup] = []
        self._turn: asyncio.Task[None] | None = None
        self._may_generate = asyncio.Event()
        self._may_generate.set()

    async def answer(self, prompt: Prompt, task: RolloutTask) -> AnsweredPrompt:
        # An engine that is about to sleep must be idle.
        await self._may_generate.wait()
        self._num_generating += 1
        try:
            answered = await self._workers.answer(prompt, task)
            scored: asyncio.Future[ScoredGroup] = asyncio.get_running_loop().create_future()
            group = answered.scored.group
            self._waiting.append(_WaitingGroup(group=group, has_baseline=task.baseline is not None, scored=scored))
        finally:
            self._num_generating -= 1
            self._begin_turn_if_due()
        return replace(answered, scored=await scored)

    async def announce(self) -> None:
        await self._workers.announce()

    async def lost(self, groups: Sequence[ScoredGroup]) -> list[int]:
        return await self._workers.lost(groups)

    async def close(self) -> None:
        if self._turn is not None:
            self._turn.cancel()
            await asyncio.wait([self._turn])

    def _begin_turn_if_due(self) -> None:
        if self._waiting and not self._num_generating and self._turn is None:
            self._may_generate.clear()
            self._turn = asyncio.create_task(self._take_turn())

    async def _take_turn(self) -> None:
        waiting, self._waiting = [each for each in self._waiting if not each.scored.done()], []
        outcomes: Sequence[ScoredGroup | BaseException]
        try:
            outcomes = await self._score_all(waiting)
        except Exception as error:  # noqa: BLE001 - it is raised where the groups are awaited
            outcomes = [error] * len(waiting)
        finally:
            self._turn = None
            self._may_generate.set()
        for each, outcome in zip(waiting, outcomes, strict=True):
            if each.scored.done():
                continue  # nobody waits for it any more
            if isinstance(outcome, BaseException):
                each.scored.set_exception(outcome)
            else:
                each.scored.set_result(outcome)

    async def _score_all(self, waiting: Sequence[_WaitingGroup]) -> list[ScoredGroup | BaseException]:
        if not waiting:
            return []  # the run that asked has ended
        async with self._phases.lent():
            await self._models.wake()
            try:
                return await asyncio.gather(*map(self._score, waiting), return_exceptions=True)
            finally:
                await self._models.sleep()

    async def _score(self, waiting: _WaitingGroup) -> ScoredGroup:
        scorer = WithGreedyScore(self._scorer) if waiting.has_baseline else self._scorer
        return await scorer.score(waiting.group)


class FrozenTurns:
    """The frozen models of a run while they start, and their turns in a pool that they share."""

    def __init__(self, roles: RolesConfig, starting: asyncio.Task[dict[str, FrozenRole]]) -> None:
        self._roles = roles
        self._starting = starting
        self._phases: SharedPhases | None = None
        """The turns with trainers, in a pool without rollout engines."""

    async def started(self) -> dict[str, FrozenRole]:
        return await asyncio.shield(self._starting)

    async def before(self, start: Callable[[], Awaitable[Serving]]) -> Serving:
        """Start the rollout engines, after models that have their devices and by then sleep."""
        if self._roles.scores_after_generation:
            await self.started()
        return await start()

    async def make_room(self) -> None:
        """Let the models of a pool of trainers sleep before these start."""
        if self._roles.frozen_in_turns and not self._roles.scores_after_generation:
            self._phases = self._phases or SharedPhases(_sleeping(await self.started()))
            await self._phases.make_room()

    def connected(self, roles: Roles) -> Roles:
        """Return roles that take turns with the models of their pool."""
        if self._phases is None:
            return roles
        shared = set(self._roles.frozen_in_turns.values())
        beside = [role for role, pool in self._roles.used_pools.items() if pool in shared]
        self._phases.take_turns_with(offloaders(beside, roles.trainers))
        return replace(roles, phases=self._phases)

    async def scoring(
        self,
        open_workers: Callable[[RewardConfig | None, Mapping[str, FrozenRole]], Awaitable[Answering]],
        reward: RewardConfig,
        serving: ExternalServing | ManagedServing,
        stack: AsyncExitStack,
        *,
        run_folder: Path,
        observer: Observer,
    ) -> Answering:
        """Return rollout workers that score, or the scores of a whole step after its generation."""
        started = await self.started()
        if not self._roles.scores_after_generation:
            return await open_workers(reward, started)
        assert isinstance(serving, ManagedServing), "rollout engines in a pool are started"
        assert isinstance(serving.phases, SharedPhases), "the pool is shared"
        open_pool = partial(WorkerPool, log_path=run_folder / "reward.log")
        scorer = build_scorer(reward, observer=observer, open_pool=open_pool, frozen=models_of(started))
        stack.callback(scorer.close)
        workers = await open_workers(None, {role: each for role, each in started.items() if not each.is_shared})
        scored = ScoredInTurns(workers, scorer, phases=serving.phases, models=_sleeping(started))
        stack.push_async_callback(scored.close)
        return scored


def _sleeping(started: Mapping[str, FrozenRole]) -> SleepingModels:
    return SleepingModels([role.fleet for role in started.values() if role.is_shared])
