"""How commands take a recipe: the same argument, the same overrides, the same checks before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from megarl.config.advice import advise
from megarl.config.checks.recipe import check_recipe
from megarl.config.load import load_recipe
from megarl.config.model import read_model_shape
from megarl.config.recipe import Recipe
from megarl.errors import Problem
from megarl.reward.build import check_reward

RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="A YAML file; see recipes/.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=VALUE", help="Override one key; VALUE is YAML. May be repeated."),
]


def load_checked(path: Path, overrides: list[str] | None) -> Recipe:
    """The recipe, and everything that can be known to be wrong before a run starts."""
    recipe = load_recipe(path, overrides or (), checks=(check_recipe, _check_reward))

    from megarl.runtime.inputs import check_data

    check_data(recipe)
    for warning in advise(recipe, read_model_shape(recipe.model.path)):
        print(f"warning: {warning}", file=sys.stderr)
    return recipe


def _check_reward(recipe: Recipe) -> list[Problem]:
    return check_reward(recipe.reward)
