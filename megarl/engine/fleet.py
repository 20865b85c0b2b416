"""All engines of a run: their states and versions, probes of silent ones, the choice of one for the next request.

Knows no tokens, no weights and no processes: the generator leases engines, the publisher reports what each one serves,
the supervisor reports what happened to each. It outlives the trainer ranks and their publisher.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from megarl.engine.client import EngineClient
from megarl.engine.dispatch import Dispatcher, RequestListener, Throughput, Uncounted
from megarl.engine.lifecycle import (
    Answered,
    Confirmed,
    Doubted,
    Ended,
    EngineState,
    EngineStatus,
    Event,
    FellBehind,
    RestartPolicy,
    advance,
)
from megarl.errors import EngineLostError, FleetError
from megarl.types import ONE_POLICY, PolicyVersion

logger = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 10.0
_NOTED_EVERY_S = 0.25
_MAX_REASONS = 8
"""Engines that an error names."""
UNFILLED = "has no weights before the first publish"
RELEASED = "gave up its weights while trainers use its devices"


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The weights of one policy that an engine serves."""

    version: PolicyVersion
    adapter: str | None = None
    """Name of the adapter that new requests compute with; None: the weights are published."""


_UNSERVED = Served(version=PolicyVersion(0))


@dataclass(slots=True, kw_only=True, eq=False)
class Engine:
    """The fleet's record of one engine. Only the fleet changes it."""

    index: int
    """Stays the same when the engine is restarted."""
    client: EngineClient
    status: EngineStatus
    served: Mapping[str, Served] = field(default_factory=dict)
    """By policy; replaced as a whole."""
    lacks: set[str] = field(default_factory=set)
    """Policies that it must get before it is live."""
    num_outstanding: int = 0
    num_elsewhere: int = 0
    """Requests of rollout workers in other processes."""
    throughput: Throughput = field(default_factory=Throughput)
    """Throughput since it was last read."""
    num_pauses: int = 0
    """Pauses and resumes; a changed number means that a publish may have happened."""
    is_watched: bool = False
    """Whether a rollout worker of its node probes it."""
    is_syncing: bool = False
    """Whether its scheduler waits for weights and answers nothing else."""
    leases: dict[asyncio.Timeout, None] = field(default_factory=dict)
    """In the order of their beginning: requests of an engine that dies go elsewhere in the same order in every run."""
    adapters: Counter[str | None] = field(default_factory=Counter)
    """Requests that hold each loaded adapter."""
    adapters_elsewhere: dict[int, frozenset[str]] = field(default_factory=dict)
    """Adapters that requests of rollout workers in other processes hold, by worker."""

    def serves(self, policy: str = ONE_POLICY) -> Served:
        return self.served.get(policy, _UNSERVED)

    @property
    def version(self) -> PolicyVersion:
        """The newest version that it serves of any policy."""
        return max((each.version for each in self.served.values()), default=PolicyVersion(0))

    @property
    def weights_version(self) -> PolicyVersion:
        """The version that the engine itself reports: under adapters the base stays what it was at the start."""
        return PolicyVersion(0) if any(each.adapter for each in self.served.values()) else self.version

    @property
    def held_adapters(self) -> set[str]:
        here = {name for name, count in self.adapters.items() if name is not None and count}
        return here.union(*self.adapters_elsewhere.values())

    @property
    def state(self) -> EngineState:
        return self.status.state

    @property
    def reason(self) -> str:
        """The reason that it is not live; empty if it is."""
        return self.status.reason

    @property
    def is_live(self) -> bool:
        return self.state is EngineState.HEALTHY

    @property
    def num_requests(self) -> int:
        return self.num_outstanding + self.num_elsewhere

    def __str__(self) -> str:
        return str(self.client.endpoint)


StateListener = Callable[[Engine, EngineStatus], None]
"""Called with an engine whose state changed, and its status before that."""
JoinListener = Callable[[Sequence[Engine]], None]
"""Called with engines of one node that were added."""


