"""The engines of frozen models: started or joined like those of rollout, supervised, and never published to.

Rollout workers in other processes read what the driver records of them from a directory (`frozen_access`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path

import ray

from megarl.cluster.cluster import Pool
from megarl.config.model import ModelShape, read_model_shape
from megarl.config.recipe import NetworkConfig, RunConfig
from megarl.config.reward import RewardConfig
from megarl.config.roles import FrozenRoleConfig, RolesConfig, TeacherEnginesConfig
from megarl.engine.client import EngineClient, EngineKeys
from megarl.engine.fleet import Engine, Fleet
from megarl.engine.lifecycle import EngineState, Life
from megarl.engine.process import EngineDeadlines, EngineSpec, deadlines_of, restart_policy
from megarl.observe.observer import Observer
from megarl.reward.build import build_scorer
from megarl.reward.pool import WorkerPool
from megarl.rollout.frozen import FrozenAccess, FrozenEngines, FrozenSetup
from megarl.rollout.generator import WithGreedyScore
from megarl.rollout.worker import AnsweredPrompt, Answering, EngineView, RolloutTask
from megarl.serving.file_publisher import check_running, endpoints_of
from megarl.serving.phases import SharedPhases
from megarl.serving.processes import start_engines
from megarl.serving.serving import ExternalServing, ManagedServing, Roles, Serving, following_nodes, offloaders
from megarl.serving.supervisor import Supervisor
from megarl.stages import Scorer
from megarl.types import Prompt, RolloutGroup, ScoredGroup

_NUM_SAMPLES = 64
_SAMPLE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenRole:
    """The engines of one role in the driver."""

    setup: FrozenSetup
    fleet: Fleet
    is_shared: bool
    """Whether it has the devices of its pool only in turns."""


class SleepingModels:
    """The engines of frozen models as a `Sleeper`. Asleep they hold nothing: their weights are in host memory."""

    def __init__(self, fleets: Sequence[Fleet]) -> None:
        self._fleets = fleets

    @property
    def reachable(self) -> list[Engine]:
        return [engine for fleet in self._fleets for engine in fleet.reachable]

    async def any_reachable(self) -> list[Engine]:
        found = await asyncio.gather(*(fleet.any_reachable() for fleet in self._fleets))
        return [engine for engines in found for engine in engines]

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


class LoadedModels:
    """A `CatchUp`: an engine that has started again has loaded its only weights from their folder."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def catch_up(self, engine: Engine) -> bool:
        await self._fleet.joined(engine)
        return True


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
        _start(
            role,
            config,
            None if config.pool is None else pools[config.pool],
            stack,
            run,
            network,
            observer,
            longest_reply if role.startswith("judge.") else None,
            temperature if role.startswith("teacher.") else 1.0,
        )
        for role, config in roles.items()
    ]
    started = dict(zip(roles, await asyncio.gather(*starts), strict=True))
    # The other roles of their pools start now.
    await SleepingModels([role.fleet for role in started.values() if role.is_shared]).sleep()
    return started


