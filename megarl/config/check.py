"""What a well-formed recipe can still get wrong: sizes that do not divide, files that are not there, keys that fight.

Each check returns its problems; all are reported together. Needs no torch and reads no weights and no data.
"""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.check_algorithm import check_algorithm
from megarl.config.check_files import check_files, check_model_folder
from megarl.config.check_sizes import check_split, check_step
from megarl.config.model import ModelShape, read_model_shape
from megarl.config.native import check_native
from megarl.config.recipe import Recipe
from megarl.errors import ConfigError, Problem


def check_recipe(recipe: Recipe) -> list[Problem]:
    """Everything wrong with the recipe that can be seen without starting anything."""
    problems = [*check_files(recipe), *check_model_folder(recipe.model.path), *_without_shape(recipe)]
    try:
        shape = read_model_shape(recipe.model.path)
    except ConfigError as error:
        return [*problems, *error.problems]
    return [*problems, *check_split(recipe, shape)]


def check_without_files(recipe: Recipe, shape: ModelShape) -> list[Problem]:
    """The same for a machine that has neither the model nor the data: all but what is in files."""
    return [*_without_shape(recipe), *check_split(recipe, shape)]


def _without_shape(recipe: Recipe) -> Iterator[Problem]:
    yield from check_step(recipe)
    yield from check_algorithm(recipe)
    yield from check_native(recipe)
    yield from _evaluation(recipe)
    yield from _without_effect(recipe)


def _evaluation(recipe: Recipe) -> Iterator[Problem]:
    if recipe.evaluation is not None and recipe.roles.rollout is None:
        yield Problem(key="evaluation", message="needs engines; add roles.rollout or remove the section")


def _without_effect(recipe: Recipe) -> Iterator[Problem]:
    """Keys that somebody set and nobody would read."""
    if recipe.evaluation is not None and not recipe.data.eval:
        yield Problem(key="evaluation", message="nothing to evaluate on; set data.eval or remove the section")
    if recipe.evaluation is None and recipe.data.eval:
        yield Problem(key="data.eval", message="nothing evaluates on it; add `evaluation: {}` or remove it")
    optimizer = recipe.train.optimizer
    if optimizer.min_learning_rate > 0 and optimizer.decay == "constant":
        yield Problem(
            key="train.optimizer.min_learning_rate",
            message=f"{optimizer.min_learning_rate} is never reached with decay constant; set decay or remove it",
        )
    actor = recipe.roles.actor
    if actor.virtual_pipeline > 1 and actor.pipeline == 1:
        yield Problem(key="roles.actor.virtual_pipeline", message="needs pipeline > 1; set it to 1")
    if actor.is_sequence_parallel and actor.tensor == 1:
        yield Problem(key="roles.actor.is_sequence_parallel", message="does nothing with tensor 1; remove it")