class Fleet:
    """The engines by index. All start at version 0; those that have no weights yet are reported as stale."""

    def __init__(
        self,
        clients: Sequence[EngineClient],
        *,
        max_outstanding: int,
        publish_timeout_s: float,
        policy: RestartPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        lent: Set[int] = frozenset(),
        policies: Sequence[str] = (),
    ) -> None:
        """At most `max_outstanding` requests per engine are sent; others wait here. For `lent` see `Dispatcher`.

        `publish_timeout_s` is the deadline for any change while no engine is live. Without a `policy` the engines are
        not supervised: one that is lost stays lost. A live engine serves the committed versions of all `policies`.
        """
        assert clients, "a fleet needs an engine"
        self._policies = tuple(policies) or (ONE_POLICY,)
        self._committed: dict[str, PolicyVersion] = {}
        self.publish_lock = asyncio.Lock()
        """Held during a publish: versions are sent one after the other."""
        self.is_awake = True
        """False while trainers use the engines' devices."""
        self.policy = policy or RestartPolicy(max_restarts=0)
        self.engines = tuple(
            Engine(index=each.endpoint.index, client=each, status=EngineStatus.begin(clock())) for each in clients
        )
        self.requests: RequestListener = Uncounted()
        self.num_changes = 0
        """Changes of states, versions, addresses and pauses."""
        self._is_supervised = policy is not None
        self._clock = clock
        self.publish_timeout_s = publish_timeout_s
        self._listeners: list[StateListener] = []
        self.join_listeners: list[JoinListener] = []
        self._dispatcher = Dispatcher(self.engines, max_outstanding=max_outstanding, lent=lent)
        self._deadline: asyncio.TimerHandle | None = None
        """Runs while requests wait and no engine is live."""
        self._changed = asyncio.Condition()
        self._notifying: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None

    def listen(self, listener: StateListener) -> None:
        self._listeners.append(listener)

    def add(self, clients: Sequence[EngineClient], reason: str) -> None:
        """Add engines of one node that are still to be started; their indices follow those of the others."""
        status = EngineStatus.starting(self._clock(), reason)
        added = [
            Engine(index=client.endpoint.index, client=client, status=status, lacks=set(self._policies))
            for client in clients
        ]
        self.engines = (*self.engines, *added)
        self.num_changes += 1
        for engine in added:
            self._dispatcher.add(engine)
        for listener in self.join_listeners:
            listener(added)

    @asynccontextmanager
    async def lease(
        self, avoid: Set[int] = frozenset(), *, prefixes: Sequence[str] = (), policy: str = ONE_POLICY
    ) -> AsyncIterator[Engine]:
        """Lease the live engine with the fewest outstanding requests; one in `avoid` only if there is no other.

        Requests that have a prefix in common share an engine, within a bound. EngineLostError ends the block.
        """
        engine = await self._acquire(avoid, prefixes)
        scope = asyncio.timeout(None)
        engine.leases[scope] = None
        # Held in variables: a restarted engine has others.
        adapter, adapters = engine.serves(policy).adapter, engine.adapters
        adapters[adapter] += 1
        try:
            async with scope:
                yield engine
        except TimeoutError:
            if not scope.expired():
                raise
            raise EngineLostError(f"{engine}: lost: {engine.reason}") from None
        finally:
            del engine.leases[scope]
            adapters[adapter] -= 1
            self._dispatcher.release(engine)

    async def _acquire(self, avoid: Set[int], prefixes: Sequence[str]) -> Engine:
        while True:
            engine = self._dispatcher.take(avoid, prefixes)
            if engine is None:
                self.check()
                waiting = self._dispatcher.wait(avoid, prefixes)
                if self._deadline is None:
                    asyncio.get_running_loop().call_soon(self._restart_deadline)
                engine = await waiting
            if engine.is_live:
                return engine
            self._dispatcher.release(engine)

    def _restart_deadline(self) -> None:
        """Begin to wait for any change, if requests wait and no engine is live."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        # Requests to a live engine have deadlines of their own; without one a publish or a restart must come.
        if self._dispatcher.has_waiting and not self._dispatcher.has_live:
            self._deadline = asyncio.get_running_loop().call_later(self.publish_timeout_s, self._refuse_late)

    def _refuse_late(self) -> None:
        self._deadline = None
        self._dispatcher.refuse(self._none_came)

    def _none_came(self) -> FleetError:
        return FleetError(
            f"no engine has served {self._versions()} for {self.publish_timeout_s:.0f} s: {self._reasons()}"
        )

    async def until(self, is_reached: Callable[[], bool]) -> None:
        """Wait for changes until `is_reached`; raise FleetError if there is none in time or no engine can come."""
        async with self._changed:
            while not is_reached():
                self.check()
                try:
                    async with asyncio.timeout(self.publish_timeout_s):
                        await self._changed.wait()
                except TimeoutError:
                    raise self._none_came() from None

    def check(self) -> None:
        """Raise if no engine will ever be live again."""
        if self._is_hopeless:
            raise self._end_reason()

    @property
    def _is_hopeless(self) -> bool:
        if self._failure is not None:
            return True
        return not self._dispatcher.has_live and all(engine.status.is_over for engine in self.engines)

    def _end_reason(self) -> BaseException:
        if self._failure is not None:
            return self._failure
        spent = f" and {self.policy.max_restarts} restarts each are spent" if self.policy.max_restarts else ""
        return FleetError(f"no engine is left{spent}: {self._reasons()}")

    @property
    def reachable(self) -> list[Engine]:
        """The engines that weights can be sent to, whatever they serve now."""
        return [engine for engine in self.engines if engine.status.is_reachable]

    async def any_reachable(self) -> list[Engine]:
        """Return `reachable` as soon as it has an engine; raises FleetError if none will come."""
        await self.until(lambda: bool(self.reachable))
        return self.reachable

    @contextmanager
    def syncing(self, engines: Iterable[Engine]) -> Iterator[None]:
        """Mark `engines` as receiving weights."""
        busy = list(engines)
        for engine in busy:
            engine.is_syncing = True
        try:
            yield
        finally:
            for engine in busy:
                engine.is_syncing = False

    def committed_version(self, policy: str = ONE_POLICY) -> PolicyVersion:
        return self._committed.get(policy, PolicyVersion(0))

    async def committed(
        self,
        version: PolicyVersion,
        engines: Iterable[Engine],
        *,
        adapter: str | None = None,
        policy: str = ONE_POLICY,
    ) -> None:
        """Record that `version` is committed and that `engines` serve it, as `adapter`; all others are stale."""
        current = set(engines)
        assert current, f"version {version} is committed, but no engine serves it"
        self._committed[policy] = version
        for engine in self.engines:
            if engine in current:
                await self.joined(engine, adapter=adapter, policy=policy)
            else:
                self.report(engine, FellBehind(reason=f"serves version {engine.serves(policy).version}"))

    async def joined(self, engine: Engine, *, adapter: str | None = None, policy: str = ONE_POLICY) -> None:
        """Record that `engine` serves the committed version of a policy, as `adapter`."""
        served = Served(version=self.committed_version(policy), adapter=adapter)
        engine.served = {**engine.served, policy: served}
        engine.lacks.discard(policy)
        self.num_changes += 1
        if not engine.lacks:
            self.report(engine, Confirmed())

    async def mark_stale(self, engine: Engine, reason: str) -> None:
        """Record that an engine serves other weights than those of its version."""
        self.report(engine, FellBehind(reason=reason))

    async def doubt(self, engine: Engine, reason: str) -> None:
        """Record that a request failed on the way. The engine gets no other one before it has answered a probe."""
        if not engine.is_live:
            return
        self.report(engine, Doubted(reason=reason))
        if not self._is_supervised:
            await self.examine(engine, reason)

    async def examine(self, engine: Engine, reason: str) -> bool:
        """Probe an engine that failed; return whether it answers. If not, it is dead from now on."""
        client = engine.client
        is_there = await client.is_healthy(timeout_s=_PROBE_TIMEOUT_S)
        if engine.client is client:
            self.report(engine, Answered() if is_there else Ended(reason=reason))
        return is_there

    def answered(self, engine: Engine, throughput: Throughput) -> None:
        """Record that requests were answered with tokens of the engine's version; it need not be probed."""
        engine.throughput += throughput
        if engine.is_live and self.quiet_s(engine) > _NOTED_EVERY_S:
            self.report(engine, Answered())

    def quiet_s(self, engine: Engine) -> float:
        """Return the time since the engine's last answer."""
        return self._clock() - engine.status.last_answer

    def report(self, engine: Engine, event: Event) -> None:
        """Advance the status of an engine by an event. If it is dead, its leases end."""
        before = engine.status
        if isinstance(event, FellBehind):
            engine.lacks = set(self._policies)
        after = advance(before, event, now=self._clock(), policy=self.policy)
        self.adopt(engine, after)
        if after.state is before.state:
            return
        logger.info("engine=%d state=%s reason=%s", engine.index, after.state, after.reason)
        for listener in self._listeners:
            listener(engine, before)

    def adopt(self, engine: Engine, status: EngineStatus) -> None:
        """Set the status of an engine without notifying listeners."""
        before, engine.status = engine.status, status
        if status.state is before.state:
            return
        self.num_changes += 1
        self._dispatcher.changed(engine)
        if status.state is EngineState.DEAD:
            for scope in engine.leases:
                if not scope.expired():
                    scope.reschedule(asyncio.get_running_loop().time())
        self._notify()

    def count_pause(self, engines: Iterable[Engine]) -> None:
        """Record that these engines are about to be paused or resumed."""
        for engine in engines:
            engine.num_pauses += 1
        self.num_changes += 1

    def replace_client(self, engine: Engine, client: EngineClient) -> EngineClient:
        """Set the client of a restarted engine, which has a new address; return the old client."""
        before, engine.client = engine.client, client
        engine.served, engine.lacks = {}, set(self._policies)
        engine.adapters = Counter()
        engine.throughput = Throughput()
        self.num_changes += 1
        return before

    def fail(self, error: BaseException) -> None:
        """Record that the supervisor failed: those who wait for an engine get this error."""
        self._failure = error
        self._notify()

    def set_awake(self, *, is_awake: bool) -> None:
        """Record whether the engines may use their devices."""
        self.is_awake = is_awake
        if is_awake:
            self._notify()

    async def close(self) -> None:
        await asyncio.gather(*(engine.client.close() for engine in self.engines))

    def _versions(self) -> str:
        named = [f"version {self.committed_version(policy)}{policy and f' of {policy}'}" for policy in self._policies]
        return " and ".join(named)

    def _reasons(self) -> str:
        reasons = [f"{engine} is {engine.state}: {engine.reason}" for engine in self.engines if engine.reason]
        more = [f"and {len(reasons) - _MAX_REASONS} more"] if len(reasons) > _MAX_REASONS else []
        return "; ".join([*reasons[:_MAX_REASONS], *more])

    def _notify(self) -> None:
        """Wake all waiters from a task: states change in functions that are not async, often many at once."""
        if self._notifying is None:
            self._notifying = asyncio.get_running_loop().create_task(self._notify_all())

    async def _notify_all(self) -> None:
        self._notifying = None
        self._dispatcher.serve()
        if self._is_hopeless:
            self._dispatcher.refuse(self._end_reason)
        self._restart_deadline()
        async with self._changed:
            self._changed.notify_all()
