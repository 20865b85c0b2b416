"""How a run looks to a person: a live view on a terminal, plain lines anywhere else. A sink of the run's records."""

from __future__ import annotations

import logging
from datetime import UTC, datetime

from rich.console import Console, Group
from rich.live import Live
from rich.logging import RichHandler
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
    PublishFailed,
    Record,
    Restarted,
    RunFinished,
    RunStarted,
    Sink,
    StepFinished,
    Warned,
)
from megarl.observe.history import Progress, advance
from megarl.results import EvalResult
from megarl.system.secret import masked

REFRESHES_PER_SECOND = 4
BAR_WIDTH = 30


def make_console() -> Console:
    return Console(no_color=bool(NO_COLOR.read()), highlight=False, markup=False, soft_wrap=True)


def show_warnings(console: Console) -> None:
    """What any library logs as a warning appears above the live view, not through it."""
    handler = RichHandler(logging.WARNING, console=console, show_time=False, show_path=False)
    logging.getLogger().addHandler(handler)


def make_display(console: Console) -> Sink:
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveDisplay(console)
    return PlainDisplay(console)


class PlainDisplay:
    """One line per step, and one for everything else worth knowing."""

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
        """Nothing is held back: every line was written when it came."""


class LiveDisplay:
    """Steps and phases move in place; what should stay readable scrolls by above them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress()
        self._spinner = Spinner("dots")
        # Transient: the report takes its place.
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


def describe(record: Record) -> str | None:
    """The line for an event that stays on the screen in either display; None for those that only move the view."""
    line = _line(record)
    return None if line is None else masked(line)


def _line(record: Record) -> str | None:  # noqa: C901
    match record.event:
        case RunStarted(
            name=name, algorithm=algorithm, steps=steps, folder=folder, metrics_url=url, resumed_step=resumed_step
        ):
            metrics = f"  metrics {url}" if url else ""
            resumed = f", going on after step {resumed_step}" if resumed_step else ""
            return f"run {name}: {algorithm}, {steps} steps{resumed}, in {folder}{metrics}"
        case Evaluated(step=step, result=result):
            return f"evaluated after step {step}: {_evaluation(result)}{_versions(result)}"
        case CheckpointSaved() as saved:
            return f"saved {saved.path} in {saved.seconds:.1f} s, {saved.blocking_seconds:.2f} s of it blocking"
        case CheckpointFailed(step=step, reason=reason):
            return f"warning: step {step} was not saved: {reason}"
        case PublishFailed(version=version, reason=reason):
            return f"warning: version {version} was not published: {reason}"
        case EngineChanged(index=index, state=state, reason=reason) if reason:
            return f"engine {index} is {state}: {reason}"
        case Restarted(role="trainers", reason=reason):
            return f"warning: all trainer ranks start again {reason}"
        case Restarted(role=role, index=index, reason=reason):
            return f"{role} {index} is started again: {reason}"
        case Warned(text=text):
            return f"warning: {text}"
        case RunFinished(status=status):
            return f"run {status}"
        case _:
            return None


def _evaluation(result: EvalResult) -> str:
    """`accuracy 0.875 of 64 prompts  pass@8 0.953`; the score only where it is another number than the accuracy."""
    accuracy, score = result.accuracy, result.numbers["score"]
    parts = [f"accuracy {accuracy:.3f} of {result.main.overall.num_prompts} prompts"]
    parts += [
        f"{name} {value:.3f}"
        for name, value in result.numbers.items()
        if name != "accuracy" and (name != "score" or score != accuracy)
    ]
    return "  ".join(parts)


def _versions(result: EvalResult) -> str:
    """Where more than one policy answered."""
    newest = result.newest_version
    return "" if newest is None else f"  by versions {result.version} to {newest}"


def _step(progress: Progress) -> str:
    return f"{progress.step}/{progress.steps}"


def _phase(progress: Progress, *, now: datetime) -> str:
    if progress.phase is None or progress.phase_began is None:
        return "start"
    return f"{progress.phase} {format_seconds((now - progress.phase_began).total_seconds())}"


def _numbers(progress: Progress) -> str:  # noqa: C901
    parts: list[str] = []
    summary = progress.summary
    if summary is not None:
        if summary.rollouts is not None:
            parts.append(f"reward {summary.rollouts.reward_mean:.3f}")
            if not summary.rollouts.has_signal:
                parts.append("no signal")
            if summary.rollouts.num_dropped_groups:
                parts.append(f"dropped {summary.rollouts.num_dropped_groups} groups")
        if summary.flow is not None and summary.flow.age_max:
            parts.append(f"age {summary.flow.age_mean:.2f} (at most {summary.flow.age_max})")
        if summary.update is not None:
            parts.append(f"loss {summary.update.loss:.4f}")
        if summary.critic is not None:
            parts.append(f"value loss {summary.critic.loss:.4f}")
    if progress.evaluation is not None:
        parts.append(f"accuracy {progress.evaluation.accuracy:.3f}")
    if summary is not None:
        parts.append(f"{summary.tokens_per_second:,.0f} tokens/s")
        parts.append(f"{summary.seconds:.1f} s")
    if progress.eta_s is not None:
        parts.append(f"ETA {format_seconds(progress.eta_s)}")
    return "  ".join(parts)


def format_seconds(seconds: float) -> str:
    """Two units at most: 45s, 3m20s, 2h05m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
