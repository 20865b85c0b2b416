"""The inputs of a run, read before anything is started: the model's shape, its tokenizer, the prompts."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import partial

from megarl.config.algorithm import DpoConfig, PolicyGradientConfig, RewardModelConfig, SftConfig, SpinConfig
from megarl.config.model import ModelShape, read_model_shape
from megarl.config.recipe import Recipe
from megarl.data.prompts import PromptSet, load_demonstrations, load_pairs, load_prompts
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.episodes.play import tools_of
from megarl.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    shape: ModelShape
    tokenizer: Tokenizer
    train: PromptSet
    eval: tuple[Prompt, ...]
    eval_demonstrations: tuple[Prompt, ...] = ()
    eval_pairs: tuple[Prompt, ...] = ()

    @property
    def tools_digest(self) -> str | None:
        """Digest of the tools that prompts name, in their order; None without any."""
        tools = self.tokenizer.tools
        return hashlib.blake2b(json.dumps(tools).encode(), digest_size=16).hexdigest() if tools else None


def read_inputs(recipe: Recipe) -> Inputs:
    """Read and check everything; raise a DataError or ConfigError that names the file."""
    shape = read_model_shape(recipe.model.path)
    is_scorer = isinstance(recipe.algorithm, RewardModelConfig)
    if is_scorer:
        shape = shape.as_critic()
    tools = () if recipe.environment is None else tools_of(recipe.environment)
    tokenizer = load_tokenizer(
        recipe.model.path,
        vocab=shape.vocab,
        template=recipe.data.template,
        tools=[tool.as_function for tool in tools],
    )
    data, evaluation = recipe.data, recipe.evaluation
    demonstrations = partial(
        load_demonstrations,
        config=data,
        tokenizer=tokenizer,
        max_response_tokens=recipe.sampling.max_response_tokens,
    )
    pairs = partial(
        load_pairs,
        config=data,
        tokenizer=tokenizer,
        max_response_tokens=recipe.sampling.max_response_tokens,
        as_chats=is_scorer,
    )
    match recipe.algorithm:
        case SftConfig() | SpinConfig():
            train = demonstrations(data.train)
        case DpoConfig() | RewardModelConfig():
            train = pairs(data.train)
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
        eval_pairs=pairs(data.eval_pairs).prompts[: evaluation.max_prompts] if data.eval_pairs else (),
    )
