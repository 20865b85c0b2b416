"""`megarl rescore`: another reward on the stored rollouts of a run, beside the scores of the run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.table import Table

from megarl.cli.display import make_console
from megarl.cli.run_folder import RunArgument
from megarl.config.load import load_recipe
from megarl.config.reward import FunctionRewardConfig, RewardConfig
from megarl.errors import ConfigError
from megarl.reward.build import check_reward
from megarl.tools.rescore import Rescored, rescore, running_models

_TOLERANCE = 1e-6
_RECIPES = (".yaml", ".yml")


def rescore_run(
    run: RunArgument,
    reward: Annotated[
        Path,
        typer.Option(metavar="FILE", help="A Python file with compute_score, or a recipe with a reward section."),
    ],
    name: Annotated[str, typer.Option(help="The function in the Python file.")] = "compute_score",
    step: Annotated[int | None, typer.Option(min=0, help="Only the rollouts of this step.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="Show this many of the largest changes.")] = 5,
) -> None:
    """Score the stored rollouts of a run again with another reward, and compare. The run is not changed."""
    recipe = load_recipe(reward) if reward.suffix in _RECIPES else None
    # A rollout that the new function cannot score is counted; it does not end the comparison.
    function = FunctionRewardConfig(kind="function", path=reward, name=name, on_error="mask")
    config: RewardConfig = function if recipe is None else recipe.reward
    if problems := check_reward(config):
        raise ConfigError(str(reward), tuple(problems))
    open_models = None
    if recipe is not None and recipe.roles.frozen:
        open_models = running_models(recipe.roles.frozen, config, run=recipe.run, network=recipe.network)
    rescored = rescore(
        run,
        config,
        step=step,
        on_step=lambda at, num: print(f"step {at}: {num} rollouts", flush=True),
        open_models=open_models,
    )
    console = make_console()
    console.print(_table(rescored))
    for each in _largest_changes(rescored, limit):
        place = f"step {each.step}, prompt {each.prompt_uid}, rollout {each.index}"
        console.print(
            f"{place}: {_shown(each.stored)} -> {_shown(each.new)}: {each.line}", markup=False, highlight=False
        )


def _table(rescored: Sequence[Rescored]) -> Table:
    table = Table()
    for column in ("data source", "rollouts", "mean stored", "mean new", "changed", "correlation", "without a score"):
        table.add_column(column, justify="left" if column == "data source" else "right")
    by_source = sorted(rescored, key=lambda each: each.data_source)
    for source, members in groupby(by_source, key=lambda each: each.data_source):
        table.add_row(source, *_numbers(list(members)))
    table.add_row("all", *_numbers(rescored))
    return table


def _numbers(rescored: Sequence[Rescored]) -> list[str]:
    pairs = [(each.stored, each.new) for each in rescored if each.stored is not None and each.new is not None]
    num_missing = sum(each.new is None for each in rescored)
    if not pairs:
        return [str(len(rescored)), "", "", "", "", str(num_missing)]
    stored, new = np.array(pairs, dtype=np.float64).T
    num_changed = int((np.abs(stored - new) > _TOLERANCE).sum())
    varies = len(pairs) > 1 and float(stored.std()) > 0 and float(new.std()) > 0
    correlation = f"{np.corrcoef(stored, new)[0, 1]:.3f}" if varies else "-"
    means = (f"{stored.mean():.4f}", f"{new.mean():.4f}")
    return [str(len(rescored)), *means, str(num_changed), correlation, str(num_missing)]


def _largest_changes(rescored: Sequence[Rescored], limit: int) -> list[Rescored]:
    """Return the rollouts whose scores differ most, those that lost or gained a score first."""

    def change(each: Rescored) -> float:
        if each.stored is None or each.new is None:
            return 0.0 if each.stored is each.new else float("inf")
        return abs(each.stored - each.new)

    return [each for each in sorted(rescored, key=change, reverse=True)[:limit] if change(each) > _TOLERANCE]


def _shown(value: float | None) -> str:
    return "no score" if value is None else f"{value:g}"
