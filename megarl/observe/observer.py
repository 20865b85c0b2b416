"""The one thing the loop tells what happened. Stamps each event and hands it to every sink.

It knows neither what an event means to a sink nor how the loop works; the loop knows no file, port or terminal.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from megarl import __version__
from megarl.config import Recipe
from megarl.errors import PreemptedError
from megarl.observe.doubts import Doubts
from megarl.observe.events import (
    EVENTS_FILE,
    CheckpointFailed,
    CheckpointSaved,
    Evaluated,
    Event,
    EventLog,
    PhaseEnded,
    PhaseStarted,
    Published,
    Record,
    RunFinished,
    RunStarted,
    RunStatus,
    Sink,
    StepFinished,
    Warned,
)
from megarl.observe.folder import retire_earlier_run
from megarl.observe.logs import LOG_FILE, logging_to
from megarl.observe.metrics import Metrics, MetricsEndpoint
from megarl.observe.summary import Phase, StepSummary
from megarl.types import EvalResult, PublishResult


@contextmanager
def observing(
    recipe: Recipe, *, display: Sink, resumed_step: int = 0, is_continued: bool = False
) -> Iterator[Observer]:
    """An observer of one run: its port is open and its folder begun before anything else of the run starts.

    An earlier run of the same name is moved out of the way, unless this one continues it. Leaving records how the run
    ended, unless the run said so itself, and closes everything.
    """
    with ExitStack() as stack:
        metrics = Metrics(recipe.run.name)
        endpoint = None
        if recipe.observe.metrics_port is not None:
            endpoint = MetricsEndpoint(metrics.registry, port=recipe.observe.metrics_port)
            stack.callback(endpoint.close)
        retired = None if is_continued else retire_earlier_run(recipe.run_folder)
        log = EventLog(recipe.run_folder / EVENTS_FILE)
        stack.callback(log.close)
        stack.enter_context(logging_to(recipe.run_folder / LOG_FILE))
        stack.callback(display.close)
        sinks = (log, metrics, display)
        with Observer(sinks, first_sequence=log.next_sequence) as observer:
            observer.run_started(recipe, metrics_url=endpoint.url if endpoint else None, resumed_step=resumed_step)
            if retired is not None:
                observer.warned(f"an earlier run of this name is now {retired}")
            yield observer


class Observer:
    """Used from one thread. As a context it says, on the way out, how the run ended."""

    def __init__(self, sinks: Sequence[Sink], *, first_sequence: int = 0) -> None:
        self._sinks = tuple(sinks)
        self._next_sequence = first_sequence
        self._phase_seconds: dict[Phase, float] = {}
        self._has_finished = False
        self._doubts = Doubts()

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
        self._tell(StepFinished(summary=summary, phase_seconds=phase_seconds))

    def published(self, result: PublishResult) -> None:
        self._tell(Published(result=result))

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
