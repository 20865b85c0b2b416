"""Whether the numbers of a recipe divide and fit: pools, batches, and the model over its ranks. Opens no file."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.checks.evaluation import check_evaluation_context
from megarl.config.checks.splits import (
    check_engine_experts,
    check_engine_split,
    check_expert_ranks,
    check_megatron_split,
)
from megarl.config.model import ModelShape
from megarl.config.recipe import (
    CriticConfig,
    Device,
    ModelParallelConfig,
    OptimizerConfig,
    Recipe,
    RolloutRoleConfig,
)
from megarl.errors import Problem


def check_step(recipe: Recipe) -> Iterator[Problem]:
    """What does not depend on the model."""
    yield from _pools(recipe)
    yield from _batch(recipe)


def check_split(recipe: Recipe, shape: ModelShape) -> Iterator[Problem]:
    """Whether the model can be divided as the recipe says, and has the context it asks for.

    A critic of its own shape is looked at with its files.
    """
    for role, split in recipe.megatron_roles.items():
        if not (isinstance(split, CriticConfig) and split.path is not None):
            yield from check_role_split(shape, split, role=role)
    if recipe.roles.rollout is not None:
        yield from _rollout_split(shape, recipe.roles.rollout, device=recipe.run.device)
    if recipe.max_context_tokens > shape.max_context_tokens:
        yield Problem(
            key="sampling.max_response_tokens",
            message=f"prompt {recipe.data.max_prompt_tokens} + response {recipe.sampling.max_response_tokens} = "
            f"{recipe.max_context_tokens} tokens exceed the model's context of {shape.max_context_tokens}",
        )
    yield from check_evaluation_context(recipe, shape)


def _pools(recipe: Recipe) -> Iterator[Problem]:
    pools, used = recipe.pools, recipe.used_pools
    rollout = recipe.roles.rollout
    known = ", ".join(sorted(pools))
    for role, pool in used.items():
        if pool not in pools:
            yield Problem(key=f"roles.{role}.pool", message=f"no pool named {pool}; pools are {known}")
    for role, split in recipe.megatron_roles.items():
        pool = used[role]
        if pool in pools and pools[pool].gpus % split.model_parallel:
            yield Problem(
                key=f"roles.{role}",
                message=f"tensor {split.tensor} * pipeline {split.pipeline} = {split.model_parallel} "
                f"does not divide the {pools[pool].gpus} gpus of pool {pool}",
            )
        elif pool in pools:
            stage_ranks = pools[pool].gpus // split.pipeline
            yield from check_expert_ranks(split, stage_ranks=stage_ranks, prefix=f"roles.{role}.")
    if rollout is not None and rollout.pool in pools:
        per_node = pools[rollout.pool].gpus_per_node
        if per_node % rollout.tensor:
            yield Problem(
                key="roles.rollout.tensor",
                message=f"{rollout.tensor} does not divide the {per_node} gpus of a node of pool {rollout.pool}; "
                "an engine stays on one node",
            )
        yield from check_engine_experts(tensor=rollout.tensor, expert=rollout.expert, prefix="roles.rollout.")
    for name in sorted(set(pools) - set(used.values())):
        yield Problem(key=f"pools.{name}", message="no role uses this pool; remove it or name it in a role")


def _batch(recipe: Recipe) -> Iterator[Problem]:
    train = recipe.train
    if train.prompts_per_update is not None and train.prompts_per_step % train.prompts_per_update:
        yield Problem(
            key="train.prompts_per_update",
            message=f"{train.prompts_per_update} does not divide train.prompts_per_step {train.prompts_per_step}",
        )
    longest = (
        f"one sequence of data.max_prompt_tokens {recipe.data.max_prompt_tokens} + "
        f"sampling.max_response_tokens {recipe.sampling.max_response_tokens}"
    )
    if recipe.max_context_tokens > train.tokens_per_micro_batch:
        yield Problem(
            key="train.tokens_per_micro_batch", message=f"{train.tokens_per_micro_batch} cannot hold {longest}"
        )
    rollout = recipe.roles.rollout
    cached_tokens = rollout.max_cached_tokens if rollout else None
    if cached_tokens is not None and recipe.max_context_tokens > cached_tokens:
        yield Problem(key="roles.rollout.max_cached_tokens", message=f"{cached_tokens} cannot hold {longest}")
    yield from _optimizer(train.optimizer, recipe, key="train.optimizer")
    if recipe.roles.critic is not None:
        yield from _critic(recipe.roles.critic, recipe)


def _critic(critic: CriticConfig, recipe: Recipe) -> Iterator[Problem]:
    yield from _optimizer(critic.optimizer, recipe, key="roles.critic.optimizer")
    if critic.prompts_per_update is not None and recipe.train.prompts_per_step % critic.prompts_per_update:
        yield Problem(
            key="roles.critic.prompts_per_update",
            message=f"{critic.prompts_per_update} does not divide train.prompts_per_step "
            f"{recipe.train.prompts_per_step}",
        )
    if critic.warmup_steps >= recipe.run.steps:
        yield Problem(
            key="roles.critic.warmup_steps",
            message=f"{critic.warmup_steps} leaves the actor none of run.steps {recipe.run.steps} to learn in",
        )


def _optimizer(optimizer: OptimizerConfig, recipe: Recipe, *, key: str) -> Iterator[Problem]:
    if optimizer.warmup_steps > recipe.run.steps:
        yield Problem(
            key=f"{key}.warmup_steps",
            message=f"{optimizer.warmup_steps} is more than run.steps {recipe.run.steps}; "
            "the learning rate would never be reached",
        )
    if optimizer.min_learning_rate > optimizer.learning_rate:
        yield Problem(
            key=f"{key}.min_learning_rate",
            message=f"{optimizer.min_learning_rate} is above learning_rate {optimizer.learning_rate}",
        )
    elif optimizer.min_learning_rate > 0 and optimizer.decay == "constant":
        yield Problem(
            key=f"{key}.min_learning_rate",
            message=f"{optimizer.min_learning_rate} is never reached with decay constant; set decay or remove it",
        )


def check_role_split(shape: ModelShape, split: ModelParallelConfig, *, role: str) -> Iterator[Problem]:
    """Yield what keeps Megatron from splitting a model of this shape as the role says."""
    prefix = f"roles.{role}."
    yield from check_megatron_split(shape, split, prefix=prefix)
    if shape.experts is None:
        yield from _no_experts(prefix, expert=split.expert > 1, expert_tensor=split.expert_tensor is not None)
    elif split.tensor > 1 and not split.is_sequence_parallel:
        yield Problem(
            key=f"{prefix}is_sequence_parallel",
            message=f"must be true for a mixture of experts with tensor {split.tensor}: "
            "each rank sends its own part of the tokens to the experts",
        )


def _rollout_split(shape: ModelShape, rollout: RolloutRoleConfig, *, device: Device) -> Iterator[Problem]:
    prefix = "roles.rollout."
    yield from check_engine_split(
        shape, tensor=rollout.tensor, expert=rollout.expert, pads_vocabulary=device == "cpu", prefix=prefix
    )
    if shape.experts is None:
        yield from _no_experts(prefix, expert=rollout.expert > 1)


def _no_experts(prefix: str, **is_set: bool) -> Iterator[Problem]:
    for name, is_claimed in is_set.items():
        if is_claimed:
            yield Problem(key=f"{prefix}{name}", message="the model has no experts; remove it")
