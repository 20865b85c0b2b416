"""What a well-formed recipe can still get wrong: sizes that do not divide, files that are not there, keys that fight.

Each check returns its problems; all are reported together. Needs no torch and reads no weights and no data.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from pathlib import Path

from megarl.config.checks.algorithm import check_algorithm
from megarl.config.checks.endpoints import check_endpoints, check_key_files
from megarl.config.checks.evaluation import check_evaluation
from megarl.config.checks.files import check_files, check_model_folder
from megarl.config.checks.loggers import check_loggers
from megarl.config.checks.rewards import check_rewards
from megarl.config.checks.sizes import check_role_split, check_split, check_step
from megarl.config.checks.splits import check_stages
from megarl.config.checks.staleness import check_staleness
from megarl.config.model import ModelShape, read_model_shape
from megarl.config.native import check_native
from megarl.config.recipe import CriticConfig, Recipe
from megarl.errors import ConfigError, Problem


def check_recipe(recipe: Recipe) -> list[Problem]:
    """Everything wrong with the recipe that can be seen without starting anything."""
    problems = [
        *check_files(recipe),
        *check_key_files(recipe),
        *check_loggers(recipe.observe),
        *check_model_folder(recipe.model.path),
        *_network(recipe.network.bind),
        *_without_shape(recipe),
    ]
    try:
        shape = read_model_shape(recipe.model.path)
    except ConfigError as error:
        return [*problems, *error.problems]
    if shape.has_value_head:
        message = f"{recipe.model.path} is a critic and has no language head; name it in roles.critic.path"
        return [*problems, Problem(key="model.path", message=message)]
    return [*problems, *check_split(recipe, shape), *_other_models(recipe, shape)]


def _network(bind: str | None) -> Iterator[Problem]:
    if bind is None:
        return
    try:
        network = ipaddress.IPv4Network(bind, strict=False)
    except ValueError:
        yield Problem(key="network.bind", message=f"{bind!r} is no IPv4 network or address, such as 10.1.0.0/16")
        return
    if network.network_address.is_unspecified:
        yield Problem(key="network.bind", message=f"{bind} means every network; name the one the machines share")


def _other_models(recipe: Recipe, shape: ModelShape) -> Iterator[Problem]:
    """Those that start from a folder of their own."""
    critic, reference = recipe.roles.critic, recipe.roles.reference
    if critic is not None and critic.path is not None:
        found = _shape_in(critic.path, "roles.critic.path")
        if isinstance(found, Problem):
            yield found
        else:
            yield from _critic_of_its_own(critic, found, shape)
    if reference is not None and reference.path is not None:
        found = _shape_in(reference.path, "roles.reference.path")
        if isinstance(found, Problem):
            yield found
        elif found != shape:
            yield Problem(key="roles.reference.path", message="not a model of the same shape and dtype as model.path")


def _critic_of_its_own(critic: CriticConfig, found: ModelShape, policy: ModelShape) -> Iterator[Problem]:
    yield from check_role_split(found, critic, role="critic")
    if found.vocab != policy.vocab:
        yield Problem(
            key="roles.critic.path",
            message=f"its vocabulary has {found.vocab} tokens, that of model.path {policy.vocab}; "
            "a critic reads the policy's tokens",
        )


def _shape_in(folder: Path, key: str) -> ModelShape | Problem:
    try:
        return read_model_shape(folder)
    except ConfigError as error:
        return Problem(key=key, message=error.problems[0].message.replace("model.path", key))


def check_without_files(recipe: Recipe, shape: ModelShape, *, critic: ModelShape) -> list[Problem]:
    """The same for a machine that has neither the models nor the data: all but what is in files."""
    problems = [*_without_shape(recipe), *check_split(recipe, shape)]
    if recipe.roles.critic is not None and recipe.roles.critic.path is not None:
        problems += _critic_of_its_own(recipe.roles.critic, critic, shape)
    return problems


def _without_shape(recipe: Recipe) -> Iterator[Problem]:
    yield from check_step(recipe)
    yield from check_algorithm(recipe)
    yield from check_rewards(recipe.reward)
    yield from check_native(recipe)
    yield from check_endpoints(recipe)
    yield from check_evaluation(recipe)
    yield from check_staleness(recipe)
    yield from _without_effect(recipe)
    yield from _keep_best(recipe)


def _keep_best(recipe: Recipe) -> Iterator[Problem]:
    is_judged = recipe.evaluation is not None and recipe.evaluation.every_steps is not None
    if recipe.checkpoint.keep_best is not None and not is_judged:
        yield Problem(
            key="checkpoint.keep_best",
            message="only the last step would be evaluated; set evaluation.every_steps or remove it",
        )


def _offload(recipe: Recipe) -> Iterator[Problem]:
    rollout = recipe.roles.rollout
    for role in ("actor", "critic"):
        config = recipe.roles.actor if role == "actor" else recipe.roles.critic
        if config is None or config.offload == "nothing":
            continue
        if rollout is None or rollout.pool != config.pool:
            yield Problem(
                key=f"roles.{role}.offload",
                message=f"{config.offload} makes room for engines, and none are in pool {config.pool}; remove it",
            )


def _without_effect(recipe: Recipe) -> Iterator[Problem]:
    """Keys that somebody set and nobody would read."""
    for role, split in recipe.megatron_roles.items():
        yield from check_stages(split, prefix=f"roles.{role}.")
        if split.is_sequence_parallel and split.tensor == 1:
            yield Problem(key=f"roles.{role}.is_sequence_parallel", message="does nothing with tensor 1; remove it")
        if split.expert == 1 and split.expert_tensor not in (None, split.tensor):
            yield Problem(
                key=f"roles.{role}.expert_tensor",
                message="needs expert > 1; without it experts are divided by tensor as all else is; remove it",
            )
    yield from _offload(recipe)
    reference = recipe.roles.reference
    if reference is not None and reference.pool is None:
        for name in sorted(reference.model_fields_set - {"pool", "path"}):
            yield Problem(
                key=f"roles.reference.{name}",
                message="has no use in the actor's ranks, which split it as the actor; remove it or name a pool",
            )
