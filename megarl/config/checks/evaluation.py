"""What an evaluation section can get wrong, alone and together with the rest of a recipe."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.model import ModelShape
from megarl.config.recipe import EvaluationConfig, Recipe, SampledEvaluationConfig
from megarl.errors import Problem


def check_evaluation(recipe: Recipe) -> Iterator[Problem]:
    evaluation = recipe.evaluation
    if evaluation is None:
        if recipe.data.eval:
            yield Problem(key="data.eval", message="nothing evaluates on it; add `evaluation: {}` or remove it")
        return
    if recipe.roles.rollout is None:
        yield Problem(key="evaluation", message="needs engines; add roles.rollout or remove the section")
    if not recipe.data.eval:
        yield Problem(key="evaluation", message="nothing to evaluate on; set data.eval or remove the section")
    yield from _answers(evaluation)
    yield from _cache(recipe, evaluation)


def check_evaluation_context(recipe: Recipe, shape: ModelShape) -> Iterator[Problem]:
    """A response of its own length may exceed the model's context where training's does not."""
    evaluation = recipe.evaluation
    if evaluation is None or evaluation.max_response_tokens is None:
        return
    num_tokens = recipe.data.max_prompt_tokens + evaluation.max_response_tokens
    if num_tokens > shape.max_context_tokens:
        yield Problem(
            key="evaluation.max_response_tokens",
            message=f"prompt {recipe.data.max_prompt_tokens} + response {evaluation.max_response_tokens} = "
            f"{num_tokens} tokens exceed the model's context of {shape.max_context_tokens}",
        )


def _answers(evaluation: EvaluationConfig) -> Iterator[Problem]:
    if evaluation.sampled is not None:
        yield from _pass_at(evaluation.sampled)
    elif not evaluation.is_greedy:
        yield Problem(key="evaluation.is_greedy", message="false leaves nothing to answer with; add evaluation.sampled")


def _pass_at(sampled: SampledEvaluationConfig) -> Iterator[Problem]:
    ks = sampled.pass_at or ()
    too_large = [k for k in ks if k > sampled.rollouts_per_prompt]
    if too_large:
        yield Problem(
            key="evaluation.sampled.pass_at",
            message=f"{too_large[0]} is more than rollouts_per_prompt {sampled.rollouts_per_prompt}; "
            f"raise that to at least {max(too_large)} or leave {too_large[0]} out",
        )
    twice = [k for index, k in enumerate(ks) if k in ks[:index]]
    if twice:
        yield Problem(key="evaluation.sampled.pass_at", message=f"{twice[0]} is there twice")


def _cache(recipe: Recipe, evaluation: EvaluationConfig) -> Iterator[Problem]:
    cached_tokens = recipe.roles.rollout.max_cached_tokens if recipe.roles.rollout else None
    if cached_tokens is None or evaluation.max_response_tokens is None:
        return
    num_tokens = recipe.data.max_prompt_tokens + evaluation.max_response_tokens
    if num_tokens > cached_tokens:
        yield Problem(
            key="evaluation.max_response_tokens",
            message=f"{evaluation.max_response_tokens} with data.max_prompt_tokens {recipe.data.max_prompt_tokens} "
            f"does not fit in roles.rollout.max_cached_tokens {cached_tokens}",
        )
