"""`megarl plan`: what a recipe will need, as tables for people or JSON for programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from megarl.env import NO_COLOR

WIDTH = 100


def plan(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", show_default=False)],
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="A.B=VALUE", help="Override one key.")] = None,
    gpu: Annotated[
        str, typer.Option(help="a100, h100, h200; other figures: h100,memory_gib=94,network_gb_per_s=25.")
    ] = "h100",
    shape: Annotated[str | None, typer.Option(help="A public model's shape, where model.path is not here.")] = None,
    what_if: Annotated[
        list[str] | None, typer.Option(metavar="A.B=VALUE", help="Compare with this change. May be repeated.")
    ] = None,
    mean_response_tokens: Annotated[int | None, typer.Option(min=1, help="Without it half the limit.")] = None,
    is_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Say whether a recipe fits, where its bytes go and where its time goes; start nothing."""
    from rich.console import Console

    from megarl.cli.plan_tables import as_json, comparison, tables
    from megarl.planner.hardware import parse_gpu
    from megarl.planner.run_plan import PlanQuestion, answer

    question = PlanQuestion(gpu=parse_gpu(gpu), shape_name=shape, mean_response_tokens=mean_response_tokens)
    first = answer(recipe, overrides or [], question)
    changed = answer(recipe, [*(overrides or []), *what_if], question) if what_if else None
    if is_json:
        found = as_json(first) if changed is None else [as_json(first), as_json(changed)]
        print(json.dumps(found, indent=2))
        return
    console = Console(width=WIDTH, no_color=bool(NO_COLOR.read()), highlight=False, markup=False)
    console.print(tables(first) if changed is None else comparison(first, changed, what_if or []))
