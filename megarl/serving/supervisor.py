"""Supervises the engines: notices deaths and silence, restarts engines, and lets stale ones catch up.

Each observation is an event of `engine.lifecycle`; each action follows from the state that is then reached. It knows
neither requests nor weights: the fleet handles the requests of a dead engine, the publisher sends weights.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TypeAlias

from megarl.cluster.tasks import beside, task_group
from megarl.engine import admin
from megarl.engine.client import EngineClient, EngineEndpoint
from megarl.engine.fleet import RELEASED, UNFILLED, Engine, Fleet
from megarl.engine.lifecycle import (
    Action,
    Added,
    Answered,
    Drained,
    Ended,
    EngineState,
    EngineStatus,
    FellBehind,
    Retired,
    Started,
    SyncFailed,
    Ticked,
)
from megarl.errors import EngineError, MegarlError, WeightSyncError, WorkerError
from megarl.observe.events import EngineChanged
from megarl.observe.observer import Observer
from megarl.serving.processes import Engines
from megarl.types import ONE_POLICY

logger = logging.getLogger(__name__)

_TICK_S = 0.25
_PROBE_EVERY_S = 1.0
_PROBES_PER_S = 100.0
"""Engines probed in a second by this process; a larger fleet is probed less often."""
_MOST_SILENT = 1 / 6
"""Longest time between two probes, as a fraction of the silence timeout."""
_UNHEARD_S = 1.0
"""After a tick later than this the whole process was held up, and answers could not be received either."""
_RETRY_S = 1.0
_MOST_DRAINED = 1 / 16
"""Part of the fleet that may be out of service when an engine is drained; one engine may in any case."""


CatchUp: TypeAlias = Callable[[Engine], Awaitable[bool]]
"""Sends the committed version to a stale engine; returns False if that is not possible now."""


class Supervisor:
    """One task per engine, inside `running`. It does not depend on the trainer ranks."""

    def __init__(self, fleet: Fleet, processes: Engines, *, connect: Callable[[EngineEndpoint], EngineClient]) -> None:
        """`connect` makes the client of a restarted engine."""
        self._fleet = fleet
        self._processes = processes
        self._connect = connect
        self._catch_ups: dict[str, CatchUp] = {}
        """By policy."""
        self._tasks: asyncio.TaskGroup | None = None
        self._changes: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)
        fleet.listen(self._note_change)
        fleet.join_listeners.append(self._welcome)

    def attach(self, catch_up: CatchUp | None, *, policy: str = ONE_POLICY) -> None:
        """Set how stale engines catch up with a policy; None while there are no trainer ranks."""
        if catch_up is None:
            self._catch_ups.pop(policy, None)
        else:
            self._catch_ups[policy] = catch_up

    def retire(self, index: int, reason: str = "retired by the operator") -> None:
        """Take an engine out: it gets no further request, and ends when it has returned the tokens of those it has."""
        engine = self._engine(index)
        if all(other.status.is_over for other in self._fleet.engines if other is not engine):
            raise EngineError(f"engine {index} is the last one; stop the run instead")
        self._fleet.report(engine, Retired(reason=reason))

    def add(self, index: int) -> None:
        """Start an engine that was retired or given up; it then catches up."""
        self._fleet.report(self._engine(index), Added())

    def drain(self, engine: Engine, reason: str) -> bool:
        """Restart a live engine when its requests have left it; return False if it cannot be spared now."""
        live = [other for other in self._fleet.engines if other.is_live]
        num_out = sum(not other.status.is_over and not other.is_live for other in self._fleet.engines)
        has_restarts = engine.status.num_restarts < self._fleet.policy.max_restarts
        is_spare = len(live) > 1 and num_out < max(1, int(len(self._fleet.engines) * _MOST_DRAINED))
        if not (engine.is_live and has_restarts and is_spare):
            return False
        self._fleet.report(engine, Drained(reason=reason))
        return True

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with beside(self._run):
            yield

    async def _run(self) -> None:
        try:
            async with task_group() as self._tasks:
                self._tasks.create_task(self._tick())
                self._welcome(self._fleet.engines)
        except Exception as error:
            logger.exception("supervisor failed")
            self._fleet.fail(error)

    def _welcome(self, engines: Sequence[Engine]) -> None:
        if self._tasks is not None:
            for engine in engines:
                self._tasks.create_task(self._supervise(engine))

    @property
    def _probe_every_s(self) -> float:
        return probe_interval_s(len(self._fleet.engines), self._fleet.policy.silence_timeout_s)

    async def _tick(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            seconds, last = now - last, now
            unheard_s = seconds if seconds > _UNHEARD_S else 0.0
            for engine in self._fleet.engines:
                is_dead = engine.state is EngineState.DEAD
                may_start = is_dead and self._fleet.is_awake and self._processes.has_nodes(engine.index)
                self._fleet.report(engine, Ticked(unheard_s=unheard_s, may_start=may_start))

    async def _supervise(self, engine: Engine) -> None:
        """Supervise one engine for good. A failure of this code costs one engine, which is ended and started again."""
        while True:
            try:
                await self._act(engine)
            except Exception as error:
                logger.exception("supervision failed engine=%d", engine.index)
                self._fleet.report(engine, Ended(reason=f"its supervision failed: {type(error).__name__}: {error}"))
                await self._processes.end(engine.index)

    async def _act(self, engine: Engine) -> None:
        """Do what the state of the engine needs, one action after the other."""
        while True:
            match engine.status.action:
                case Action.WATCH | Action.SYNC:
                    await self._watch(engine)
                case Action.START:
                    await self._start(engine)
                case Action.END:
                    await self._end(engine)
                    await self._until(engine, {Action.START, Action.WATCH, Action.SYNC})

    async def _start(self, engine: Engine) -> None:
        try:
            endpoint = await self._processes.start(engine.index)
        except MegarlError as error:
            self._fleet.report(engine, Ended(reason=f"did not start: {error}"))
            return
        before = self._fleet.replace_client(engine, self._connect(endpoint))
        self._fleet.report(engine, Started())
        await before.close()

    async def _watch(self, engine: Engine) -> None:
        """Watch the engine until it must be ended or started; it is ended when this returns."""
        async with task_group() as tasks:
            watching = [
                tasks.create_task(self._report_end(engine)),
                tasks.create_task(self._probe_server(engine)),
                tasks.create_task(self._probe_scheduler(engine)),
            ]
            # Not cancelled: trainer ranks take part in it. It fails by itself once the engine is gone.
            tasks.create_task(self._sync(engine))
            await self._until(engine, {Action.START, Action.END})
            for task in watching:
                task.cancel()
            await self._end(engine)

    async def _end(self, engine: Engine) -> None:
        while engine.status.hands_over and engine.num_requests:
            # Its requests end with the tokens they have, and are continued elsewhere.
            with suppress(EngineError):
                await admin.abort_all(engine.client)
            await asyncio.sleep(_TICK_S)
        await self._processes.end(engine.index)
        if engine.state is EngineState.DRAINING:
            self._fleet.report(engine, Ended(reason=engine.reason))

    async def _report_end(self, engine: Engine) -> None:
        self._fleet.report(engine, Ended(reason=await self._processes.wait_end(engine.index)))

    async def _probe_server(self, engine: Engine) -> None:
        """Probe the server's own process, which alone can answer while weights are being received."""
        while True:
            if engine.is_syncing and not engine.is_watched:
                is_there = await engine.client.is_healthy(timeout_s=self._fleet.policy.silence_timeout_s)
                if is_there and engine.is_syncing:
                    self._fleet.report(engine, Answered())
            await asyncio.sleep(self._probe_every_s)

    async def _probe_scheduler(self, engine: Engine) -> None:
        while True:
            while engine.is_watched:
                await asyncio.sleep(self._probe_every_s)
            expected, was_syncing = engine.weights_version, engine.is_syncing
            with suppress(EngineError):  # the tick notices silence
                served = await engine.client.probe(timeout_s=self._fleet.policy.silence_timeout_s)
                self._fleet.report(engine, Answered())
                is_certain = not was_syncing and not engine.is_syncing and engine.weights_version == expected
                if is_certain and engine.is_live and served != str(expected):
                    reason = f"serves version {served}, not {expected}"
                    self._fleet.report(engine, FellBehind(reason=reason))
            await asyncio.sleep(self._probe_every_s)
            # A checked rollout says as much as a probe.
            while engine.is_live and (quiet_s := self._fleet.quiet_s(engine)) < self._probe_every_s:
                await asyncio.sleep(self._probe_every_s - quiet_s)

    async def _sync(self, engine: Engine) -> None:
        while engine.status.action in (Action.WATCH, Action.SYNC):
            if engine.status.action is Action.SYNC:
                try:
                    if await self._catches_up(engine):
                        continue
                except WeightSyncError as error:
                    self._fleet.report(engine, SyncFailed(reason=str(error)))
                except WorkerError as error:
                    # The run notices the loss of its ranks as well and handles it.
                    logger.info("engine=%d cannot catch up: %s", engine.index, error)
            with suppress(TimeoutError):
                async with asyncio.timeout(_RETRY_S):
                    await self._until(engine, {Action.START, Action.END})

    async def _catches_up(self, engine: Engine) -> bool:
        """Send the engine one of the policies that it lacks; return False if that is not possible now."""
        for policy in sorted(engine.lacks & self._catch_ups.keys()):
            if await self._catch_ups[policy](engine):
                return True
        return False

    async def _until(self, engine: Engine, actions: set[Action]) -> None:
        changed = self._changes[engine.index]
        while engine.status.action not in actions:
            changed.clear()
            await changed.wait()

    def _note_change(self, engine: Engine, _before: EngineStatus) -> None:
        self._changes[engine.index].set()

    def _engine(self, index: int) -> Engine:
        for engine in self._fleet.engines:
            if engine.index == index:
                return engine
        raise EngineError(f"there is no engine {index}; there are {len(self._fleet.engines)}, counted from 0")


