"""The display of a run: live on a terminal or in a notebook, plain lines elsewhere; a progress bar of long reads."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import singledispatch
from threading import Lock
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.logging import RichHandler
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bars
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from megarl.env import NO_COLOR
from megarl.observe.events import (
    CheckpointFailed,
    CheckpointSaved,
    EngineChanged,
    Evaluated,
    Event,
    Noted,
    Progress,
    PublishFailed,
    Record,
    Restarted,
    RunFinished,
    RunStarted,
    Sink,
    StepFinished,
    Straggled,
    Warned,
    advance,
)
from megarl.observe.summary import StepSummary
from megarl.results import EvalResult
from megarl.system.secret import masked

REFRESHES_PER_SECOND = 4
BAR_WIDTH = 30
_MAX_LINES = 12
"""Lines that stay visible above the progress."""


class _LastingConsole(Console):
    """A console whose reader may leave, as `head` does: a run goes on without it."""

    def on_broken_pipe(self) -> None:
        with suppress(SystemExit):
            super().on_broken_pipe()


def make_console(width: int | None = None) -> Console:
    """Return a console whose lines wrap where the terminal ends, or tables at `width`."""
    return _LastingConsole(
        width=width, no_color=bool(NO_COLOR.read()), highlight=False, markup=False, soft_wrap=width is None
    )


def show_warnings(console: Console) -> None:
    """Print warnings that libraries log above the live view."""
    handler = RichHandler(logging.WARNING, console=console, show_time=False, show_path=False)
    logging.getLogger().addHandler(handler)


def make_display(console: Console) -> Sink:
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveDisplay(console)
    return PlainDisplay(console)


class PlainDisplay:
    """One line per step, and one per event that matters to people."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress()

    def record(self, record: Record) -> None:
        self._progress = advance(self._progress, record)
        match record.event:
            case StepFinished():
                self._console.print(f"step {_step(self._progress)}  {_numbers(self._progress)}")
            case _:
                line = describe(record)
                if line is not None:
                    self._console.print(line)

    def close(self) -> None:
        """Every line is written when it comes."""


class LiveDisplay:
    """Steps and phases change in place; lines that stay scroll above them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress()
        self._spinner = Spinner("dots")
        # Transient: the report replaces it.
        self._live = Live(
            console=console,
            get_renderable=self._render,
            refresh_per_second=REFRESHES_PER_SECOND,
            transient=True,
        )

    def record(self, record: Record) -> None:
        self._progress = advance(self._progress, record)
        line = describe(record)
        if line is not None:
            self._console.print(line)
        if isinstance(record.event, RunStarted):
            self._live.start()

    def close(self) -> None:
        self._live.stop()

    def _render(self) -> Group:
        progress = self._progress
        line = Table.grid(padding=(0, 1))
        line.add_row(
            self._spinner,
            Text(f"step {_step(progress)}", style="bold"),
            ProgressBar(total=max(1, progress.steps), completed=progress.step, width=BAR_WIDTH),
            Text(_phase(progress, now=datetime.now(UTC)), style="cyan"),
        )
        return Group(line, Text(_numbers(progress), no_wrap=True, overflow="ellipsis"))


def progress_lines(progress: Progress) -> list[str]:
    """Return where a run stands, as lines of text."""
    phase = "start" if progress.phase is None else progress.phase
    numbers = _numbers(progress)
    return [f"step {_step(progress)}  {phase}", *([numbers] if numbers else [])]


def describe(record: Record) -> str | None:
    """Return the line that stays on the screen for an event, or None for an event that only moves the view."""
    line = _line(record.event)
    return None if line is None else masked(line)


@singledispatch
def _line(_event: Event) -> str | None:
    return None


@_line.register
def _(event: RunStarted) -> str:
    metrics = f"  metrics {event.metrics_url}" if event.metrics_url else ""
    resumed = f", resumed after step {event.resumed_step}" if event.resumed_step else ""
    return f"run {event.name}: {event.algorithm}, {event.steps} steps{resumed}, in {event.folder}{metrics}"


@_line.register
def _(event: Evaluated) -> str:
    return f"evaluated after step {event.step}: {_evaluation(event.result)}{_versions(event.result)}"


@_line.register
def _(event: CheckpointSaved) -> str:
    return f"saved {event.path} in {event.seconds:.1f} s, {event.blocking_seconds:.2f} s of it blocking"


@_line.register
def _(event: CheckpointFailed) -> str:
    return f"warning: step {event.step} was not saved: {event.reason}"


@_line.register
def _(event: PublishFailed) -> str:
    return f"warning: version {event.version} was not published: {event.reason}"


@_line.register
def _(event: EngineChanged) -> str | None:
    return f"engine {event.index} is {event.state}: {event.reason}" if event.reason else None


@_line.register
def _(event: Restarted) -> str:
    if event.role == "trainers":
        return f"warning: all trainer ranks restart {event.reason}"
    return f"{event.role} {event.index} restarts: {event.reason}"


@_line.register
def _(event: Noted) -> str:
    return event.text


@_line.register
def _(event: Straggled | Warned) -> str:
    return f"warning: {event.text}"


@_line.register
def _(event: RunFinished) -> str:
    return f"run {event.status}"


def _evaluation(result: EvalResult) -> str:
    """Return `accuracy 0.875 of 64 prompts  pass@8 0.953`, with the score where it differs from the accuracy."""
    numbers = result.numbers
    parts = [
        f"{name} {value:.3f}" for name, value in numbers.items() if name != "score" or value != numbers["accuracy"]
    ]
    if result.main is not None:
        parts[0] += f" of {result.main.overall.num_prompts} prompts"
    return "  ".join(parts)


def _versions(result: EvalResult) -> str:
    """Return the range of versions where more than one policy answered, else an empty text."""
    newest = result.newest_version
    return "" if newest is None else f"  by versions {result.version} to {newest}"


def _step(progress: Progress) -> str:
    return f"{progress.step}/{progress.steps}"


def _phase(progress: Progress, *, now: datetime) -> str:
    if progress.phase is None or progress.phase_began is None:
        return "start"
    return f"{progress.phase} {format_seconds((now - progress.phase_began).total_seconds())}"


def _numbers(progress: Progress) -> str:
    summary = progress.summary
    parts = [] if summary is None else [*_rollout_numbers(summary), *_update_numbers(summary)]
    if progress.evaluation is not None:
        name, value = next(iter(progress.evaluation.numbers.items()))
        parts.append(f"{name} {value:.3f}")
    if summary is not None:
        parts += [f"{summary.tokens_per_second:,.0f} tokens/s", f"{summary.seconds:.1f} s"]
    if progress.eta_s is not None:
        parts.append(f"ETA {format_seconds(progress.eta_s)}")
    return "  ".join(parts)


def _rollout_numbers(summary: StepSummary) -> Iterator[str]:
    rollouts, flow = summary.rollouts, summary.flow
    if rollouts is not None:
        yield f"reward {rollouts.reward_mean:.3f}"
        if not rollouts.has_signal:
            yield "no signal"
        if rollouts.num_dropped_groups:
            yield f"dropped {rollouts.num_dropped_groups} groups"
    if flow is not None and flow.age_max:
        yield f"age {flow.age_mean:.2f} (at most {flow.age_max})"


def _update_numbers(summary: StepSummary) -> Iterator[str]:
    if summary.update is not None:
        yield f"loss {summary.update.loss:.4f}"
    if summary.critic is not None:
        yield f"value loss {summary.critic.loss:.4f}"
    if summary.preference is not None:
        yield f"pairs right {summary.preference.accuracy:.2f}"


def format_seconds(seconds: float) -> str:
    """Return at most two units: 45s, 3m20s, 2h05m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


