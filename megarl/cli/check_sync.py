"""`megarl check-sync`: check with a tiny model on this machine that a recipe's weights reach its engines."""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from megarl.cli.recipe import Overrides, RecipePath
from megarl.env import NO_COLOR
from megarl.errors import ConfigError, WeightSyncError

if TYPE_CHECKING:
    from megarl.tools.check_sync import SyncCheck

_WIDTH = 110


def check_sync(
    recipe: RecipePath,
    overrides: Overrides = None,
    shape: Annotated[str | None, typer.Option(help="A public model's name, where model.path is missing here.")] = None,
    engines: Annotated[int, typer.Option(min=1, help="Start at most this many engines; each takes half a minute.")] = 2,
    is_rehearsal: Annotated[
        bool, typer.Option("--rehearse-only", help="Only check the plan, in memory; start no process.")
    ] = False,
    is_json: Annotated[bool, typer.Option("--json", help="Also print JSON, in the line before the last.")] = False,
) -> None:
    """Check that a recipe's weights reach its engines.

    Publishes a tiny model of the same family and compares what the engines hold: first in memory with the recipe's own
    layouts, then with real Megatron ranks and SGLang engines and every kind of split that the recipe has.

    Exits with 0 where every byte is equal, with 76 where one is not.
    """
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    from megarl.cluster.local_ray import private_ray
    from megarl.config.checks.recipe import check_without_files
    from megarl.config.load import read_recipe
    from megarl.planner.deployment import find_shapes
    from megarl.tools.small_recipe import describe_layout, small_layouts, tiny_shape

    read = read_recipe(recipe, overrides or []).recipe
    shapes = find_shapes(read.model, read.roles, name=shape)
    problems = check_without_files(read, shapes.policy, critic=shapes.critic)
    if problems:
        raise ConfigError(str(recipe), tuple(problems))
    checks: dict[str, SyncCheck] = {}
    with tempfile.TemporaryDirectory(prefix="megarl-check-sync-") as folder, private_ray():
        from megarl.tools.check_sync import check_processes, rehearse_layouts

        small = small_layouts(read, folder=Path(folder), model_folder=Path(folder) / "model", max_engines=engines)
        checks["rehearsal"] = rehearse_layouts(read, shapes.policy)
        _print_check(f"rehearsed in memory: {describe_layout(read)}", checks["rehearsal"], [])
        if not is_rehearsal:
            layout = describe_layout(small.recipe)
            print(f"starting {layout}", file=sys.stderr)
            tiny = tiny_shape(shapes.policy, small.recipe.roles.actor)
            checks["real"] = check_processes(small, tiny, ray_address=None)
            _print_check(f"with real processes: {layout}", checks["real"], small.notes)
    if is_json:
        print(json.dumps({name: to_json(check) for name, check in checks.items()}))
    if not all(check.is_equal for check in checks.values()):
        print("the engines do NOT hold what was published")
        raise typer.Exit(WeightSyncError.exit_code)
    print("every byte is equal")


def _print_check(title: str, check: SyncCheck, notes: Sequence[str]) -> None:
    shape = check.shape
    print(title)
    print(
        f"  {shape.family} of {shape.num_layers} layers, {shape.num_heads} heads ({shape.num_kv_heads} KV), "
        f"hidden {shape.hidden}, vocabulary {shape.vocab}, {check.dtype}: "
        f"{check.moved_bytes / 1e6:.2f} MB from {check.num_sources} to {check.num_targets} ranks"
    )
    for note in notes:
        print(f"  note: {note}")
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("class", "tensors", "bytes", "verdict"):
        table.add_column(name, justify="right" if name in ("tensors", "bytes") else "left")
    for verdict in check.verdicts:
        outcome = "equal"
        if not verdict.is_equal:
            outcome = f"{verdict.num_differing} elements differ: {verdict.first_difference}"
        table.add_row(verdict.name, str(len(verdict.tensors)), f"{verdict.num_bytes:,}", outcome)
    Console(width=_WIDTH, no_color=bool(NO_COLOR.read()), highlight=False, markup=False).print(table)


def to_json(check: SyncCheck) -> dict[str, object]:
    return {
        "is_equal": check.is_equal,
        "num_sources": check.num_sources,
        "num_targets": check.num_targets,
        "moved_bytes": check.moved_bytes,
        "classes": [
            {
                "name": verdict.name,
                "tensors": len(verdict.tensors),
                "bytes": verdict.num_bytes,
                "differing_elements": verdict.num_differing,
                "first_difference": verdict.first_difference,
            }
            for verdict in check.verdicts
        ],
    }
