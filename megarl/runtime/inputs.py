"""What a run reads before it starts anything: the model's shape, its tokenizer, the prompts."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.algorithm import PolicyGradientConfig, SftConfig
from megarl.config.model import ModelShape, read_model_shape
from megarl.config.recipe import Recipe
from megarl.data.prompts import PromptSet, load_demonstrations, load_prompts
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    shape: ModelShape
    tokenizer: Tokenizer
    train: PromptSet
    eval: tuple[Prompt, ...]


def read_inputs(recipe: Recipe) -> Inputs:
    """Everything, checked; a DataError or ConfigError says what is wrong with which file."""
    shape = read_model_shape(recipe.model.path)
    tokenizer = load_tokenizer(recipe.model.path, vocab=shape.vocab)
    return Inputs(shape=shape, tokenizer=tokenizer, train=_train(recipe, tokenizer), eval=_held_out(recipe, tokenizer))


def _train(recipe: Recipe, tokenizer: Tokenizer) -> PromptSet:
    match recipe.algorithm:
        case SftConfig():
            max_tokens = recipe.sampling.max_response_tokens
            return load_demonstrations(recipe.data.train, recipe.data, tokenizer, max_response_tokens=max_tokens)
        case PolicyGradientConfig():
            return load_prompts(recipe.data.train, recipe.data, tokenizer)


def _held_out(recipe: Recipe, tokenizer: Tokenizer) -> tuple[Prompt, ...]:
    if recipe.evaluation is None:
        return ()
    return load_prompts(recipe.data.eval, recipe.data, tokenizer).prompts[: recipe.evaluation.max_prompts]