def probe_interval_s(num_engines: int, silence_timeout_s: float) -> float:
    """Return the time between two probes of an engine: longer in a large fleet, but long before it counts as silent."""
    return max(_PROBE_EVERY_S, min(num_engines / _PROBES_PER_S, silence_timeout_s * _MOST_SILENT))


def _num_requests(engine: Engine) -> int:
    return engine.num_requests


def observe_fleet(fleet: Fleet, observer: Observer) -> None:
    """Report the state of every engine to `observer`, now and at every change."""

    def report(engine: Engine, reason: str) -> None:
        endpoint = engine.client.endpoint
        changed = EngineChanged(
            index=engine.index,
            state=engine.state,
            is_serving=engine.is_live,
            is_running=engine.status.is_reachable,
            version=engine.version,
            address=f"{endpoint.host}:{endpoint.port}",
            reason=reason,
        )
        observer.emit(changed)

    def report_change(engine: Engine, before: EngineStatus) -> None:
        is_release = RELEASED in (before.reason, engine.reason)
        if is_release and {before.state, engine.state} == {EngineState.HEALTHY, EngineState.STALE}:
            return  # part of every step
        if engine.state is EngineState.RESTARTING:
            observer.restarted(
                "rollout", engine.index, f"restart {engine.status.num_restarts} of {fleet.policy.max_restarts}"
            )
            report(engine, "")
        else:
            report(engine, _describe_change(engine, before, fleet))

    def watch(engines: Sequence[Engine]) -> None:
        for engine in engines:
            observer.watch_requests(engine.index, partial(_num_requests, engine))
            report(engine, engine.reason if engine.state is EngineState.RESTARTING else "")

    watch(fleet.engines)
    fleet.join_listeners.append(watch)
    fleet.listen(report_change)
    fleet.requests = observer


def _describe_change(engine: Engine, before: EngineStatus, fleet: Fleet) -> str:
    """Return the reason of a state and what happens next."""
    status = engine.status
    match status.state:
        case EngineState.HEALTHY if before.state is EngineState.SUSPECT:
            return "it answers again"
        case EngineState.HEALTHY if before.reason == UNFILLED:
            return ""
        case EngineState.HEALTHY:
            return f"it has joined at version {engine.version}"
        case EngineState.DEAD if status.restart_at is not None:
            return f"{status.reason}; it is restarted in {status.restart_at - status.since:.0f} s"
        case EngineState.DEAD:
            return f"{status.reason}; it is given up after {fleet.policy.max_restarts} restarts"
        case EngineState.STALE:
            return f"{status.reason}; it waits for a publish"
        case _:
            return status.reason
