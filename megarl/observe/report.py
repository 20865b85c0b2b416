"""The report of a run, one table and one picture, from its `events.jsonl`.

The only module that imports matplotlib: import it where a report is made, not at the top of a command.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megarl.observe.event_file import EVENTS_FILE, read_events
from megarl.observe.history import History, Series, fold_history

CURVES_FILE = "curves.png"
WIDTH_PX = 1600
PANEL_HEIGHT_PX = 500
DOTS_PER_INCH = 160
MAX_MARKERS = 40

# Okabe and Ito's palette: distinguishable with every common colour blindness, and in grey.
BLUE = "#0072B2"
VERMILLION = "#D55E00"
GREEN = "#009E73"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRow:
    """One number of the table."""

    name: str
    first: float
    last: float
    best: float | None
    """None if neither more nor less is better."""
    best_step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    rows: tuple[ReportRow, ...]
    curves: Path


_LOWER = ("held_out_loss", "perplexity")
"""Numbers of an evaluation that should fall."""


def make_report(run_folder: Path) -> RunReport:
    """Tabulate the events of a run and draw `curves.png` next to them."""
    history = fold_history(read_events(run_folder / EVENTS_FILE))
    curves = run_folder / CURVES_FILE
    draw_curves(history, curves)
    return RunReport(rows=tabulate(history), curves=curves)


def tabulate(history: History) -> tuple[ReportRow, ...]:
    evaluated = [
        name for name in (history.evaluations[-1][1].numbers if history.evaluations else ()) if name != "score"
    ]
    rows = (
        *(_row(name, history.of_evaluations(name), best=min if name in _LOWER else max) for name in evaluated),
        _row("reward", history.reward, best=max),
        # The size of a policy-gradient loss means nothing; the loss of a run without rewards should fall.
        _row("loss", history.loss, best=None if history.reward else min),
        _row("entropy", history.of_updates(lambda update: update.entropy), best=None),
        _row("response tokens", history.of_rollouts(lambda rollouts: rollouts.response_tokens_mean), best=None),
        _row("tokens/s", history.of_steps(lambda summary: summary.tokens_per_second), best=max),
        _row("engines idle (share)", history.of_idle("rollout"), best=min),
        _row("trainer idle (share)", history.of_idle("trainer"), best=min),
    )
    return tuple(row for row in rows if row is not None)


def _row(name: str, series: Series, *, best: Callable[[Sequence[float]], float] | None) -> ReportRow | None:
    if not series:
        return None
    value = None if best is None else best(series.values)
    return ReportRow(
        name=name,
        first=series.values[0],
        last=series.values[-1],
        best=value,
        best_step=None if value is None else series.steps[series.values.index(value)],
    )


def draw_curves(history: History, path: Path) -> None:
    """Draw reward (or, without rewards, loss) and accuracy over the steps, one panel each."""
    panels = [panel for panel in _panels(history) if panel.series]
    height_px = PANEL_HEIGHT_PX * max(1, len(panels))
    figure = Figure(
        figsize=(WIDTH_PX / DOTS_PER_INCH, height_px / DOTS_PER_INCH), dpi=DOTS_PER_INCH, layout="constrained"
    )
    # Agg draws without a display and without matplotlib's global state.
    FigureCanvasAgg(figure)
    figure.suptitle(history.run, fontweight="bold")
    if not panels:
        figure.text(0.5, 0.5, "no step was finished", ha="center", va="center")
    last_step = max((panel.series.steps[-1] for panel in panels), default=0)
    for index, panel in enumerate(panels):
        axes = figure.add_subplot(len(panels), 1, index + 1)
        _draw_panel(axes, panel, last_step=max(1, last_step))
        if index == len(panels) - 1:
            axes.set_xlabel("step")
    figure.savefig(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Panel:
    label: str
    series: Series
    colour: str
    is_share: bool
    """Drawn from 0 to 1 even if the values span less, so that changes are not exaggerated."""


def _panels(history: History) -> tuple[_Panel, _Panel]:
    accuracy = _Panel(label="accuracy (held out)", series=history.accuracy, colour=VERMILLION, is_share=True)
    if not history.accuracy:
        held_out = history.of_evaluations("held_out_loss")
        accuracy = _Panel(label="loss (held out)", series=held_out, colour=VERMILLION, is_share=False)
    if history.reward:
        return _Panel(label="mean reward", series=history.reward, colour=BLUE, is_share=False), accuracy
    return _Panel(label="loss", series=history.loss, colour=GREEN, is_share=False), accuracy


def _draw_panel(axes: Axes, panel: _Panel, *, last_step: int) -> None:
    steps, values = panel.series.steps, panel.series.values
    axes.set_xlim(0, last_step)
    if panel.is_share:
        axes.set_ylim(min(0.0, *values), max(1.0, *values))
    marker = "o" if len(steps) <= MAX_MARKERS else ""
    axes.plot(steps, values, color=panel.colour, linewidth=1.8, marker=marker, markersize=4, clip_on=False)
    axes.annotate(
        f"{values[-1]:.3f}",
        (steps[-1], values[-1]),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        color=panel.colour,
        fontweight="bold",
        annotation_clip=False,
    )
    axes.set_ylabel(panel.label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.grid(visible=True, alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