async def _start(
    role: str,
    config: FrozenRoleConfig,
    pool: Pool | None,
    stack: AsyncExitStack,
    run: RunConfig,
    network: NetworkConfig,
    observer: Observer,
    longest_reply: int | None,
    temperature: float,
) -> FrozenRole:
    shape = read_model_shape(config.model)
    deadlines = deadlines_of(config, shape, device=run.device, max_response_tokens=longest_reply or 1)
    connect = partial(EngineClient, request_timeout_s=deadlines.request_s)
    policy, processes = None, None
    if pool is None:
        endpoints = endpoints_of(config.endpoints, device=run.device)
    else:
        first = _first_spec(role, config, shape, deadlines, run, network)
        grammars, shared = longest_reply is not None, pool.is_shared
        first = replace(first, has_grammars=grammars, shares_devices=shared, temperature=temperature)
        specs = [replace(first, index=index) for index in range(len(pool.places) // config.tensor)]
        processes, endpoints = await start_engines(specs, pool.places, share=pool.share)
        stack.push_async_callback(processes.stop)
        policy = restart_policy(config, deadlines.start_s)
    observer.noted(f"roles.{role} is {config.model}, version {await asyncio.to_thread(model_version, config.model)}")
    setup = FrozenSetup(
        role=role,
        folder=config.model.absolute(),
        shape=shape,
        max_attempts=config.max_attempts,
        max_outstanding=config.max_running_requests,
        request_timeout_s=deadlines.request_s,
        # The longest time without news of an engine that is being restarted.
        patience_s=deadlines.start_s + config.silence_timeout_s,
        endpoints=tuple(endpoints),
    )
    fleet = Fleet(
        [connect(endpoint) for endpoint in endpoints],
        max_outstanding=setup.max_outstanding,
        publish_timeout_s=setup.patience_s,
        policy=policy,
    )
    stack.push_async_callback(fleet.close)
    if pool is not None and processes is not None:
        supervisor = Supervisor(fleet, processes, connect=connect, may_start=processes.has_nodes)
        supervisor.attach(LoadedModels(fleet))
        await stack.enter_async_context(supervisor.running())
        fleet.listen(partial(_report, role, fleet, observer))
        await stack.enter_async_context(following_nodes(pool, fleet, processes, warn=observer.warned))
    return FrozenRole(setup=setup, fleet=fleet, is_shared=pool is not None and pool.is_shared)


def _first_spec(
    role: str,
    config: FrozenRoleConfig,
    shape: ModelShape,
    deadlines: EngineDeadlines,
    run: RunConfig,
    network: NetworkConfig,
) -> EngineSpec:
    return EngineSpec(
        index=0,
        model_folder=config.model.absolute(),
        config=config,
        device=run.device,
        seed=run.seed,
        run_folder=(run.folder / run.name).absolute(),
        keys=EngineKeys.fresh(),
        start_timeout_s=deadlines.start_s,
        bind=network.bind,
        role=role,
        is_classifier=shape.has_value_head,
        has_float32_head=isinstance(config, TeacherEnginesConfig),  # its numbers become a part of the loss
    )


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


def _report(role: str, fleet: Fleet, observer: Observer, engine: Engine, _before: Life) -> None:
    life = engine.life
    if life.state is EngineState.RESTARTING:
        attempt = f"restart {life.num_restarts} of {fleet.policy.max_restarts}"
        observer.restarted(role, engine.index, f"{attempt}: {life.reason}")
    elif life.is_over:
        observer.warned(f"roles.{role}: engine {engine.index} is given up: {life.reason}")


def models_of(roles: Mapping[str, FrozenRole]) -> dict[str, FrozenEngines]:
    """Return the models for a rollout worker in the driver's process."""
    return {name: role.setup.model(role.fleet) for name, role in roles.items()}


class FrozenDirectory:
    """The actor from which rollout workers read the engines of frozen models as the driver records them."""

    def __init__(self) -> None:
        self._views: dict[str, list[EngineView]] = {}

    async def put(self, role: str, views: list[EngineView]) -> None:
        self._views[role] = views

    async def views(self) -> dict[str, list[EngineView]]:
        return self._views


def open_access(roles: Mapping[str, FrozenRole], stack: AsyncExitStack) -> FrozenAccess | None:
    """Return what rollout workers need to ask frozen engines; None where there are none."""
    if not roles:
        return None
    directory = ray.remote(num_cpus=0)(FrozenDirectory).remote()
    stack.callback(ray.kill, directory)

    def tell(role: FrozenRole) -> None:
        directory.put.remote(role.setup.role, [EngineView.of(engine, number=1) for engine in role.fleet.engines])

    for role in roles.values():
        role.fleet.listen(lambda _engine, _before, role=role: tell(role))  # type: ignore[misc]
        tell(role)
    return FrozenAccess(directory=directory, setups=tuple(role.setup for role in roles.values()))


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
