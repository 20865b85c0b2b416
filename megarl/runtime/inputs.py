"""The inputs of a run, read before anything is started: the model's shape, its tokenizer, the prompts."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.algorithm import PolicyGradientConfig, SftConfig
from megarl.config.model import ModelShape, read_model_shape
from megarl.config.recipe import Recipe
from megarl.data.prompts import PromptSet, load_demonstrations, load_prompts
from megarl.data.rows import check_files, num_rows
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    shape: ModelShape
    tokenizer: Tokenizer
    train: PromptSet
    eval: tuple[Prompt, ...]


def read_inputs(recipe: Recipe) -> Inputs:
    """Read and check everything; raise a DataError or ConfigError that names the file."""
    shape = read_model_shape(recipe.model.path)
    tokenizer = load_tokenizer(recipe.model.path, vocab=shape.vocab)
    match recipe.algorithm:
        case SftConfig():
            max_tokens = recipe.sampling.max_response_tokens
            train = load_demonstrations(recipe.data.train, recipe.data, tokenizer, max_response_tokens=max_tokens)
        case PolicyGradientConfig():
            train = load_prompts(recipe.data.train, recipe.data, tokenizer)
    held_out: tuple[Prompt, ...] = ()
    if recipe.evaluation is not None:
        held_out = load_prompts(recipe.data.eval, recipe.data, tokenizer).prompts[: recipe.evaluation.max_prompts]
    return Inputs(shape=shape, tokenizer=tokenizer, train=train, eval=held_out)


def recipe_with_steps(recipe: Recipe) -> Recipe:
    """Return the recipe with `run.steps`: for a run of epochs, counted with the prompts that are left to train on."""
    if recipe.run.epochs is None:
        return recipe
    if recipe.data.overlong_prompts == "refuse":
        return recipe.with_steps(num_rows(recipe.data.train))
    return recipe.with_steps(len(read_inputs(recipe).train.prompts))


def check_data(recipe: Recipe) -> None:
    """Raise a DataError for the first row that a run would refuse; needs no model."""
    check_files(recipe.data.train, recipe.data, as_demonstrations=isinstance(recipe.algorithm, SftConfig))
    if recipe.evaluation is not None:
        check_files(recipe.data.eval, recipe.data, as_demonstrations=False)
