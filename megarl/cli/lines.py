"""A run in lines of text, one per step and one per event that matters to people, and the console that they go to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from functools import singledispatch

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from megarl.env import NO_COLOR
from megarl.observe.events import (
    CheckpointFailed,
    CheckpointSaved,
    EngineChanged,
    Evaluated,
    Event,
    Noted,
    PublishFailed,
    Record,
    Restarted,
    RunFinished,
    RunStarted,
    StepFinished,
    Straggled,
    Warned,
)
from megarl.observe.progress import Progress, advance, describe_cost
from megarl.observe.summary import StepSummary
from megarl.results import EvalResult
from megarl.system.secret import as_entry, masked, printable


class _LastingConsole(Console):
    """A console whose reader may leave, as `head` does: a run goes on without it. Texts cannot control the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))

    def on_broken_pipe(self) -> None:
        with suppress(SystemExit):
            super().on_broken_pipe()


def make_console(width: int | None = None) -> Console:
    """Return a console whose lines wrap where the terminal ends, or tables at `width`."""
    return _LastingConsole(
        width=width, no_color=bool(NO_COLOR.read()), highlight=False, markup=False, soft_wrap=width is None
    )


class PlainDisplay:
    """One line per step, and one per event that matters to people."""

    def __init__(self, console: Console, policy: str = "") -> None:
        self._console = console
        self._begin = f"{policy}: " if policy else ""
        """Begins every line, where there are several policies."""
        self._progress = Progress()

    def record(self, record: Record) -> None:
        self._progress = advance(self._progress, record)
        match record.event:
            case StepFinished():
                text = f"step {step_text(self._progress)}  {numbers_text(self._progress)}"
                self._console.print(f"{self._begin}{text}")
            case _:
                line = describe(record)
                if line is not None:
                    self._console.print(f"{self._begin}{line}")

    def close(self) -> None:
        """Every line is written when it comes."""


def progress_lines(progress: Progress) -> list[str]:
    """Return where a run stands, as lines of text."""
    phase = "start" if progress.phase is None else progress.phase
    numbers = numbers_text(progress)
    return [f"step {step_text(progress)}  {phase}", *([numbers] if numbers else [])]


def describe(record: Record) -> str | None:
    """Return the line that stays on the screen for an event, or None for an event that only moves the view."""
    line = _line(record.event)
    return None if line is None else as_entry(masked(line))


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


def step_text(progress: Progress) -> str:
    return f"{progress.step}/{progress.steps}"


def phase_text(progress: Progress, *, now: datetime) -> str:
    if progress.phase is None or progress.phase_began is None:
        return "start"
    return f"{progress.phase} {format_seconds((now - progress.phase_began).total_seconds())}"


def numbers_text(progress: Progress) -> str:
    summary = progress.summary
    parts = [] if summary is None else [*_rollout_numbers(summary), *_update_numbers(summary)]
    if progress.evaluation is not None:
        name, value = next(iter(progress.evaluation.numbers.items()))
        parts.append(f"{name} {value:.3f}")
    if summary is not None:
        parts += [f"{summary.tokens_per_second:,.0f} tokens/s", *_computed(summary), f"{summary.seconds:.1f} s"]
    if progress.eta_s is not None:
        parts.append(f"ETA {format_seconds(progress.eta_s)}")
    return "  ".join([*parts, *_cost(progress)])


def _computed(summary: StepSummary) -> Iterator[str]:
    """Yield the share of the trained tokens that were computed, where rows shared some."""
    ratio = summary.computed_ratio
    if ratio is not None and ratio < 1:
        yield f"{ratio:.0%} computed"


def _cost(progress: Progress) -> Iterator[str]:
    usage, projected = progress.usage, progress.projected_gpu_hours
    if usage.num_gpus and projected is not None:
        price = usage.hour_price
        yield f"{describe_cost(usage.gpu_hours, price)} of {describe_cost(projected, price)}"


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
    if summary.draft is not None:
        yield f"draft loss {summary.draft.loss:.4f}"
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


def format_number(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if value == 0 or abs(value) >= 0.001:
        return f"{value:.3f}"
    return f"{value:.1e}"
