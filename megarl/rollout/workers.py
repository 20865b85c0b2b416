"""Rollout workers as Ray actors: how they start, which one answers a prompt, and how lost ones are replaced.

The driver sends prompts and gets lengths, versions, scores and times, many at a time. The arrays of groups stay in the
object store of the worker's node; the driver owns them, so that they outlive the worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.cluster.cluster import live_nodes
from megarl.cluster.remote_process import RemoteProcess, end
from megarl.cluster.stored import StoredResponses, nodes_of, write_answers, write_samples
from megarl.cluster.tasks import logged_task
from megarl.cluster.worker_group import exit_detail
from megarl.data.evaluation_files import EvaluatedRollout
from megarl.data.rollout_files import SampledRollout
from megarl.engine.dispatch import Dispatcher
from megarl.engine.fleet import Engine, Fleet
from megarl.engine.lifecycle import EngineStatus
from megarl.errors import FleetError, MachineError, MegarlError, QuarantineError, WorkerError
from megarl.observe.observer import Observer
from megarl.rollout.following import EngineView, WorkerReport, apply_report
from megarl.rollout.host import REPORT_EVERY_S, Delivery, FailedAnswer, PromptChanges, RolloutHost, WorkerSetup
from megarl.rollout.task import AnsweredPrompt, RolloutTask
from megarl.types import Prompt, ScoredGroup

logger = logging.getLogger(__name__)

GATHER_S = 0.01
"""Time that a prompt waits for others before it is sent."""
_START_TIMEOUT_S = 300.0
_GRACE_S = 5.0
"""Added to the silence timeout: after a pause of the driver itself the answer may be there already."""
_KILL_S = 30.0
_POLL_S = 0.05
_MAX_FAILURES = 5
"""Times that a worker is started again without having answered in between."""
_MAX_LOST = 3
"""Workers that may be lost with one prompt: it may be the cause."""
_MAX_CALLS = 1000
_NUM_LENT = 2
"""Engines of other workers that a worker may use when it has no live one."""
_OVERFULL = 2
"""Groups that a worker holds, as a multiple of those that it can have under way at once: long ones end late."""


def divide_engines(nodes: Sequence[str], *, per_node: int) -> list[tuple[str, tuple[int, ...]]]:
    """Return the node and the engines of every worker. `nodes` has that of each engine.

    A node has at most as many workers as engines.
    """
    divided = []
    for node in dict.fromkeys(nodes):
        there = [index for index, of_engine in enumerate(nodes) if of_engine == node]
        num_workers = min(per_node, len(there))
        divided += [(node, tuple(there[worker::num_workers])) for worker in range(num_workers)]
    return divided


def lent_engines(own: Sequence[int], num_engines: int) -> frozenset[int]:
    """Return engines of other workers, for requests that those of the worker itself cannot take: the next ones."""
    others = [index % num_engines for index in range(own[-1] + 1, own[-1] + num_engines)]
    return frozenset([index for index in others if index not in own][:_NUM_LENT])


class WorkerLostError(Exception):
    """A rollout worker ended or does not answer."""


class RolloutWorkers:
    """All rollout workers of a run, inside `running`. Each prompt goes to the one with the fewest groups."""

    def __init__(
        self, fleet: Fleet, setups: Sequence[WorkerSetup], *, observer: Observer, rollouts_per_prompt: int
    ) -> None:
        self._fleet = fleet
        self._observer = observer
        self._silence_timeout_s = setups[0].silence_timeout_s
        self._workers = [self._link(setup) for setup in setups]
        self._supervisors: list[asyncio.Task[None]] = []
        num_slots = max(setup.num_open for setup in setups)
        self._dispatcher = Dispatcher(
            self._workers, max_outstanding=-(-_OVERFULL * num_slots // rollouts_per_prompt) + 1
        )
        self._num_views = 0
        self._num_requests: dict[int, dict[int, int]] = {}
        """Requests at each engine, by worker."""
        self._announcing: asyncio.Task[None] | None = None
        self._reasons: dict[int, str] = {}
        """Why a worker was lost last."""
        fleet.listen(self._note_change)

    def _link(self, setup: WorkerSetup) -> WorkerRecord:
        engines = {engine.index: engine for engine in self._fleet.engines}
        lent = sorted(lent_engines(setup.own, len(engines)))
        return WorkerRecord(setup=setup, engines=tuple(engines[index] for index in (*setup.own, *lent)))

    def _welcome(self, engines: Sequence[Engine]) -> None:
        self._supervisors.append(logged_task(self._start_beside(engines)))

    async def _start_beside(self, engines: Sequence[Engine]) -> None:
        """Start a worker on the node of engines that were added, and supervise it."""
        nodes = {node["NodeManagerAddress"]: str(node["NodeID"]) for node in await asyncio.to_thread(live_nodes)}
        number, setup = len(self._workers), self._workers[0].setup
        setup = replace(
            setup,
            index=number,
            node=nodes.get(engines[0].client.endpoint.host, setup.node),
            own=tuple(engine.index for engine in engines),
            num_on_node=1,
            num_workers=number + 1,
            log_path=setup.log_path.with_name(f"reward_{number}.log"),
        )
        worker = self._link(setup)
        self._workers.append(worker)
        self._dispatcher.add(worker)
        await self._supervise(worker)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self._supervisors = [asyncio.create_task(self._supervise(worker)) for worker in self._workers]
        self._fleet.join_listeners.append(self._welcome)
        served = {index for worker in self._workers for index in worker.setup.own}
        if added := [engine for engine in self._fleet.engines if engine.index not in served]:
            self._welcome(added)
        try:
            yield
        finally:
            for supervisor in self._supervisors:
                supervisor.cancel()
            await asyncio.gather(*self._supervisors, return_exceptions=True)
            for worker in self._workers:
                if worker.host is not None:
                    ray.kill(worker.host, no_restart=True)

    async def processes(self) -> list[RemoteProcess]:
        """Return the processes of all workers when they have started."""
        while not all(worker.has_answered or worker.is_over for worker in self._workers):
            await asyncio.sleep(_POLL_S)
        return [worker.process for worker in self._workers if worker.process is not None]

    async def answer(self, prompt: Prompt, task: RolloutTask) -> AnsweredPrompt:
        avoided: set[int] = set()
        refused: set[int] = set()
        lost: list[str] = []
        while True:
            worker = await self._acquire(avoided)
            try:
                answered = await worker.ask(prompt, task)
                self._observer.check_judges()  # those of different workers are the same
                return answered
            except WorkerLostError as error:
                # Its prompts are asked again: the same seeds give the same tokens.
                lost.append(f"worker {worker.index}: {error}")
                self._fleet.requests.request_retried("worker_lost")
                avoided |= {other.index for other in self._workers if other.setup.node == worker.setup.node}
                if len(lost) == _MAX_LOST:
                    reasons = "; ".join(lost)
                    raise QuarantineError(f"prompt {prompt.uid}: rollout workers were lost: {reasons}") from None
            except QuarantineError:
                raise
            except FleetError:
                refused.add(worker.index)
                avoided |= refused
                if len(refused) == len(self._workers):
                    raise
            finally:
                self._dispatcher.release(worker)

    async def lost(self, groups: Sequence[ScoredGroup]) -> list[int]:
        """Return the places of groups whose arrays were on a node that is gone."""
        holding = [nodes_of(scored.group) for scored in groups]
        if not set().union(*holding):
            return []
        alive = await asyncio.to_thread(_live_nodes)
        return [place for place, of_group in enumerate(holding) if not of_group <= alive]

    async def write(self, path: Path, samples: Sequence[SampledRollout]) -> None:
        """Have the workers write a file of samples; the part of one that is lost is written by another."""
        await self._write(path, partial(write_samples, path, samples))

    async def write_answers(self, path: Path, answers: Sequence[EvaluatedRollout]) -> None:
        """Have the workers write the answers of an evaluation."""
        await self._write(path, partial(write_answers, path, answers))

    async def _write(self, path: Path, write: Callable[[Sequence[ActorHandle]], Awaitable[None]]) -> None:
        reason = ""
        for _ in range(_MAX_LOST):
            while not (hosts := [each.host for each in self._workers if each.host is not None and each.has_answered]):
                await asyncio.sleep(_POLL_S)
            try:
                return await write(hosts)
            except ray.exceptions.RayError as error:
                cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
                reason = exit_detail(cause)
                if isinstance(cause, MegarlError):
                    raise MachineError(reason) from None
                await asyncio.sleep(_POLL_S)
        raise WorkerError(f"rollout workers were lost: {reason}")

    async def announce(self) -> None:
        """Send every worker what changed in the fleet; return when all have it. A silent worker is replaced."""
        sent = []
        for worker in self._workers:
            if worker.host is not None:
                worker.forget()
                sent.append(worker.host.follow.remote(self._views(worker)))
        if sent:
            await asyncio.wait([asyncio.ensure_future(_ended(each)) for each in sent], timeout=self._silence_timeout_s)

    async def _acquire(self, avoided: set[int]) -> WorkerRecord:
        while True:
            self._fleet.check()
            worker = self._dispatcher.take(avoided, ())
            if worker is None:
                if all(each.is_over for each in self._workers):
                    raise self._none_left()
                worker = await self._dispatcher.wait(avoided, ())
            if worker.is_live:
                return worker
            self._dispatcher.release(worker)

    def _views(self, worker: WorkerRecord) -> list[EngineView]:
        """Return what the worker does not know yet of its engines."""
        if worker.num_seen == self._fleet.num_changes:
            return []
        worker.num_seen = self._fleet.num_changes
        views = []
        for engine in worker.engines:
            self._num_views += 1
            if (view := worker.view_of(engine, number=self._num_views)) is not None:
                views.append(view)
        return views

    def _note_change(self, _engine: Engine, _before: EngineStatus) -> None:
        if self._announcing is None:
            self._announcing = asyncio.get_running_loop().create_task(self._announce_changes())

    async def _announce_changes(self) -> None:
        self._announcing = None
        for worker in self._workers:
            if worker.host is not None and (views := self._views(worker)):
                worker.host.follow.remote(views)
            self._judge(worker)
        self._dispatcher.serve()

    def _judge(self, worker: WorkerRecord) -> None:
        """Decide whether the worker gets prompts: it answers, and has a live engine unless none has."""
        has_engine = any(engine.is_live for engine in worker.own)
        is_live = worker.has_answered and (has_engine or not any(engine.is_live for engine in self._fleet.engines))
        if is_live != worker.is_live:
            worker.is_live = is_live
            self._dispatcher.changed(worker)

    async def _supervise(self, worker: WorkerRecord) -> None:
        """Start the worker, again whenever it is lost."""
        num_failures = 0
        while num_failures < _MAX_FAILURES:
            try:
                await self._serve(worker)
            except Exception as error:  # noqa: BLE001 - a few losses end the run, whatever the cause; it is reported here alone
                num_failures = 1 if worker.own[0].is_watched else num_failures + 1
                reason = str(error) if isinstance(error, WorkerLostError) else repr(error)
                self._reasons[worker.index] = reason
                logger.warning("rollout worker=%d lost: %s", worker.index, reason)
                self._observer.restarted("rollout_worker", worker.index, reason)
            worker.has_answered = False
            worker.watch(is_watching=False)
            self._judge(worker)  # first: the prompts must not come back to it
            worker.lose(self._reasons.get(worker.index, "it ended"))
            await self._end(worker)
            await asyncio.sleep(2.0 ** (num_failures - 1))
        worker.is_over = True
        if all(each.is_over for each in self._workers):
            self._dispatcher.refuse(self._none_left)

    async def _serve(self, worker: WorkerRecord) -> None:
        """Start the worker and take its reports; raise WorkerLostError when there are none."""
        setup = worker.setup
        # Soft only where the node is gone, and another one takes the worker: Ray may move a soft one at any time.
        is_gone = setup.node not in await asyncio.to_thread(_live_nodes)
        strategy = NodeAffinitySchedulingStrategy(setup.node, soft=is_gone)
        remote = ray.remote(num_cpus=0, max_restarts=0, max_concurrency=_MAX_CALLS)(RolloutHost)
        endpoints = [engine.client.endpoint for engine in worker.engines]
        worker.forget()
        worker.host = host = remote.options(scheduling_strategy=strategy).remote(setup, endpoints)
        process = await _answer_of(host.process.remote(), timeout_s=_START_TIMEOUT_S)
        assert isinstance(process, RemoteProcess), process
        worker.process = process
        while True:
            worker.is_reporting = True
            reporting, arrays = host.report.remote(worker.changes(), self._views(worker))
            delivery = await _answer_of(reporting, timeout_s=REPORT_EVERY_S + self._silence_timeout_s)
            assert isinstance(delivery, Delivery), delivery
            worker.is_reporting = False  # before answers make room for prompts, which go with the next call
            worker.take(delivery, arrays)
            await self._record(worker, delivery.report)
            if not worker.has_answered:
                worker.has_answered = True
                self._judge(worker)
                self._dispatcher.serve()
            await asyncio.sleep(GATHER_S)

    async def _record(self, worker: WorkerRecord, report: WorkerReport) -> None:
        for judge in report.judges:
            self._observer.judge_answered(*judge)
        await apply_report(report, self._fleet, self._observer)
        if report.complaints:
            worker.forget()  # it may think less of an engine than the fleet: it gets all views again
        self._num_requests[worker.index] = report.num_requests
        worker.watch(is_watching=True)
        worker.note_adapters(report)
        for engine in worker.engines:
            counts = (of_worker.get(engine.index, 0) for of_worker in self._num_requests.values())
            engine.num_elsewhere = sum(counts)

    async def _end(self, worker: WorkerRecord) -> None:
        """End the process, frozen or not."""
        host, worker.host = worker.host, None
        process, worker.process = worker.process, None
        self._num_requests.pop(worker.index, None)
        if host is not None:
            ray.kill(host, no_restart=True)
        if process is not None:
            with suppress(ray.exceptions.RayError, TimeoutError):
                await end(process, grace_s=1.0, timeout_s=_KILL_S)

    def _none_left(self) -> FleetError:
        reasons = "; ".join(f"worker {index}: {reason}" for index, reason in sorted(self._reasons.items()))
        return FleetError(f"no rollout worker is left after {_MAX_FAILURES} starts each: {reasons}")


def _live_nodes() -> set[str]:
    return {str(node["NodeID"]) for node in live_nodes()}


async def _answer_of(reference: ray.ObjectRef, *, timeout_s: float) -> object:
    answer = asyncio.ensure_future(_ended(reference))
    for limit_s in (timeout_s, _GRACE_S):
        done, _ = await asyncio.wait([answer], timeout=limit_s)
        if done:
            outcome = answer.result()
            if isinstance(outcome, ray.exceptions.RayError):
                raise WorkerLostError(exit_detail(outcome))
            return outcome
    answer.cancel()
    raise WorkerLostError(f"it has not answered for {timeout_s + _GRACE_S:.0f} s (roles.rollout.silence_timeout_s)")


async def _ended(reference: ray.ObjectRef) -> object:
    """Return the answer to a call, or the error of Ray instead of one."""
    try:
        return await reference
    except ray.exceptions.RayError as error:
        return error


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenPrompt:
    """A prompt whose group a worker has to return."""

    prompt: Prompt
    task: RolloutTask
    answer: asyncio.Future[AnsweredPrompt]


@dataclass(slots=True, kw_only=True, eq=False)
class WorkerRecord:
    """The driver's record of a worker, as a `Dispatched`."""

    setup: WorkerSetup
    engines: tuple[Engine, ...]
    """Its own and those lent to it."""
    host: ActorHandle | None = None
    process: RemoteProcess | None = None
    has_answered: bool = False
    """Since its last start or accident."""
    is_over: bool = False
    is_live: bool = False
    num_outstanding: int = 0
    is_reporting: bool = False
    """A report is under way: until it is there, prompts need a call of their own."""
    num_seen: int = -1
    """The fleet's count of changes when views were last sent."""
    sent_views: dict[int, tuple[object, ...]] = field(default_factory=dict)
    _adapters: dict[int, list[tuple[int, str]]] = field(default_factory=lambda: defaultdict(list))
    """The adapters of each engine that it may use or will learn of, with the numbers of their views."""
    _num_prompts: int = 0
    _open: dict[int, _OpenPrompt] = field(default_factory=dict)
    _unsent: list[int] = field(default_factory=list)
    _cancelled: list[int] = field(default_factory=list)
    """Numbers of cancelled prompts not yet sent to the worker."""
    _sending: asyncio.TimerHandle | None = None

    @property
    def index(self) -> int:
        return self.setup.index

    @property
    def own(self) -> tuple[Engine, ...]:
        return self.engines[: len(self.setup.own)]

    async def ask(self, prompt: Prompt, task: RolloutTask) -> AnsweredPrompt:
        """Return the worker's answer; raise WorkerLostError if it is lost before."""
        self._num_prompts += 1
        number, loop = self._num_prompts, asyncio.get_running_loop()
        self._open[number] = opened = _OpenPrompt(prompt=prompt, task=task, answer=loop.create_future())
        self._unsent.append(number)
        self._send_soon()
        try:
            return await opened.answer
        finally:
            if self._open.pop(number, None) is not None:
                self._cancelled.append(number)
                self._send_soon()

    def _send_soon(self) -> None:
        if self._sending is None and self.is_reporting:
            self._sending = asyncio.get_running_loop().call_later(GATHER_S, self._send)

    def _send(self) -> None:
        changes = self.changes()
        if self.host is not None and (changes.added or changes.cancelled):
            self.host.take.remote(changes)

    def changes(self) -> PromptChanges:
        """Return all changes that were not yet sent to the worker."""
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None
        unsent, self._unsent = self._unsent, []
        cancelled, self._cancelled = self._cancelled, []
        prompts: dict[RolloutTask, dict[int, Prompt]] = defaultdict(dict)
        for number in unsent:
            if (opened := self._open.get(number)) is not None:
                prompts[opened.task][number] = opened.prompt
        return PromptChanges(added=tuple(prompts.items()), cancelled=tuple(cancelled))

    def take(self, delivery: Delivery, arrays: ray.ObjectRef) -> None:
        """Hand the answers of a delivery to those who wait for them."""
        stored, first = StoredResponses(arrays, delivery.node, self.host), 0
        for number, answer in delivery.answers:
            opened = self._open.pop(number, None)
            if opened is not None and opened.answer.done():
                opened = None  # cancelled meanwhile
            if isinstance(answer, FailedAnswer):
                if opened is not None:
                    opened.answer.set_exception(answer.error or RuntimeError(answer.detail))
                continue
            if opened is not None:
                opened.answer.set_result(answer.answered(opened.prompt, stored, first))
            first += answer.num_responses

    def lose(self, reason: str) -> None:
        """Fail all open prompts: the worker is lost."""
        lost, self._open = self._open, {}
        for each in lost.values():
            if not each.answer.done():
                each.answer.set_exception(WorkerLostError(reason))
        self._adapters.clear()
        for engine in self.engines:
            engine.adapters_elsewhere.pop(self.index, None)

    def view_of(self, engine: Engine, *, number: int) -> EngineView | None:
        """Return a view of the engine with this number; None if the worker has all of it."""
        view = EngineView.of(engine, number=number)
        if self.sent_views.get(engine.index) == view.key:
            return None
        self.sent_views[engine.index] = view.key
        if view.adapters:
            self._adapters[engine.index] += [(number, name) for name in view.adapters]
            self._note_adapters(engine)
        return view

    def forget(self) -> None:
        """Send all views again: the worker may have none of those sent before."""
        self.sent_views.clear()
        self.num_seen = -1

    def watch(self, *, is_watching: bool) -> None:
        """Note whether it reports: it then probes its own engines."""
        for engine in self.own:
            engine.is_watched = is_watching

    def note_adapters(self, report: WorkerReport) -> None:
        """Forget the adapters that the worker uses no more: they can be unloaded."""
        for engine in self.engines:
            if engine.index in report.adapters:
                newest, in_use = report.adapters[engine.index]
                # Views that were on their way when it reported are not known to it yet.
                under_way = [each for each in self._adapters[engine.index] if each[0] >= newest]
                self._adapters[engine.index] = [*((newest - 1, name) for name in in_use), *under_way]
                self._note_adapters(engine)

    def _note_adapters(self, engine: Engine) -> None:
        engine.adapters_elsewhere[self.index] = frozenset(name for _, name in self._adapters[engine.index])
