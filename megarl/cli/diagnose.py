"""`megarl diagnose`: find out why a recipe that runs does not learn."""

from __future__ import annotations

import json
import math
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from megarl.cli.recipe import Overrides, RecipePath, load_checked
from megarl.env import NO_COLOR
from megarl.errors import NumericsError

if TYPE_CHECKING:
    from megarl.tools.small_recipe import SmallRecipe
    from megarl.weights.diagnosis import Diagnosis, HookPointError

diagnose_app = typer.Typer(no_args_is_help=True, help="Find out why trainer and engines differ.")

_WIDTH = 100
_NUM_NEIGHBOURS = 4
"""Modules shown before and after the first one that differs."""
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
        typer.Option(metavar="N", min=0, help="Compare on prompt N of data.train, counted from 0 (default 0)."),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Use the weights of this checkpoint instead of model.path."),
    ] = None,
    is_json: Annotated[bool, typer.Option("--json", help="Also print everything as JSON, in the last line.")] = False,
) -> None:
    """Compare trainer and engine module by module.

    Both compute the same prompt and a few sampled tokens.

    Exits with 0 where nothing differs, with 77 where something does.
    """
    if prompt is not None and row is not None:
        raise typer.BadParameter("name a --prompt or a --row, not both")
    checked = load_checked(recipe, overrides)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")

    from megarl.run.launch import ray_address_of, ray_environment

    address = ray_address_of(checked.run)
    with ray_environment(address, checked.cluster):
        from megarl.tools.diagnose.run import diagnose_recipe

        diagnosis = diagnose_recipe(
            checked,
            question=prompt if prompt is not None else row or 0,
            checkpoint=checkpoint,
            ray_address=address,
            on_start=_print_start,
        )
    print_diagnosis(diagnosis)
    if is_json:
        print(json.dumps(to_json(diagnosis)))
    if diagnosis.first is not None or diagnosis.differing_tensors:
        raise typer.Exit(NumericsError.exit_code)


def _print_start(small: SmallRecipe) -> None:
    actor, rollout = small.recipe.roles.actor, small.recipe.roles.rollout
    assert rollout is not None
    print(
        f"starting {actor.model_parallel} trainer rank(s) and an engine of tensor {rollout.tensor}; "
        f"logs and recordings: {small.recipe.run_folder}"
    )
    for note in small.notes:
        print(f"note: {note}")


def print_diagnosis(diagnosis: Diagnosis) -> None:
    talk = diagnosis.conversation
    title = f"{len(talk.prompt_ids)} prompt tokens, {len(talk.response_ids)} sampled, temperature {talk.temperature:g}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("module", "error", "tolerance", "at token", ""):
        table.add_column(name, justify="left" if name in ("module", "") else "right")
    shown = shown_rows(diagnosis)
    for place, index in enumerate(shown):
        if place and index != shown[place - 1] + 1:
            table.add_row("...")
        error = diagnosis.errors[index]
        mark = "first to differ" if error is diagnosis.first else "differs" if error.is_beyond else ""
        table.add_row(error.point.name, f"{error.error:.1e}", f"{error.tolerance:.0e}", str(error.token), mark)
    Console(width=_WIDTH, no_color=bool(NO_COLOR.read()), highlight=False, markup=False).print(table)
    print(diagnosis.sentence)


def shown_rows(diagnosis: Diagnosis) -> list[int]:
    """Return the rows around the first module that differs, or else the one closest to it, and the last rows."""
    errors = diagnosis.errors
    centre = max(range(len(errors)), key=lambda index: _share_of_tolerance(errors[index]))
    if diagnosis.first is not None:
        centre = errors.index(diagnosis.first)
    near = range(max(0, centre - _NUM_NEIGHBOURS), min(len(errors), centre + _NUM_NEIGHBOURS + 1))
    return sorted({*near, *range(max(0, len(errors) - _NUM_LAST), len(errors))})


def _share_of_tolerance(error: HookPointError) -> float:
    return error.error / error.tolerance if math.isfinite(error.error) else math.inf


def to_json(diagnosis: Diagnosis) -> dict[str, object]:
    first = diagnosis.first
    return {
        "verdict": diagnosis.verdict.value,
        "sentence": diagnosis.sentence,
        "first": None if first is None else _point_json(first),
        "differing_tensors": list(diagnosis.differing_tensors),
        "num_prompt_tokens": len(diagnosis.conversation.prompt_ids),
        "num_sampled_tokens": len(diagnosis.conversation.response_ids),
        "modules": [_point_json(error) for error in diagnosis.errors],
    }


def _point_json(error: HookPointError) -> dict[str, object]:
    return {
        "module": error.point.name,
        # JSON has no NaN.
        "error": error.error if math.isfinite(error.error) else str(error.error),
        "tolerance": error.tolerance,
        "token": error.token,
        "weights": list(error.point.weights),
    }
