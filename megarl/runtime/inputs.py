"""The inputs of a run, read before anything is started: the model's shape, its tokenizer, the prompts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

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
    eval_demonstrations: tuple[Prompt, ...] = ()


def read_inputs(recipe: Recipe) -> Inputs:
    """Read and check everything; raise a DataError or ConfigError that names the file."""
    shape = read_model_shape(recipe.model.path)
    tokenizer = load_tokenizer(recipe.model.path, vocab=shape.vocab, template=recipe.data.template)
    data, evaluation = recipe.data, recipe.evaluation
    demonstrations = partial(
        load_demonstrations,
        config=data,
        tokenizer=tokenizer,
        max_response_tokens=recipe.sampling.max_response_tokens,
    )
    match recipe.algorithm:
        case SftConfig():
            train = demonstrations(data.train)
        case PolicyGradientConfig():
            train = load_prompts(data.train, data, tokenizer)
    inputs = Inputs(shape=shape, tokenizer=tokenizer, train=train, eval=())
    if evaluation is None:
        return inputs
    return replace(
        inputs,
        eval=load_prompts(data.eval, data, tokenizer).prompts[: evaluation.max_prompts] if data.eval else (),
        eval_demonstrations=demonstrations(data.eval_demonstrations).prompts[: evaluation.max_prompts]
        if data.eval_demonstrations
        else (),
    )


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
        check_files(recipe.data.eval_demonstrations, recipe.data, as_demonstrations=True)
