"""`megarl train`: run a recipe to its end, and print the table of its results."""

from __future__ import annotations

import json
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from megarl.cli.recipe import Overrides, RecipePath, load_checked, telling_rows
from megarl.config.lora import ADAPTER_CONFIG_FILE
from megarl.errors import FinishedError

if TYPE_CHECKING:
    from rich.console import Console

    from megarl.observe.report import RunReport


_ProfiledSteps = Annotated[
    list[int] | None,
    typer.Option(
        metavar="STEP",
        min=1,
        help="Write torch's trace of this step, and a snapshot of memory. May be repeated.",
        show_default=False,
    ),
]
_ProfiledRanks = Annotated[
    list[int] | None,
    typer.Option(
        metavar="RANK", min=0, help="The actor's rank to profile, instead of 0. May be repeated.", show_default=False
    ),
]


def train(
    recipe: RecipePath,
    overrides: Overrides = None,
    resume: Annotated[
        str,
        typer.Option(
            metavar="auto|never|PATH",
            help="Resume from the run's newest checkpoint, start anew, or resume from the checkpoint at PATH.",
        ),
    ] = "auto",
    allows_data_change: Annotated[
        bool, typer.Option("--allow-data-change", help="Resume with other prompts than those of the checkpoint.")
    ] = False,
    overrides_fit: Annotated[
        bool,
        typer.Option("--override-fit", help="Start even if the run does not fit its GPUs by `megarl plan`."),
    ] = False,
    profile: _ProfiledSteps = None,
    profile_rank: _ProfiledRanks = None,
    timeline: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write when each role and each Ray task was busy, as a Perfetto trace."),
    ] = None,
) -> None:
    """Run a recipe to its end. A stopped run resumes from its newest checkpoint."""
    if profile:
        chosen = {"steps": profile, "ranks": profile_rank or [0]}
        overrides = [*(overrides or []), f"observe.profile={json.dumps(chosen)}"]
    checked = load_checked(recipe, overrides, downloads=True)
    ignore_warnings()

    from megarl.cli.display import make_display, show_warnings
    from megarl.cli.lines import PlainDisplay, make_console
    from megarl.cli.run_folder import traced
    from megarl.run import launch

    console = make_console()
    show_warnings(console)
    console.print(f"{recipe}: checking model, data and reward")
    try:
        told = telling_rows(console.print, every_s=5.0 if console.is_terminal else 30.0)
        with told, traced(checked.run_folder, timeline) as tasks_file:
            launch.train(
                checked,
                display=make_display(console),
                display_of=partial(PlainDisplay, console),
                resume=_resume_choice(resume),
                allows_data_change=allows_data_change,
                overrides_fit=overrides_fit,
                tasks_file=tasks_file,
                notify=lambda text: console.print(f"warning: {text}"),
            )
    except FinishedError as error:
        console.print(str(error))
    from megarl.observe.report import make_report  # draws: a start need not wait for it

    for each in checked.by_policy().values() or (checked,):
        print_report(make_report(each.run_folder), console)
        print_next(each.run_folder, console)


def ignore_warnings() -> None:
    """Hide warnings of libraries on import, which are for developers; -W shows them."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")


def _resume_choice(text: str) -> Path | Literal["auto", "never"]:
    match text:
        case "auto" | "never":
            return text
        case _:
            return Path(text)


def print_report(report: RunReport, console: Console) -> None:
    from rich.table import Table

    from megarl.cli.lines import format_number

    table = Table("", "first", "last", "best", "best at step")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in report.rows:
        best = ("", "") if row.best is None else (format_number(row.best), str(row.best_step))
        table.add_row(row.name, format_number(row.first), format_number(row.last), *best)
    console.print(table)
    console.print(f"curves: {report.curves}")


def print_next(run: Path, console: Console) -> None:
    """Print what people do with a run that is done."""
    model = run / "checkpoints" / "latest" / "model"
    lines = [
        ("curves, timeline and rollouts in a browser", f"megarl view {run}"),
        ("wrong answers of the last evaluation", f"megarl samples {run} --wrong"),
        ("what to change if it did not learn", f"megarl doctor {run}"),
    ]
    if (model / ADAPTER_CONFIG_FILE).exists():
        lines += [
            ("the adapter, as PEFT loads it", str(model)),
            ("the whole model, in Hugging Face format", f"megarl export --merge {run} OUT"),
        ]
    elif model.exists():
        lines += [
            ("the model, in Hugging Face format", str(model)),
            ("in another place or dtype", f"megarl export {run}"),
        ]
    width = max(len(text) for text, _ in lines)
    console.print("\n".join(["what next", *(f"  {text:<{width}}  {command}" for text, command in lines)]))
