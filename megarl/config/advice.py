"""What is allowed but probably not meant. Nothing here stops a run."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.algorithm import PolicyGradientConfig, SftConfig
from megarl.config.model import ModelShape
from megarl.config.recipe import Recipe
from megarl.errors import Problem

_HOT = 1.5
"""Above this temperature most of the probability goes to tokens the model would never choose."""


def advise(recipe: Recipe, shape: ModelShape) -> list[Problem]:
    """Warnings, for whoever starts the run or only asks about it."""
    return [
        *_sampling(recipe),
        *_staleness(recipe),
        *_evaluation(recipe),
        *_ranks(recipe, shape),
        *_unused(recipe),
    ]


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


def _staleness(recipe: Recipe) -> Iterator[Problem]:
    algorithm, staleness = recipe.algorithm, recipe.train.max_staleness
    if staleness and isinstance(algorithm, PolicyGradientConfig) and algorithm.correction is None:
        yield Problem(
            key="train.max_staleness",
            message=f"{staleness} trains on what earlier policies chose as if the current one had; "
            "`algorithm.correction: {kind: tis}` weighs it by how likely it is now",
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
    splits = [(f"roles.{role}.tensor", split.tensor) for role, split in recipe.roles.megatron_roles.items()]
    splits += [("roles.rollout.tensor", rollout.tensor)] if rollout else []
    for key, tensor in splits:
        if tensor > shape.num_kv_heads:
            copies = tensor // shape.num_kv_heads
            yield Problem(key=key, message=f"each of the {shape.num_kv_heads} key/value heads is on {copies} ranks")
    train, critic = recipe.train, recipe.roles.critic
    key = "train.prompts_per_step" if train.prompts_per_update is None else "train.prompts_per_update"
    prompts = train.prompts_per_update or train.prompts_per_step
    yield from _idle_ranks(recipe, key, prompts, recipe.data_parallel)
    if critic is not None:
        if critic.prompts_per_update is not None:
            key, prompts = "roles.critic.prompts_per_update", critic.prompts_per_update
        ranks = recipe.pools[critic.pool].gpus // critic.model_parallel
        if ranks > recipe.data_parallel or critic.prompts_per_update is not None:
            yield from _idle_ranks(recipe, key, prompts, ranks)


def _idle_ranks(recipe: Recipe, key: str, prompts: int, ranks: int) -> Iterator[Problem]:
    is_sft = isinstance(recipe.algorithm, SftConfig)
    sequences = prompts * (1 if is_sft else recipe.sampling.rollouts_per_prompt)
    if sequences < ranks:
        yield Problem(
            key=key,
            message=f"{sequences} sequences per update for {ranks} data-parallel ranks: "
            f"{ranks - sequences} of them compute padding only",
        )


def _unused(recipe: Recipe) -> Iterator[Problem]:
    """Keys that somebody set and this run does not read."""
    if "response_key" in recipe.data.model_fields_set and not isinstance(recipe.algorithm, SftConfig):
        yield Problem(key="data.response_key", message="only sft reads it")
    checkpoint, steps = recipe.checkpoint, recipe.run.steps
    every_steps = checkpoint.save_every_steps
    if "save_every_steps" in checkpoint.model_fields_set and every_steps is not None and every_steps > steps:
        yield Problem(
            key="checkpoint.save_every_steps",
            message=f"{every_steps} is more than run.steps {steps}: "
            + ("only the last step is saved" if checkpoint.save_at_end else "nothing is saved"),
        )