class ByteCounter:
    """Counts bytes from several threads; called with the size of every chunk."""

    def __init__(self, bars: Bars, text: str, *, total_bytes: int | None) -> None:
        self._bars = bars
        self._task = bars.add_task(text, total=total_bytes)
        self._lock = Lock()
        self._began = time.monotonic()
        self.num_bytes = 0

    def __call__(self, num_bytes: int) -> None:
        with self._lock:
            self.num_bytes += num_bytes
            self._bars.update(self._task, completed=self.num_bytes)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    @property
    def rate(self) -> str:
        return f"{self.num_bytes / 1e9 / max(self.seconds, 1e-9):.2f} GB/s"


@contextmanager
def count_bytes(console: Console, text: str, *, total_bytes: int | None = None) -> Iterator[ByteCounter]:
    """Yield a counter; on a terminal, show a bar with its rate until the block ends."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    is_shown = console.is_terminal and not console.is_dumb_terminal
    with Bars(*columns, console=console, transient=True, disable=not is_shown) as bars:
        yield ByteCounter(bars, text, total_bytes=total_bytes)


class Output(Protocol):
    """IPython's handle of an output that can be replaced."""

    def update(self, shown: object) -> None: ...


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    return "ipykernel" in sys.modules and "IPython" in sys.modules


class NotebookDisplay:
    """The last lines and the numbers of the last step."""

    def __init__(self, output: Output | None = None) -> None:
        self._output = output or _open_output()
        self._progress = Progress()
        self._lines: list[str] = []

    def record(self, record: Record) -> None:
        self._progress = advance(self._progress, record)
        line = describe(record)
        if line is not None:
            self._lines = [*self._lines, line][-_MAX_LINES:]
        text = "\n".join([*self._lines, *progress_lines(self._progress)])
        self._output.update({"text/plain": text})

    def close(self) -> None:
        """The output stays as it is."""


def _open_output() -> Output:
    from IPython.display import display

    class Raw:
        def __init__(self) -> None:
            self._handle = display({"text/plain": ""}, raw=True, display_id=True)

        def update(self, shown: object) -> None:
            self._handle.update(shown, raw=True)

    return Raw()


def format_number(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if value == 0 or abs(value) >= 0.001:
        return f"{value:.3f}"
    return f"{value:.1e}"
