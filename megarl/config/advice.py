"""What is allowed but probably not meant. Nothing here stops a run."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.algorithm import SftConfig
from megarl.config.model import ModelShape
from megarl.config.recipe import Recipe
from megarl.errors import Problem

_HOT = 1.5
"""Above this temperature most of the probability goes to tokens the model would never choose."""


def advise(recipe: Recipe, shape: ModelShape) -> list[Problem]:
    """Warnings, for whoever starts the run or only asks about it."""
    return [*_sampling(recipe), *_evaluation(recipe), *_ranks(recipe, shape)]


def _sampling(recipe: Recipe) -> Iterator[Problem]:
    sampling = recipe.sampling
    if isinstance(recipe.algorithm, SftConfig):
        for name in sorted(sampling.model_fields_set - {"max_response_tokens"}):
            yield Problem(key=f"sampling.{name}", message="has no use in sft")
        return
    if sampling.temperature > _HOT:
        yield Problem(
            key="sampling.temperature", message=f"{sampling.temperature:g} is close to noise; usual are 0.6 to 1.2"
        )
    for name, is_cut in (("top_p", sampling.top_p < 1), ("top_k", sampling.top_k is not None)):
        if is_cut:
            yield Problem(
                key=f"sampling.{name}",
                message="cuts off what the policy may sample, but not what it is trained to say; "
                "leave it out unless the mismatch is wanted",
            )


def _evaluation(recipe: Recipe) -> Iterator[Problem]:
    shared = sorted(set(recipe.data.train) & set(recipe.data.eval))
    if shared:
        yield Problem(key="data.eval", message=f"{shared[0]} is trained on as well: its accuracy says little")
    every_steps = recipe.evaluation.every_steps if recipe.evaluation else None
    if every_steps is not None and every_steps > recipe.run.steps:
        yield Problem(
            key="evaluation.every_steps",
            message=f"{every_steps} is more than run.steps {recipe.run.steps}: only before and after the run",
        )


def _ranks(recipe: Recipe, shape: ModelShape) -> Iterator[Problem]:
    rollout = recipe.roles.rollout
    splits = [(f"roles.{role}.tensor", split.tensor) for role, split in recipe.megatron_roles.items()]
    splits += [("roles.rollout.tensor", rollout.tensor)] if rollout else []
    for key, tensor in splits:
        if tensor > shape.num_kv_heads:
            copies = tensor // shape.num_kv_heads
            yield Problem(key=key, message=f"each of the {shape.num_kv_heads} key/value heads is on {copies} ranks")
    is_sft = isinstance(recipe.algorithm, SftConfig)
    prompts = recipe.train.prompts_per_update or recipe.train.prompts_per_step
    sequences = prompts * (1 if is_sft else recipe.sampling.rollouts_per_prompt)
    if sequences < recipe.data_parallel:
        yield Problem(
            key="train.prompts_per_step" if recipe.train.prompts_per_update is None else "train.prompts_per_update",
            message=f"{sequences} sequences per update for {recipe.data_parallel} data-parallel ranks: "
            f"{recipe.data_parallel - sequences} of them compute padding only",
        )
