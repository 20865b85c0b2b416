"""What can be wrong with a recipe's data, before anything is started. No role, no Ray."""

from __future__ import annotations

from megarl.config.algorithm import SftConfig
from megarl.config.recipe import Recipe
from megarl.data.rows import check_files


def check_data(recipe: Recipe) -> None:
    """Raises a DataError."""
    check_files(recipe.data.train, recipe.data, as_demonstrations=isinstance(recipe.algorithm, SftConfig))
    if recipe.evaluation is not None:
        check_files(recipe.data.eval, recipe.data, as_demonstrations=False)
