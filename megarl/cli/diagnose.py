"""`megarl diagnose`: what is wrong with a recipe that runs."""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from megarl.cli.recipes import Overrides, RecipePath, load_checked
from megarl.config import Recipe
from megarl.env import NO_COLOR
from megarl.errors import NumericsError

if TYPE_CHECKING:
    from megarl.tools.diagnose.diagnosis import Diagnosis, SiteError

diagnose_app = typer.Typer(no_args_is_help=True, help="Find out why.")

_WIDTH = 100
_NUM_NEIGHBOURS = 4
"""Modules that are shown before and after the one in question."""
_NUM_LAST = 3
"""The final norm and both kinds of log-probabilities are always shown."""


@diagnose_app.command("mismatch")
def mismatch(
    recipe: RecipePath,
    overrides: Overrides = None,
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Compare on this user message.", show_default=False)
    ] = None,
    row: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Compare on prompt N of data.train; without both, on prompt 0."),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="With the weights of this checkpoint instead of model.path."),
    ] = None,
    is_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON in the last line too.")] = False,
) -> None:
    """Compare trainer and engine module by module on one prompt and a few sampled tokens.

    Exit code 0 where nothing differs, 77 where something does.
    """
    if prompt is not None and row is not None:
        raise typer.BadParameter("name a --prompt or a --row, not both")
    checked = load_checked(recipe, overrides)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")

    from megarl.tools.diagnose import launch

    found = launch.diagnose(
        checked, question=prompt if prompt is not None else row or 0, checkpoint=checkpoint, on_start=_say_what_starts
    )
    print_diagnosis(found)
    if is_json:
        print(json.dumps(to_json(found)))
    if found.first is not None or found.differing_tensors:
        raise typer.Exit(NumericsError.exit_code)


def _say_what_starts(recipe: Recipe, notes: Sequence[str]) -> None:
    actor, rollout = recipe.roles.actor, recipe.roles.rollout
    assert rollout is not None
    print(
        f"starting {actor.model_parallel} trainer rank(s) and an engine of tensor {rollout.tensor}; "
        f"logs and recordings: {recipe.run_folder}"
    )
    for note in notes:
        print(f"note: {note}")


def print_diagnosis(found: Diagnosis) -> None:
    talk = found.conversation
    title = f"{len(talk.prompt_ids)} prompt tokens, {len(talk.response_ids)} sampled, temperature {talk.temperature:g}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("module", "error", "tolerance", "at token", ""):
        table.add_column(name, justify="left" if name in ("module", "") else "right")
    shown = shown_rows(found)
    for place, index in enumerate(shown):
        if place and index != shown[place - 1] + 1:
            table.add_row("...")
        error = found.errors[index]
        mark = "first to differ" if error is found.first else "differs" if error.is_beyond else ""
        table.add_row(error.site.name, f"{error.error:.1e}", f"{error.tolerance:.0e}", str(error.token), mark)
    Console(width=_WIDTH, no_color=bool(NO_COLOR.read()), highlight=False, markup=False).print(table)
    print(found.sentence)


def shown_rows(found: Diagnosis) -> list[int]:
    """The neighbourhood of the first module that differs, or of the one that comes closest to it; and the end."""
    errors = found.errors
    centre = max(range(len(errors)), key=lambda index: _share_of_tolerance(errors[index]))
    if found.first is not None:
        centre = errors.index(found.first)
    near = range(max(0, centre - _NUM_NEIGHBOURS), min(len(errors), centre + _NUM_NEIGHBOURS + 1))
    return sorted({*near, *range(max(0, len(errors) - _NUM_LAST), len(errors))})


def _share_of_tolerance(error: SiteError) -> float:
    return error.error / error.tolerance if math.isfinite(error.error) else math.inf


def to_json(found: Diagnosis) -> dict[str, object]:
    first = found.first
    return {
        "verdict": found.verdict.value,
        "sentence": found.sentence,
        "first": None if first is None else _site_json(first),
        "differing_tensors": list(found.differing_tensors),
        "num_prompt_tokens": len(found.conversation.prompt_ids),
        "num_sampled_tokens": len(found.conversation.response_ids),
        "modules": [_site_json(error) for error in found.errors],
    }


def _site_json(error: SiteError) -> dict[str, object]:
    return {
        "module": error.site.name,
        # JSON has no word for what is not a number.
        "error": error.error if math.isfinite(error.error) else str(error.error),
        "tolerance": error.tolerance,
        "token": error.token,
        "weights": list(error.site.weights),
    }
