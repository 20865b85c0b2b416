"""What a well-formed recipe can still get wrong: sizes that do not divide, files that are not there, keys that fight.

Each check returns its problems; all are reported together. Needs no torch and opens only `config.json`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from megarl.config.algorithm import GrpoConfig, SftConfig
from megarl.config.model import ModelShape, read_model_shape
from megarl.config.recipe import ActorConfig, Recipe
from megarl.errors import ConfigError, Problem


def check_recipe(recipe: Recipe) -> list[Problem]:
    """Everything wrong with the recipe that can be seen without starting anything."""
    problems = [*_files(recipe), *_pools(recipe), *_batch(recipe), *_roles(recipe)]
    try:
        shape = read_model_shape(recipe.model.path)
    except ConfigError as error:
        return [*problems, *error.problems]
    return [*problems, *_model(recipe, shape)]


def _files(recipe: Recipe) -> Iterator[Problem]:
    for key, paths in (("data.train", recipe.data.train), ("data.eval", recipe.data.eval)):
        for path in paths:
            if not path.is_file():
                yield Problem(key=key, message=f"{path} does not exist")
    if recipe.evaluation is not None and not recipe.data.eval:
        yield Problem(key="evaluation", message="nothing to evaluate on; set data.eval or remove the section")
    folder = _existing_parent(recipe.run_folder)
    if not os.access(folder, os.W_OK):
        yield Problem(key="run.folder", message=f"{folder} is not writable; choose another folder")


def _existing_parent(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _pools(recipe: Recipe) -> Iterator[Problem]:
    pools = recipe.pools
    actor, rollout = recipe.roles.actor, recipe.roles.rollout
    known = ", ".join(sorted(pools))
    for role, pool in (("actor", actor.pool), ("rollout", rollout.pool if rollout else None)):
        if pool is not None and pool not in pools:
            yield Problem(key=f"roles.{role}.pool", message=f"no pool named {pool}; pools are {known}")
    if actor.pool in pools:
        gpus = pools[actor.pool].gpus
        if gpus % actor.model_parallel:
            yield Problem(
                key="roles.actor",
                message=f"tensor {actor.tensor} * pipeline {actor.pipeline} = {actor.model_parallel} "
                f"does not divide the {gpus} gpus of pool {actor.pool}",
            )
    if rollout is not None and rollout.pool in pools:
        per_node = pools[rollout.pool].gpus_per_node
        if per_node % rollout.tensor:
            yield Problem(
                key="roles.rollout.tensor",
                message=f"{rollout.tensor} does not divide the {per_node} gpus of a node of pool {rollout.pool}; "
                "an engine stays on one node",
            )
    for name in sorted(set(pools) - {actor.pool, rollout.pool if rollout else actor.pool}):
        yield Problem(key=f"pools.{name}", message="no role uses this pool; remove it or name it in a role")


def _batch(recipe: Recipe) -> Iterator[Problem]:
    train = recipe.train
    if train.prompts_per_update is not None and train.prompts_per_step % train.prompts_per_update:
        yield Problem(
            key="train.prompts_per_update",
            message=f"{train.prompts_per_update} does not divide train.prompts_per_step {train.prompts_per_step}",
        )
    if recipe.max_context_tokens > train.tokens_per_micro_batch:
        yield Problem(
            key="train.tokens_per_micro_batch",
            message=f"{train.tokens_per_micro_batch} cannot hold one sequence of data.max_prompt_tokens "
            f"{recipe.data.max_prompt_tokens} + sampling.max_response_tokens {recipe.sampling.max_response_tokens}",
        )
    optimizer = train.optimizer
    if optimizer.warmup_steps > recipe.run.steps:
        yield Problem(
            key="train.optimizer.warmup_steps",
            message=f"{optimizer.warmup_steps} is more than run.steps {recipe.run.steps}; "
            "the learning rate would never be reached",
        )
    if optimizer.min_learning_rate > optimizer.learning_rate:
        yield Problem(
            key="train.optimizer.min_learning_rate",
            message=f"{optimizer.min_learning_rate} is above learning_rate {optimizer.learning_rate}",
        )


def _roles(recipe: Recipe) -> Iterator[Problem]:
    match recipe.algorithm:
        case GrpoConfig():
            if recipe.roles.rollout is None:
                yield Problem(key="roles.rollout", message="missing; grpo needs engines that generate")
            if recipe.sampling.rollouts_per_prompt == 1:
                yield Problem(
                    key="sampling.rollouts_per_prompt",
                    message="1 leaves nothing to compare in a group; grpo needs at least 2",
                )
        case SftConfig():
            if recipe.train.prompts_per_update is not None:
                yield Problem(key="train.prompts_per_update", message="has no use in sft; remove it")
            if recipe.roles.rollout is not None and recipe.evaluation is None:
                yield Problem(
                    key="roles.rollout", message="sft generates only for an evaluation; remove one, add the other"
                )
    if recipe.evaluation is not None and recipe.roles.rollout is None:
        yield Problem(key="evaluation", message="needs engines; add roles.rollout or remove the section")


def _model(recipe: Recipe, shape: ModelShape) -> Iterator[Problem]:
    actor, rollout = recipe.roles.actor, recipe.roles.rollout
    yield from _split(shape, actor)
    if rollout is not None:
        if shape.num_heads % rollout.tensor:
            yield _divides("roles.rollout.tensor", rollout.tensor, "attention heads", shape.num_heads)
        elif rollout.tensor % shape.num_kv_heads and shape.num_kv_heads % rollout.tensor:
            yield _divides("roles.rollout.tensor", rollout.tensor, "key/value heads", shape.num_kv_heads)
        if shape.ffn_hidden % rollout.tensor:
            yield _divides("roles.rollout.tensor", rollout.tensor, "intermediate size", shape.ffn_hidden)
    if recipe.max_context_tokens > shape.max_context_tokens:
        yield Problem(
            key="sampling.max_response_tokens",
            message=f"prompt {recipe.data.max_prompt_tokens} + response {recipe.sampling.max_response_tokens} = "
            f"{recipe.max_context_tokens} tokens exceed the model's context of {shape.max_context_tokens}",
        )


def _split(shape: ModelShape, actor: ActorConfig) -> Iterator[Problem]:
    if shape.num_heads % actor.tensor:
        yield _divides("roles.actor.tensor", actor.tensor, "attention heads", shape.num_heads)
    elif shape.num_kv_heads % actor.tensor:
        yield _divides("roles.actor.tensor", actor.tensor, "key/value heads", shape.num_kv_heads)
    if shape.ffn_hidden % actor.tensor:
        yield _divides("roles.actor.tensor", actor.tensor, "intermediate size", shape.ffn_hidden)
    chunks = actor.pipeline * actor.virtual_pipeline
    if shape.num_layers % chunks:
        yield Problem(
            key="roles.actor.pipeline",
            message=f"pipeline {actor.pipeline} * virtual_pipeline {actor.virtual_pipeline} = {chunks} "
            f"does not divide the model's {shape.num_layers} layers",
        )
    if actor.virtual_pipeline > 1 and actor.pipeline == 1:
        yield Problem(key="roles.actor.virtual_pipeline", message="needs pipeline > 1; set it to 1")
    if actor.is_sequence_parallel and actor.tensor == 1:
        yield Problem(key="roles.actor.is_sequence_parallel", message="does nothing with tensor 1; remove it")


def _divides(key: str, size: int, what: str, count: int) -> Problem:
    choices = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
    return Problem(key=key, message=f"{size} does not divide the model's {count} {what}; choose one of {choices}")
