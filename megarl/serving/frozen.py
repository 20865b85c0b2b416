"""The engines of frozen models: started or joined like those of rollout, supervised, and never published to.

Those that share their pool with other roles sleep while these use the devices. Beside rollout engines they score the
groups of a step after its generation. In a pool of trainers alone they are awake while the engines generate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from hashlib import sha256
from pathlib import Path

from megarl.cluster.cluster import Pool
from megarl.config.model import read_model_shape
from megarl.config.recipe import NetworkConfig, RunConfig
from megarl.config.roles import FrozenRoleConfig, RolesConfig, TeacherEnginesConfig
from megarl.engine.admin import check_running, endpoints_of
from megarl.engine.client import EngineClient, EngineKeys
from megarl.engine.fleet import Engine, Fleet
from megarl.engine.lifecycle import EngineState, EngineStatus
from megarl.engine.process import (
    EngineDeadlines,
    EngineSpec,
    deadlines_of,
    family_options,
    restart_policy,
    serves_text_alone,
)
from megarl.families.shape import ModelShape
from megarl.observe.observer import Observer
from megarl.rollout.frozen import FrozenRole, FrozenSetup
from megarl.rollout.task import AnsweredPrompt, RolloutSource, RolloutTask, WithGreedyScore
from megarl.serving.connect import Roles
from megarl.serving.nodes import following_nodes
from megarl.serving.phases import SharedPhases, SleepingFleet
from megarl.serving.processes import start_engines
from megarl.serving.supervisor import Supervisor
from megarl.stages import Scorer
from megarl.types import Prompt, RolloutGroup, ScoredGroup

_NUM_SAMPLES = 64
_SAMPLE_BYTES = 1 << 16


async def start_frozen(
    roles: Mapping[str, FrozenRoleConfig],
    pools: Mapping[str, Pool],
    stack: AsyncExitStack,
    *,
    run: RunConfig,
    network: NetworkConfig,
    observer: Observer,
    longest_reply: int | None,
    temperature: float = 1.0,
) -> dict[str, FrozenRole]:
    """Start or join the engines of all frozen roles, by their key below `roles`. `stack` takes them down.

    `longest_reply` is the most tokens that a judge writes; None: the engines need no tokenizer. `temperature` is the
    one at which teachers score.
    """
    await check_running(roles, device=run.device)
    starts = [
        _Start(
            role=role,
            config=config,
            pool=None if config.pool is None else pools[config.pool],
            run=run,
            network=network,
            longest_reply=longest_reply if role.startswith("judge.") else None,
            temperature=temperature if role.startswith("teacher.") else 1.0,
        ).start(stack, observer)
        for role, config in roles.items()
    ]
    started = dict(zip(roles, await asyncio.gather(*starts), strict=True))
    # The other roles of their pools start now.
    await SleepingModels.of(started).sleep()
    return started


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """The start of one role."""

    role: str
    config: FrozenRoleConfig
    pool: Pool | None
    """None: its engines run already."""
    run: RunConfig
    network: NetworkConfig
    longest_reply: int | None
    temperature: float

    async def start(self, stack: AsyncExitStack, observer: Observer) -> FrozenRole:
        role, config, pool = self.role, self.config, self.pool
        shape = read_model_shape(config.model)
        deadlines = deadlines_of(config, shape, device=self.run.device, max_response_tokens=self.longest_reply or 1)
        connect = partial(EngineClient, request_timeout_s=deadlines.request_s)
        processes = None
        if pool is None:
            endpoints = endpoints_of(config.endpoints, device=self.run.device)
        else:
            first = self._spec(shape, deadlines, shares_devices=pool.is_shared)
            specs = [replace(first, index=index) for index in range(len(pool.places) // config.tensor)]
            processes, endpoints = await start_engines(specs, pool.places, gpu_fraction=pool.gpu_fraction)
            stack.push_async_callback(processes.stop)
        observer.noted(
            f"roles.{role} is {config.model}, version {await asyncio.to_thread(model_version, config.model)}"
        )
        setup = FrozenSetup(
            role=role,
            folder=config.model.absolute(),
            shape=shape,
            max_attempts=config.max_attempts,
            max_outstanding=config.outstanding_requests,
            request_timeout_s=deadlines.request_s,
            # The longest time without news of an engine that is being restarted.
            patience_s=deadlines.start_s + config.silence_timeout_s,
            endpoints=tuple(endpoints),
        )
        fleet = Fleet(
            [connect(endpoint) for endpoint in endpoints],
            max_outstanding=setup.max_outstanding,
            publish_timeout_s=setup.patience_s,
            policy=None if pool is None else restart_policy(config, deadlines.start_s),
        )
        stack.push_async_callback(fleet.close)
        if pool is not None and processes is not None:
            supervisor = Supervisor(fleet, processes, connect=connect)
            supervisor.attach(partial(_catch_up, fleet))
            await stack.enter_async_context(supervisor.running())
            fleet.listen(partial(_report, role, fleet, observer))
            await stack.enter_async_context(following_nodes(pool, fleet, processes, warn=observer.warned))
        return FrozenRole(setup=setup, fleet=fleet, is_shared=pool is not None and pool.is_shared)

    def _spec(self, shape: ModelShape, deadlines: EngineDeadlines, *, shares_devices: bool) -> EngineSpec:
        """Return the spec of the first engine; the others differ by their index."""
        config, run = self.config, self.run
        return EngineSpec(
            index=0,
            model_folder=config.model.absolute(),
            config=config,
            device=run.device,
            seed=run.seed,
            run_folder=(run.folder / run.name).absolute(),
            keys=EngineKeys.fresh(),
            start_timeout_s=deadlines.start_s,
            bind=self.network.bind,
            role=self.role,
            is_classifier=shape.has_value_head,
            has_float32_head=isinstance(config, TeacherEnginesConfig),  # its numbers become a part of the loss
            has_grammars=self.longest_reply is not None,
            shares_devices=shares_devices,
            temperature=self.temperature,
            has_windows=shape.window is not None,
            options=family_options(shape, run.device),
            is_text_alone=serves_text_alone(shape),
        )


async def _catch_up(fleet: Fleet, engine: Engine) -> bool:
    """Record that an engine which has started again serves its only weights: it has loaded them from their folder."""
    await fleet.joined(engine)
    return True


def model_version(folder: Path) -> str:
    """Return a digest of the model in a folder: of its JSON files, and of samples of its weights, which are large."""
    digest = sha256()
    for path in sorted(path for path in folder.iterdir() if path.suffix in (".json", ".jinja", ".safetensors")):
        size, is_large = path.stat().st_size, path.suffix == ".safetensors"
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for place in range(_NUM_SAMPLES if is_large else 1):
                file.seek(place * size // _NUM_SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES if is_large else -1))
    return digest.hexdigest()[:12]


def _report(role: str, fleet: Fleet, observer: Observer, engine: Engine, _before: EngineStatus) -> None:
    status = engine.status
    if status.state is EngineState.RESTARTING:
        attempt = f"restart {status.num_restarts} of {fleet.policy.max_restarts}"
        observer.restarted(role, engine.index, f"{attempt}: {status.reason}")
    elif status.is_over:
        observer.warned(f"roles.{role}: engine {engine.index} is given up: {status.reason}")


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
    phases.alternate_with(roles.trainers.among(beside))
    return replace(roles, phases=phases)


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
        await asyncio.gather(*(SleepingFleet(fleet).sleep(releases_weights=True) for fleet in self._fleets))

    async def take_weights(self) -> None:
        await asyncio.gather(*(SleepingFleet(fleet).take_weights() for fleet in self._fleets))

    async def wake(self) -> None:
        await self.take_weights()
        for fleet in self._fleets:
            await SleepingFleet(fleet).wake()
            for engine in fleet.reachable:
                if engine.state is EngineState.STALE:
                    await fleet.joined(engine)


@dataclass(frozen=True, slots=True, kw_only=True)
class _WaitingGroup:
    group: RolloutGroup
    has_baseline: bool
    scored: asyncio.Future[ScoredGroup]


@dataclass(eq=False)
class ScoredAfterGeneration:
    """An `RolloutSource`: groups wait for their scores until none is being generated; the engines sleep meanwhile."""

    workers: RolloutSource
    """Return groups without scores."""
    scorer: Scorer
    _: KW_ONLY
    phases: SharedPhases
    models: SleepingModels
    _num_generating: int = field(default=0, init=False)
    _waiting: list[_WaitingGroup] = field(default_factory=list, init=False)
    _scoring: asyncio.Task[None] | None = field(default=None, init=False)
    _may_generate: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def __post_init__(self) -> None:
        self._may_generate.set()

    async def answer(self, prompt: Prompt, task: RolloutTask) -> AnsweredPrompt:
        # An engine that is about to sleep must be idle.
        await self._may_generate.wait()
        self._num_generating += 1
        try:
            answered = await self.workers.answer(prompt, task)
            scored: asyncio.Future[ScoredGroup] = asyncio.get_running_loop().create_future()
            group = answered.scored.group
            self._waiting.append(_WaitingGroup(group=group, has_baseline=task.baseline is not None, scored=scored))
        finally:
            self._num_generating -= 1
            self._begin_scoring_if_due()
        return replace(answered, scored=await scored)

    async def announce(self) -> None:
        await self.workers.announce()

    async def lost(self, groups: Sequence[ScoredGroup]) -> list[int]:
        return await self.workers.lost(groups)

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
        async with self.phases.lent():
            await self.models.wake()
            try:
                return await asyncio.gather(*map(self._score, waiting), return_exceptions=True)
            finally:
                await self.models.sleep()

    async def _score(self, waiting: _WaitingGroup) -> ScoredGroup:
        scorer = WithGreedyScore(self.scorer) if waiting.has_baseline else self.scorer
        return await scorer.score(waiting.group)
