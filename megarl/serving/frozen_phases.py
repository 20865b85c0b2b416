"""Frozen models that are time-shared with other roles of their pool, and sleep while these use the devices.

Beside rollout engines they score the groups of a step after its generation. In a pool of trainers alone they are awake
while the engines generate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from megarl.config.reward import RewardConfig
from megarl.config.roles import RolesConfig
from megarl.engine.fleet import Engine, Fleet
from megarl.engine.lifecycle import EngineState
from megarl.observe.observer import Observer
from megarl.reward.build import build_scorer
from megarl.reward.pool import WorkerPool
from megarl.rollout.greedy import WithGreedyScore
from megarl.rollout.worker import AnsweredPrompt, RolloutSource, RolloutTask
from megarl.serving.connect import Roles, offloaders
from megarl.serving.frozen import FrozenRole, models_of
from megarl.serving.serving import ExternalServing, ManagedServing
from megarl.serving.shared_phases import SharedPhases
from megarl.stages import Scorer
from megarl.types import Prompt, RolloutGroup, ScoredGroup


async def sleeping_beside_trainers(
    roles: RolesConfig, frozen: asyncio.Task[dict[str, FrozenRole]]
) -> SharedPhases | None:
    """Let the models of a pool of trainers sleep before these start; return their phases, or None without such."""
    if not roles.frozen_in_turns or roles.scores_after_generation:
        return None
    # Shielded: the models go on starting when ranks are lost meanwhile.
    phases = SharedPhases(SleepingModels.of(await asyncio.shield(frozen)))
    await phases.make_room()
    return phases


def alternating(roles: Roles, config: RolesConfig, phases: SharedPhases) -> Roles:
    """Return roles that are time-shared with the frozen models of their pool."""
    shared = set(config.frozen_in_turns.values())
    beside = [role for role, pool in config.used_pools.items() if pool in shared]
    phases.alternate_with(offloaders(beside, roles.trainers))
    return replace(roles, phases=phases)


def score_after_generation(
    workers: RolloutSource,
    reward: RewardConfig,
    serving: ExternalServing | ManagedServing,
    started: Mapping[str, FrozenRole],
    stack: AsyncExitStack,
    *,
    run_folder: Path,
    observer: Observer,
) -> ScoredAfterGeneration:
    """Return workers that score in the driver; `workers` return groups without scores."""
    assert isinstance(serving, ManagedServing), "rollout engines in a pool are started"
    assert isinstance(serving.phases, SharedPhases), "the pool is shared"
    open_pool = partial(WorkerPool, log_path=run_folder / "reward.log")
    scorer = build_scorer(reward, observer=observer, open_pool=open_pool, frozen=models_of(started))
    stack.callback(scorer.close)
    scored = ScoredAfterGeneration(workers, scorer, phases=serving.phases, models=SleepingModels.of(started))
    stack.push_async_callback(scored.close)
    return scored


class SleepingModels:
    """The engines of frozen models as a `Sleeper`. Asleep they hold nothing: their weights are in host memory."""

    def __init__(self, fleets: Sequence[Fleet]) -> None:
        self._fleets = fleets

    @classmethod
    def of(cls, started: Mapping[str, FrozenRole]) -> SleepingModels:
        return cls([role.fleet for role in started.values() if role.is_shared])

    @property
    def reachable(self) -> list[Engine]:
        return [engine for fleet in self._fleets for engine in fleet.reachable]

    async def any_reachable(self) -> list[Engine]:
        by_fleet = await asyncio.gather(*(fleet.any_reachable() for fleet in self._fleets))
        return [engine for engines in by_fleet for engine in engines]

    async def sleep(self, *, releases_weights: bool = True) -> None:
        await asyncio.gather(*(fleet.sleep(releases_weights=True) for fleet in self._fleets))

    async def take_weights(self) -> None:
        await asyncio.gather(*(fleet.take_weights() for fleet in self._fleets))

    async def wake(self) -> None:
        await self.take_weights()
        for fleet in self._fleets:
            await fleet.wake()
            for engine in fleet.reachable:
                if engine.state is EngineState.STALE:
                    await fleet.joined(engine)


@dataclass(frozen=True, slots=True, kw_only=True)
class _WaitingGroup:
    group: RolloutGroup
    has_baseline: bool
    scored: asyncio.Future[ScoredGroup]


class ScoredAfterGeneration:
    """An `RolloutSource`: groups wait for their scores until none is being generated; the engines sleep meanwhile."""

    def __init__(self, workers: RolloutSource, scorer: Scorer, *, phases: SharedPhases, models: SleepingModels) -> None:
        """`workers` return groups without scores."""
        self._workers = workers
        self._scorer = scorer
        self._phases = phases
        self._models = models
        self._num_generating = 0
        self._waiting: list[_WaitingGroup] = []
        self._scoring: asyncio.Task[None] | None = None
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
            self._begin_scoring_if_due()
        return replace(answered, scored=await scored)

    async def announce(self) -> None:
        await self._workers.announce()

    async def lost(self, groups: Sequence[ScoredGroup]) -> list[int]:
        return await self._workers.lost(groups)

    async def close(self) -> None:
        if self._scoring is not None:
            self._scoring.cancel()
            await asyncio.wait([self._scoring])

    def _begin_scoring_if_due(self) -> None:
        if self._waiting and not self._num_generating and self._scoring is None:
            self._may_generate.clear()
            self._scoring = asyncio.create_task(self._score_waiting())

    async def _score_waiting(self) -> None:
        waiting, self._waiting = [each for each in self._waiting if not each.scored.done()], []
        outcomes: Sequence[ScoredGroup | BaseException]
        try:
            outcomes = await self._score_all(waiting)
        except Exception as error:  # noqa: BLE001 - it is raised where the groups are awaited
            outcomes = [error] * len(waiting)
        finally:
            self._scoring = None
            self._may_generate.set()
        for each, outcome in zip(waiting, outcomes, strict=True):
            if each.scored.done():
                continue  # its caller was cancelled
            if isinstance(outcome, BaseException):
                each.scored.set_exception(outcome)
            else:
                each.scored.set_result(outcome)

    async def _score_all(self, waiting: Sequence[_WaitingGroup]) -> list[ScoredGroup | BaseException]:
        if not waiting:
            return []  # all callers were cancelled
        async with self._phases.lent():
            await self._models.wake()
            try:
                return await asyncio.gather(*map(self._score, waiting), return_exceptions=True)
            finally:
                await self._models.sleep()

    async def _score(self, waiting: _WaitingGroup) -> ScoredGroup:
        scorer = WithGreedyScore(self._scorer) if waiting.has_baseline else self._scorer
        return await scorer.score(waiting.group)
