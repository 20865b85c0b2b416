"""The fleet of a rollout worker in another process, for a part of the engines.

The states, versions and pauses of its engines follow those of the driver's fleet; it reports back what happened to its
requests, which the driver records.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace

from megarl.engine.client import EngineClient, EngineEndpoint
from megarl.engine.dispatch import Throughput
from megarl.engine.fleet import Engine, Fleet, Served
from megarl.engine.lifecycle import Answered, EngineState, EngineStatus, FellBehind, RestartPolicy
from megarl.errors import EngineError
from megarl.observe.observer import Observer
from megarl.types import PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """An engine as the driver's fleet records it."""

    endpoint: EngineEndpoint
    served: Mapping[str, Served]
    """By policy."""
    status: EngineStatus
    num_pauses: int
    number: int
    """Grows with every view; a view that arrives after a later one is ignored."""

    @classmethod
    def of(cls, engine: Engine, *, number: int) -> EngineView:
        return cls(
            endpoint=engine.client.endpoint,
            served=engine.served,
            status=engine.status,
            num_pauses=engine.num_pauses,
            number=number,
        )

    @property
    def key(self) -> tuple[object, ...]:
        """All that a worker needs to know."""
        served = tuple(self.served.items())
        return self.endpoint, served, self.status.state, self.status.is_over, self.num_pauses

    @property
    def adapters(self) -> tuple[str, ...]:
        """The adapters that requests compute with."""
        return tuple(each.adapter for each in self.served.values() if each.adapter is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineComplaint:
    """An engine that failed a request of the worker."""

    endpoint: EngineEndpoint
    version: PolicyVersion
    is_stale: bool
    """It served other weights than those of its version."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProbe:
    """The answers of an engine to the worker's probes."""

    endpoint: EngineEndpoint
    expected: PolicyVersion | None
    """The version that the worker knew when it asked; None if the engine had none then: weights may have come since."""
    served: str | None
    """The version that the scheduler reported; None if only the server answered, as while weights arrive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """All that happened to a worker's requests since its last report."""

    complaints: tuple[EngineComplaint, ...]
    probes: tuple[EngineProbe, ...]
    """The last answer of each engine of its own that was probed."""
    answered: dict[int, Throughput]
    """Engines that answered with tokens of their version."""
    num_requests: dict[int, int]
    """Requests under way, by engine."""
    adapters: dict[int, tuple[int, tuple[str, ...]]]
    """By engine the number of the newest view, and the adapters of requests under way."""
    retries: dict[str, int]
    """Requests that were sent again, by cause."""
    num_prompt_tokens: int
    """Tokens that requests brought."""
    num_cached_tokens: int
    """Tokens among them that the engines had in their caches."""
    num_drafted_tokens: int
    """Tokens of responses for which engines checked drafts."""
    num_draft_passes: int
    score_seconds: tuple[float, ...]
    failed_scores: dict[str, int]
    num_addressed: int
    """Responses that name control tokens of their judge."""
    judges: tuple[tuple[str, str, str], ...]  # see `Observer.judges`


@dataclass(slots=True)
class RequestCounts:
    """A `RequestListener` that counts until a report is made."""

    causes: Counter[str] = field(default_factory=Counter)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_drafted_tokens: int = 0
    num_draft_passes: int = 0

    def request_retried(self, cause: str) -> None:
        self.causes[cause] += 1

    def prompt_read(self, num_tokens: int, *, num_cached: int) -> None:
        self.num_prompt_tokens += num_tokens
        self.num_cached_tokens += num_cached

    def draft_checked(self, num_tokens: int, *, num_passes: int) -> None:
        self.num_drafted_tokens += num_tokens
        self.num_draft_passes += num_passes


class ScoreCounts(Observer):
    """The observer of a worker's scorer: counts until a report is made."""

    def __init__(self) -> None:
        super().__init__(())
        self.seconds: list[float] = []
        self.failures: Counter[str] = Counter()
        self.num_addressed = 0

    def judge_addressed(self, num_responses: int = 1) -> None:
        self.num_addressed += num_responses

    def scored(self, seconds: float) -> None:
        self.seconds.append(seconds)

    def score_failed(self, cause: str) -> None:
        self.failures[cause] += 1


class FollowingFleet:
    """The fleet of a worker in another process, which follows the driver's."""

    def __init__(
        self,
        endpoints: Sequence[EngineEndpoint],
        *,
        connect: Callable[[EngineEndpoint], EngineClient],
        lent: Set[int],
        max_outstanding: int,
        publish_timeout_s: float,
    ) -> None:
        """`lent` engines are those of other workers, for when no other is live."""
        self._connect = connect
        self._lent = lent
        self.fleet = Fleet(
            [connect(endpoint) for endpoint in endpoints],
            max_outstanding=max_outstanding,
            publish_timeout_s=publish_timeout_s,
            policy=RestartPolicy(max_restarts=0),  # the driver examines and restarts engines
            lent=lent,
        )
        self._engines = {engine.index: engine for engine in self.fleet.engines}
        self._numbers: dict[int, int] = {}
        self._complaints: list[EngineComplaint] = []
        self.scores = ScoreCounts()
        self._probes: dict[int, EngineProbe] = {}
        self._is_due = asyncio.Event()
        self.fleet.requests = self._requests = RequestCounts()
        self.fleet.listen(self._note)

    async def follow(self, views: Sequence[EngineView]) -> None:
        """Take over what the driver records."""
        replaced = [client for view in views if (client := self._take(view)) is not None]
        await asyncio.gather(*(client.close() for client in replaced))

    def _take(self, view: EngineView) -> EngineClient | None:
        index = view.endpoint.index
        if view.number <= self._numbers.get(index, 0):
            return None
        self._numbers[index] = view.number
        engine, before = self._engines[index], None
        if engine.client.endpoint != view.endpoint:
            before = self.fleet.replace_client(engine, self._connect(view.endpoint))
        engine.served, engine.num_pauses = view.served, view.num_pauses
        for name in [name for name, count in engine.adapters.items() if not count]:
            del engine.adapters[name]
        # The driver's clock is another one.
        self.fleet.adopt(engine, replace(view.status, last_answer=engine.status.last_answer))
        return before

    def _note(self, engine: Engine, _before: EngineStatus) -> None:
        self._complaints.append(
            EngineComplaint(
                endpoint=engine.client.endpoint,
                version=engine.version,
                is_stale=engine.state is EngineState.STALE,
                reason=engine.reason,
            )
        )
        self.report_now()

    def report_now(self) -> None:
        """End the wait for the next report."""
        self._is_due.set()

    async def report(self, *, within_s: float) -> WorkerReport:
        """Return a report after `within_s`, or when an engine fails or `report_now` is called."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._is_due.wait()
        self._is_due.clear()
        report = WorkerReport(
            complaints=tuple(self._complaints),
            probes=tuple(self._probes.values()),
            answered=self._answered(),
            num_requests={index: engine.num_outstanding for index, engine in self._engines.items()},
            adapters={
                index: (self._numbers.get(index, 0), tuple(engine.held_adapters))
                for index, engine in self._engines.items()
                if any(each.adapter for each in engine.served.values())
            },
            retries=dict(self._requests.causes),
            num_prompt_tokens=self._requests.num_prompt_tokens,
            num_cached_tokens=self._requests.num_cached_tokens,
            num_drafted_tokens=self._requests.num_drafted_tokens,
            num_draft_passes=self._requests.num_draft_passes,
            score_seconds=tuple(self.scores.seconds),
            failed_scores=dict(self.scores.failures),
            num_addressed=self.scores.num_addressed,
            judges=tuple(self.scores.judges),
        )
        self._complaints.clear()
        self._probes.clear()
        self.fleet.requests = self._requests = RequestCounts()
        self.scores.seconds.clear()
        self.scores.failures.clear()
        self.scores.num_addressed = 0
        return report

    async def probe(self, *, every_s: float, timeout_s: float) -> None:
        """Probe the worker's own engines for ever; the answers are in the next report."""
        own = [engine for index, engine in self._engines.items() if index not in self._lent]
        asks = (self._ask_scheduler, self._ask_server)
        await asyncio.gather(*(self._repeat(ask, engine, every_s, timeout_s) for engine in own for ask in asks))

    async def _repeat(
        self, ask: Callable[[Engine, float], Awaitable[None]], engine: Engine, every_s: float, timeout_s: float
    ) -> None:
        while True:
            # A checked rollout says as much as a probe.
            if engine.status.is_reachable and not (engine.is_live and self.fleet.quiet_s(engine) < every_s):
                await ask(engine, timeout_s)
            await asyncio.sleep(every_s)

    async def _ask_scheduler(self, engine: Engine, timeout_s: float) -> None:
        endpoint, expected = engine.client.endpoint, self._expected(engine)
        with suppress(EngineError):
            served = await engine.client.probe(timeout_s=timeout_s)
            self._probes[engine.index] = EngineProbe(endpoint=endpoint, expected=expected, served=served)

    async def _ask_server(self, engine: Engine, timeout_s: float) -> None:
        endpoint, expected = engine.client.endpoint, self._expected(engine)
        if await engine.client.is_healthy(timeout_s=timeout_s):
            self._probes.setdefault(engine.index, EngineProbe(endpoint=endpoint, expected=expected, served=None))

    def _expected(self, engine: Engine) -> PolicyVersion | None:
        """A new engine counts as one of version 0, and has no weights until the driver says that it is live."""
        return engine.version if engine.is_live and engine.index in self._numbers else None

    def _answered(self) -> dict[int, Throughput]:
        throughputs = {
            index: engine.throughput for index, engine in self._engines.items() if engine.throughput.num_requests
        }
        for index in throughputs:
            self._engines[index].throughput = Throughput()
        return throughputs


async def apply_report(report: WorkerReport, fleet: Fleet, observer: Observer) -> None:
    """Record in the driver's fleet what happened to a worker's requests. `num_requests` is left to the caller."""
    engines = {engine.index: engine for engine in fleet.engines}
    for complaint in report.complaints:
        engine = engines[complaint.endpoint.index]
        if engine.client.endpoint != complaint.endpoint:
            continue  # it has been restarted since
        if not complaint.is_stale:
            await fleet.doubt(engine, complaint.reason)
        elif engine.version == complaint.version:
            await fleet.mark_stale(engine, complaint.reason)
    for probe in report.probes:
        _record_probe(probe, engines[probe.endpoint.index], fleet)
    for index, throughput in report.answered.items():
        fleet.answered(engines[index], throughput)
    for cause in Counter(report.retries).elements():
        fleet.requests.request_retried(cause)
    fleet.requests.prompt_read(report.num_prompt_tokens, num_cached=report.num_cached_tokens)
    fleet.requests.draft_checked(report.num_drafted_tokens, num_passes=report.num_draft_passes)
    for seconds in report.score_seconds:
        observer.scored(seconds)
    for cause in Counter(report.failed_scores).elements():
        observer.score_failed(cause)
    observer.judge_addressed(report.num_addressed)


def _record_probe(probe: EngineProbe, engine: Engine, fleet: Fleet) -> None:
    if engine.client.endpoint != probe.endpoint:
        return
    if probe.served is not None or engine.is_syncing:
        fleet.report(engine, Answered())
    is_certain = probe.served is not None and not engine.is_syncing and engine.version == probe.expected
    if is_certain and engine.is_live and probe.served != str(engine.weights_version):
        reason = f"serves version {probe.served}, not {engine.weights_version}"
        fleet.report(engine, FellBehind(reason=reason))
