"""What can be wrong with a recipe beyond its own text: its data, its tokenizer, its reward. Starts no role, no Ray."""

from __future__ import annotations

from megarl.config.algorithm import SftConfig
from megarl.config.recipe import Recipe
from megarl.data.rows import check_files
from megarl.errors import ConfigError
from megarl.reward.check import check_reward


def check(recipe: Recipe, *, source: str) -> None:
    """Raises a ConfigError for the reward and a DataError for the data, before anything is started.

    `source` is the recipe's file, as errors name it.
    """
    problems = check_reward(recipe.reward)
    if problems:
        raise ConfigError(source, tuple(problems))
    check_files(recipe.data.train, recipe.data, as_demonstrations=isinstance(recipe.algorithm, SftConfig))
    if recipe.evaluation is not None:
        check_files(recipe.data.eval, recipe.data, as_demonstrations=False)
