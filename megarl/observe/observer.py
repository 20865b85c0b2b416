"""The one thing the loop tells what happened. Stamps each event and hands it to every sink.

It knows neither what an event means to a sink nor how the loop works; the loop knows no file, port or terminal.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from types import TracebackType

from megarl import __version__
from megarl.config import Recipe
from megarl.errors import PreemptedError
from megarl.observe import catalogue as names
from megarl.observe.endpoint import MetricsEndpoint
from megarl.observe.events import (
    EVENTS_FILE,
    CheckpointFailed,
    CheckpointSaved,
    EngineChanged,
    Evaluated,
    Event,
    EventLog,
    PhaseEnded,
    PhaseStarted,
    Published,
    PublishFailed,
    Record,
    Restarted,
    RunFinished,
    RunStarted,
    RunStatus,
    Sink,
    StepFinished,
    Warned,
    read_events,
)
from megarl.observe.facts import state_facts
from megarl.observe.folder import retire_earlier_run
from megarl.observe.loggers import LoggerSink, open_loggers
from megarl.observe.logs import LOG_FILE, logging_to
from megarl.observe.meter import Meter
from megarl.observe.metrics import Metrics
from megarl.observe.step_warnings import Doubts
from megarl.observe.summary import Phase, StepSummary
from megarl.observe.targets import Targets
from megarl.results import EvalResult, PublishResult
from megarl.system.network import LOOPBACK, address_in
from megarl.types import PolicyVersion


@contextmanager
def observing(
    recipe: Recipe, *, display: Sink, resumed_step: int = 0, is_continued: bool = False
) -> Iterator[Observer]:
    """An observer of one run: its port is open and its folder begun before anything else of the run starts.

    An earlier run of the same name is moved out of the way, unless this one continues it. Leaving records how the run
    ended, unless the run said so itself, and closes everything.
    """
    with ExitStack() as stack:
        meter = Meter(recipe.run.name)
        endpoint = None
        if recipe.observe.metrics_port is not None:
            bind = recipe.network.bind
            host = LOOPBACK if bind is None else address_in(bind)
            endpoint = MetricsEndpoint(meter.registry, port=recipe.observe.metrics_port, host=host)
            stack.callback(endpoint.close)
        retired = None if is_continued else retire_earlier_run(recipe.run_folder)
        events = recipe.run_folder / EVENTS_FILE
        metrics = Metrics(meter, earlier=read_events(events) if events.exists() else ())
        log = EventLog(events)
        stack.callback(log.close)
        state_facts(meter, recipe)
        stack.enter_context(logging_to(recipe.run_folder / LOG_FILE))
        stack.callback(display.close)
        targets = Targets(recipe.run_folder, run=recipe.run.name, exporter=endpoint.address if endpoint else None)
        stack.callback(targets.close)
        loggers = LoggerSink(meter, open_loggers(recipe))
        stack.callback(loggers.close)
        sinks = (log, metrics, targets, loggers, display)
        with Observer(sinks, meter=meter, first_sequence=log.next_sequence) as observer:
            observer.run_started(recipe, metrics_url=endpoint.url if endpoint else None, resumed_step=resumed_step)
            if retired is not None:
                observer.warned(f"an earlier run of this name is now {retired}")
            yield observer


class Observer:
    """Used from one thread. As a context it says, on the way out, how the run ended.

    What people may want to know afterwards is an event, and every sink is told. What happens too often for that is only
    counted: the methods from `data_read` on.
    """

    def __init__(self, sinks: Sequence[Sink], *, meter: Meter | None = None, first_sequence: int = 0) -> None:
        """Without a meter of a run, what is counted is nowhere to be seen."""
        self._sinks = tuple(sinks)
        self._meter = meter or Meter("")
        self._next_sequence = first_sequence
        self._phase_seconds: dict[Phase, float] = {}
        self._has_finished = False
        self._doubts = Doubts()
        self._group_seconds: list[float] = []

    def run_started(self, recipe: Recipe, *, metrics_url: str | None, resumed_step: int = 0) -> None:
        self._tell(
            RunStarted(
                name=recipe.run.name,
                folder=str(recipe.run_folder),
                algorithm=recipe.algorithm.kind,
                steps=recipe.run.steps,
                megarl_version=__version__,
                metrics_url=metrics_url,
                resumed_step=resumed_step,
                recipe=recipe.model_dump(mode="json"),
            )
        )

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Time what the loop does inside; the seconds go with the next finished step."""
        self._tell(PhaseStarted(phase=phase))
        began = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - began
            self._phase_seconds[phase] = self._phase_seconds.get(phase, 0.0) + seconds
            self._tell(PhaseEnded(phase=phase, seconds=seconds))

    def step_finished(self, summary: StepSummary) -> None:
        for text in self._doubts.about(summary):
            self.warned(text)
        phase_seconds, self._phase_seconds = self._phase_seconds, {}
        self._measure_tail()
        self._tell(StepFinished(summary=summary, phase_seconds=phase_seconds))

    def published(self, result: PublishResult) -> None:
        self._tell(Published(result=result))

    def publish_failed(self, version: PolicyVersion, reason: str) -> None:
        self._tell(PublishFailed(version=version, reason=reason))

    def engine_changed(
        self,
        index: int,
        state: str,
        *,
        is_serving: bool,
        is_running: bool,
        version: PolicyVersion,
        address: str,
        reason: str = "",
    ) -> None:
        """An engine came, left or changed its state; not for every publish that reaches it."""
        self._tell(
            EngineChanged(
                index=index,
                state=state,
                is_serving=is_serving,
                is_running=is_running,
                version=version,
                address=address,
                reason=reason,
            )
        )

    def restarted(self, role: str, index: int, reason: str) -> None:
        """A process of a role (`rollout`, `reward`), or all `trainers` together, is started again."""
        self._tell(Restarted(role=role, index=index, reason=reason))

    def evaluated(self, step: int, result: EvalResult) -> None:
        self._tell(Evaluated(step=step, result=result))

    def checkpoint_saved(
        self, step: int, path: Path, *, num_bytes: int, blocking_seconds: float, seconds: float
    ) -> None:
        self._tell(
            CheckpointSaved(
                step=step, path=str(path), num_bytes=num_bytes, blocking_seconds=blocking_seconds, seconds=seconds
            )
        )

    def checkpoint_failed(self, step: int, reason: str) -> None:
        self._tell(CheckpointFailed(step=step, reason=reason))

    def warned(self, text: str) -> None:
        self._tell(Warned(text=text))

    def data_read(self, *, num_prompts: int, num_dropped: int) -> None:
        self._meter.set(names.DATA_PROMPTS, num_prompts)
        self._meter.set(names.DATA_DROPPED, num_dropped)

    def group_generated(self, *, seconds: float, num_rollouts: int, num_tokens: int) -> None:
        """All rollouts of a prompt are there; how long that took, with all waiting and retrying."""
        self._meter.observe(names.GROUP_SECONDS, seconds)
        self._meter.add(names.GENERATED_ROLLOUTS, num_rollouts)
        self._meter.add(names.GENERATED_TOKENS, num_tokens)
        self._group_seconds.append(seconds)

    def request_retried(self, cause: str) -> None:
        """A request is sent again; `cause` is one of a few words, such as an error's class, never a message."""
        self._meter.add(names.RETRIES, 1, cause)

    def scored(self, seconds: float) -> None:
        """One rollout has a score."""
        self._meter.observe(names.REWARD_SECONDS, seconds)

    def score_failed(self, cause: str) -> None:
        """One rollout has none; `cause` is one of a few words."""
        self._meter.add(names.REWARD_FAILURES, 1, cause)

    def watch_queue(
        self, *, num_waiting: Callable[[], int], num_under_way: Callable[[], int], capacity: Callable[[], int]
    ) -> None:
        """Groups between generator and trainer, read whenever somebody looks."""
        self._meter.watch(names.QUEUE, num_waiting)
        self._meter.watch(names.UNDER_WAY, num_under_way)
        self._meter.watch(names.QUEUE_CAPACITY, capacity)

    def watch_requests(self, index: int, num_outstanding: Callable[[], int]) -> None:
        """Requests that an engine works on."""
        self._meter.watch(names.ENGINE_REQUESTS, num_outstanding, str(index))

    def run_finished(self, status: RunStatus, *, reason: str = "") -> None:
        self._has_finished = True
        self._tell(RunFinished(status=status, reason=reason))

    def __enter__(self) -> Observer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._has_finished:
            self.run_finished(_status(error), reason="" if error is None else _reason(error))

    def _measure_tail(self) -> None:
        seconds, self._group_seconds = self._group_seconds, []
        if seconds and (middle := median(seconds)) > 0:
            self._meter.set(names.GROUP_TAIL, max(seconds) / middle)

    def _tell(self, event: Event) -> None:
        record = Record(sequence=self._next_sequence, time=datetime.now(UTC), event=event)
        self._next_sequence += 1
        for sink in self._sinks:
            sink.record(record)


def _status(error: BaseException | None) -> RunStatus:
    match error:
        case None:
            return RunStatus.DONE
        case PreemptedError():
            return RunStatus.PREEMPTED
        case KeyboardInterrupt() | asyncio.CancelledError():
            return RunStatus.INTERRUPTED
        case _:
            return RunStatus.FAILED


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__
