"""Rollout workers as Ray actors: which one answers a prompt, and how lost ones are replaced.

The driver sends prompts and gets lengths, versions, scores and times, many at a time. The arrays of groups stay in the
object store of the worker's node; the driver owns them, so that they outlive the worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.cluster.cluster import live_nodes
from megarl.cluster.remote_process import RemoteProcess, end
from megarl.cluster.stored import StoredResponses, nodes_of, write_stored
from megarl.cluster.tasks import logged_task
from megarl.cluster.worker_group import exit_detail
from megarl.data.rollout_files import FiledRollout
from megarl.engine.dispatch import Dispatcher, lent_engines
from megarl.engine.fleet import Engine, Fleet
from megarl.engine.lifecycle import EngineStatus
from megarl.errors import FleetError, MachineError, MegarlError, QuarantineError, WorkerError
from megarl.observe.observer import Observer
from megarl.rollout.following import EngineView, WorkerReport, apply_report
from megarl.rollout.host import REPORT_EVERY_S, Delivery, FailedAnswer, Orders, RolloutHost, WorkerSetup
from megarl.rollout.worker import AnsweredPrompt, RolloutTask
from megarl.types import Prompt, ScoredGroup

logger = logging.getLogger(__name__)

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
_OVERFULL = 2
"""Groups that a worker holds, as a multiple of those that its engines compute at once: long ones end late."""


class RolloutWorkers:
    """All rollout workers of a run, inside `running`. Each prompt goes to the one with the fewest groups."""

    def __init__(
        self, fleet: Fleet, setups: Sequence[WorkerSetup], *, observer: Observer, rollouts_per_prompt: int
    ) -> None:
        self._fleet = fleet
        self._observer = observer
        self._silence_timeout_s = setups[0].silence_timeout_s
        self._workers = [self._link(setup) for setup in setups]
        self._keepers: list[asyncio.Task[None]] = []
        num_slots = max(setup.max_outstanding * len(setup.own) for setup in setups)
        self._dispatcher = Dispatcher(
            self._workers, max_outstanding=-(-_OVERFULL * num_slots // rollouts_per_prompt) + 1
        )
        self._num_views = 0
        self._num_requests: dict[int, dict[int, int]] = {}
        """Requests at each engine, by worker."""
        self._telling: asyncio.Task[None] | None = None
        self._reasons: dict[int, str] = {}
        """Why a worker was lost last."""
        fleet.listen(self._note_change)

    def _link(self, setup: WorkerSetup) -> WorkerRecord:
        engines = {engine.index: engine for engine in self._fleet.engines}
        lent = sorted(lent_engines(setup.own, len(engines)))
        return WorkerRecord(setup=setup, engines=tuple(engines[index] for index in (*setup.own, *lent)))

    def _welcome(self, engines: Sequence[Engine]) -> None:
        self._keepers.append(logged_task(self._start_beside(engines)))

    async def _start_beside(self, engines: Sequence[Engine]) -> None:
        """Start and keep a worker on the node of engines that were added."""
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
        await self._keep(worker)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self._keepers = [asyncio.create_task(self._keep(worker)) for worker in self._workers]
        self._fleet.join_listeners.append(self._welcome)
        known = {index for worker in self._workers for index in worker.setup.own}
        if added := [engine for engine in self._fleet.engines if engine.index not in known]:
            self._welcome(added)
        try:
            yield
        finally:
            for keeper in self._keepers:
                keeper.cancel()
            await asyncio.gather(*self._keepers, return_exceptions=True)
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

    async def write(self, path: Path, kept: Sequence[FiledRollout]) -> None:
        """Have the workers write a file of rollouts; the part of one that is lost is written by another."""
        reason = ""
        for _ in range(_MAX_LOST):
            while not (hosts := [each.host for each in self._workers if each.host is not None and each.has_answered]):
                await asyncio.sleep(_POLL_S)
            try:
                return await write_stored(path, kept, hosts)
            except ray.exceptions.RayError as error:
                cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
                reason = exit_detail(cause)
                if isinstance(cause, MegarlError):
                    raise MachineError(reason) from None
                await asyncio.sleep(_POLL_S)
        raise WorkerError(f"rollout workers were lost: {reason}")

    async def announce(self) -> None:
        """Tell every worker what changed in the fleet; return when all know. One that does not answer is replaced."""
        told = []
        for worker in self._workers:
            if worker.host is not None:
                worker.forget()
                told.append(worker.host.follow.remote(self._views(worker)))
        if told:
            await asyncio.wait([asyncio.ensure_future(_ended(each)) for each in told], timeout=self._silence_timeout_s)

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
            if (view := worker.tell(engine, number=self._num_views)) is not None:
                views.append(view)
        return views

    def _note_change(self, _engine: Engine, _before: EngineStatus) -> None:
        if self._telling is None:
            self._telling = asyncio.get_running_loop().create_task(self._tell())

    async def _tell(self) -> None:
        self._telling = None
        for worker in self._workers:
            if worker.host is not None and (views := self._views(worker)):
                worker.host.follow.remote(views)
            self._judge(worker)
        self._dispatcher.serve()

    def _judge(self, worker: WorkerRecord) -> None:
        """Decide whether the worker gets prompts: it answers, and has a live engine unless nobody has."""
        has_engine = any(engine.is_live for engine in worker.own)
        is_live = worker.has_answered and (has_engine or not any(engine.is_live for engine in self._fleet.engines))
        if is_live != worker.is_live:
            worker.is_live = is_live
            self._dispatcher.changed(worker)

    async def _keep(self, worker: WorkerRecord) -> None:
        """Start the worker, again whenever it is lost."""
        num_failures = 0
        while num_failures < _MAX_FAILURES:
            try:
                await self._serve(worker)
            except Exception as error:  # noqa: BLE001 - a few losses end the run, whatever the cause; nobody else hears of it
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
            asked, arrays = host.report.remote(worker.orders(), self._views(worker))
            delivery = await _answer_of(asked, timeout_s=REPORT_EVERY_S + self._silence_timeout_s)
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
            worker.forget()  # it may think less of an engine than the fleet: it is told again
        self._num_requests[worker.index] = report.num_requests
        worker.watch(is_watching=True)
        worker.note_adapters(report)
        for engine in worker.engines:
            counts = (of_worker.get(engine.index, 0) for of_worker in self._num_requests.values())
            engine.num_elsewhere = sum(counts)

    async def _end(self, worker: WorkerRecord) -> None:
        """End the process, frozen or not."""
        host, process, worker.host, worker.process = worker.host, worker.process, None, None
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


GATHER_S = 0.01
"""Time that a prompt waits for others before it is sent."""


class WorkerLostError(Exception):
    """A rollout worker ended or does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """A prompt that a worker has to answer."""

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
    known: dict[int, tuple[object, ...]] = field(default_factory=dict)
    _adapters: dict[int, list[tuple[int, str]]] = field(default_factory=lambda: defaultdict(list))
    """The adapters of each engine that it may use or will learn of, with the numbers of their views."""
    _num_asked: int = 0
    _questions: dict[int, _Question] = field(default_factory=dict)
    _unsent: list[int] = field(default_factory=list)
    _dropped: list[int] = field(default_factory=list)
    """Questions that nobody waits for, still to be told."""
    _sending: asyncio.TimerHandle | None = None

    @property
    def index(self) -> int:
        return self.setup.index

    @property
    def own(self) -> tuple[Engine, ...]:
        return self.engines[: len(self.setup.own)]

    async def ask(self, prompt: Prompt, task: RolloutTask) -> AnsweredPrompt:
        """Return the worker's answer; raise WorkerLostError if it is lost before."""
        self._num_asked += 1
        number, loop = self._num_asked, asyncio.get_running_loop()
        self._questions[number] = question = _Question(prompt=prompt, task=task, answer=loop.create_future())
        self._unsent.append(number)
        self._send_soon()
        try:
            return await question.answer
        finally:
            if self._questions.pop(number, None) is not None:
                self._dropped.append(number)
                self._send_soon()

    def _send_soon(self) -> None:
        if self._sending is None and self.is_reporting:
            self._sending = asyncio.get_running_loop().call_later(GATHER_S, self._send)

    def _send(self) -> None:
        orders = self.orders()
        if self.host is not None and (orders.asked or orders.dropped):
            self.host.take.remote(orders)

    def orders(self) -> Orders:
        """Return all that waits to be told to the worker."""
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None
        unsent, self._unsent = self._unsent, []
        dropped, self._dropped = self._dropped, []
        prompts: dict[RolloutTask, dict[int, Prompt]] = defaultdict(dict)
        for number in unsent:
            if (question := self._questions.get(number)) is not None:
                prompts[question.task][number] = question.prompt
        return Orders(asked=tuple(prompts.items()), dropped=tuple(dropped))

    def take(self, delivery: Delivery, arrays: ray.ObjectRef) -> None:
        """Hand the answers of a delivery to those who wait for them."""
        stored, first = StoredResponses(arrays, delivery.node, self.host), 0
        for number, answer in delivery.answers:
            question = self._questions.pop(number, None)
            is_awaited = question is not None and not question.answer.done()
            if isinstance(answer, FailedAnswer):
                if question is not None and is_awaited:
                    question.answer.set_exception(answer.error or RuntimeError(answer.detail))
                continue
            if question is not None and is_awaited:
                question.answer.set_result(answer.answered(question.prompt, stored, first))
            first += answer.num_responses

    def lose(self, reason: str) -> None:
        """End all that was asked: the worker is lost."""
        questions, self._questions = self._questions, {}
        for question in questions.values():
            if not question.answer.done():
                question.answer.set_exception(WorkerLostError(reason))
        self._adapters.clear()
        for engine in self.engines:
            engine.adapters_elsewhere.pop(self.index, None)

    def tell(self, engine: Engine, *, number: int) -> EngineView | None:
        """Return a view of the engine with this number; None if the worker knows it all."""
        view = EngineView.of(engine, number=number)
        if self.known.get(engine.index) == view.key:
            return None
        self.known[engine.index] = view.key
        if view.adapter is not None:
            self._adapters[engine.index].append((number, view.adapter))
            self._note_adapters(engine)
        return view

    def forget(self) -> None:
        """Count on nothing that it was told before."""
        self.known.clear()
        self.num_seen = -1

    def watch(self, *, is_watching: bool) -> None:
        """Note whether it reports: it then probes its own engines."""
        for engine in self.own:
            engine.is_watched = is_watching

    def note_adapters(self, report: WorkerReport) -> None:
        """Forget the adapters that the worker uses no more: they can be unloaded."""
        for engine in self.engines:
            if engine.index in report.adapters:
                newest, held = report.adapters[engine.index]
                # Views that were on their way when it reported are not known to it yet.
                told = [each for each in self._adapters[engine.index] if each[0] >= newest]
                self._adapters[engine.index] = [*((newest - 1, name) for name in held), *told]
                self._note_adapters(engine)

    def _note_adapters(self, engine: Engine) -> None:
        engine.adapters_elsewhere[self.index] = frozenset(name for _, name in self._adapters[engine.index])
