"""The driver's end of one rollout worker: the prompts that it was asked, and what it knows of its engines.

Everything is sent and delivered many at a time: a call costs the driver a millisecond.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field

import ray
from ray.actor import ActorHandle

from megarl.rollout.fleet import Engine
from megarl.rollout.worker import AnsweredPrompt, EngineView, RolloutTask, WorkerReport
from megarl.runtime.rollouts.host import Delivery, FailedAnswer, Orders, WorkerSetup
from megarl.runtime.rollouts.stored import StoredResponses
from megarl.runtime.trainers.remote_process import RemoteProcess
from megarl.types import Prompt

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
class WorkerLink:
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
            first += len(answer.num_tokens)

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
