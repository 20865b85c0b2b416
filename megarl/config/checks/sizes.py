"""Whether the numbers of a recipe divide and fit: pools, batches, and the model over its ranks. Opens no file."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.checks.evaluation import check_evaluation_context
from megarl.config.model import Experts, ModelShape
from megarl.config.recipe import (
    CriticConfig,
    ModelParallelConfig,
    OptimizerConfig,
    Recipe,
    RolloutRoleConfig,
)
from megarl.errors import Problem

_ENGINE_VOCAB_STEP = 64
"""SGLang pads the vocabulary to a multiple of this before it divides it."""


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
            yield from check_megatron_split(shape, split, key=f"roles.{role}")
    if recipe.roles.rollout is not None:
        yield from _engine_split(shape, recipe.roles.rollout, device=recipe.run.device)
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
        elif pool in pools and pools[pool].gpus // split.pipeline % (split.expert * split.ranks_per_expert):
            yield Problem(
                key=f"roles.{role}.expert",
                message=f"expert {split.expert} * expert_tensor {split.ranks_per_expert} = "
                f"{split.expert * split.ranks_per_expert} does not divide the "
                f"{pools[pool].gpus // split.pipeline} gpus of a pipeline stage",
            )
    if rollout is not None and rollout.pool in pools:
        per_node = pools[rollout.pool].gpus_per_node
        if per_node % rollout.tensor:
            yield Problem(
                key="roles.rollout.tensor",
                message=f"{rollout.tensor} does not divide the {per_node} gpus of a node of pool {rollout.pool}; "
                "an engine stays on one node",
            )
        if rollout.tensor % rollout.expert:
            yield _indivisible_gpus(rollout)
    for name in sorted(set(pools) - set(used.values())):
        yield Problem(key=f"pools.{name}", message="no role uses this pool; remove it or name it in a role")


def _indivisible_gpus(rollout: RolloutRoleConfig) -> Problem:
    return Problem(
        key="roles.rollout.expert",
        message=f"{rollout.expert} does not divide the {rollout.tensor} gpus of an engine (roles.rollout.tensor)",
    )


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


def check_megatron_split(shape: ModelShape, split: ModelParallelConfig, *, key: str) -> Iterator[Problem]:
    yield from _head_split(shape, split.tensor, key=f"{key}.tensor")
    if shape.experts is None:
        yield from _ffn_split(shape, split.tensor, key=f"{key}.tensor")
        yield from _no_experts(key, expert=split.expert > 1, expert_tensor=split.expert_tensor is not None)
    else:
        yield from _ffn_split(shape, split.ranks_per_expert, key=f"{key}.expert_tensor")
        yield from _expert_split(shape.experts, split, key=key)
    uneven = [layers for layers in (split.first_stage_layers, split.last_stage_layers) if layers is not None]
    if uneven:
        yield from _uneven_stages(shape, split, uneven, key=key)
        return
    chunks = split.pipeline * split.virtual_pipeline
    if shape.num_layers % chunks:
        yield Problem(
            key=f"{key}.pipeline",
            message=f"pipeline {split.pipeline} * virtual_pipeline {split.virtual_pipeline} = {chunks} "
            f"does not divide the model's {shape.num_layers} layers; choose one of {_divisors(shape.num_layers)}, "
            "or set first_stage_layers or last_stage_layers",
        )


def _no_experts(key: str, **is_set: bool) -> Iterator[Problem]:
    for name, is_claimed in is_set.items():
        if is_claimed:
            yield Problem(key=f"{key}.{name}", message="the model has no experts; remove it")


def _uneven_stages(shape: ModelShape, split: ModelParallelConfig, uneven: list[int], *, key: str) -> Iterator[Problem]:
    stages, layers = split.pipeline - len(uneven), shape.num_layers - sum(uneven)
    if (layers % stages if stages else layers) or layers < stages:
        given = " and ".join(str(number) for number in uneven)
        yield Problem(
            key=f"{key}.pipeline",
            message=f"with {given} of the model's {shape.num_layers} layers given, {stages} other stages "
            f"cannot have {layers} in equal parts",
        )


def _expert_split(experts: Experts, split: ModelParallelConfig, *, key: str) -> Iterator[Problem]:
    if experts.num % split.expert:
        yield _indivisible(f"{key}.expert", split.expert, "experts", experts.num)
    if split.tensor > 1 and not split.is_sequence_parallel:
        yield Problem(
            key=f"{key}.is_sequence_parallel",
            message=f"must be true for a mixture of experts with tensor {split.tensor}: "
            "each rank sends its own part of the tokens to the experts",
        )


def _engine_split(shape: ModelShape, rollout: RolloutRoleConfig, *, device: str) -> Iterator[Problem]:
    key = "roles.rollout.tensor"
    yield from _head_split(shape, rollout.tensor, key=key)
    if rollout.tensor % rollout.expert == 0:
        yield from _ffn_split(shape, rollout.tensor // rollout.expert, key=key)
    if shape.experts is None:
        yield from _no_experts("roles.rollout", expert=rollout.expert > 1)
    elif shape.experts.num % rollout.expert:
        yield _indivisible("roles.rollout.expert", rollout.expert, "experts", shape.experts.num)
    padded = -(-shape.vocab // _ENGINE_VOCAB_STEP) * _ENGINE_VOCAB_STEP
    if device == "cuda" and padded % rollout.tensor:
        yield Problem(
            key=key,
            message=f"{rollout.tensor} does not divide the model's vocabulary of {shape.vocab}, padded to {padded}",
        )


def _head_split(shape: ModelShape, tensor: int, *, key: str) -> Iterator[Problem]:
    if shape.num_heads % tensor:
        yield _indivisible(key, tensor, "attention heads", shape.num_heads)
    elif shape.num_kv_heads % tensor and tensor % shape.num_kv_heads:
        # A multiple is fine: then several ranks share a head.
        yield Problem(
            key=key,
            message=f"{tensor} is neither a divisor nor a multiple of the model's {shape.num_kv_heads} key/value heads",
        )


def _ffn_split(shape: ModelShape, tensor: int, *, key: str) -> Iterator[Problem]:
    if shape.ffn_hidden % tensor:
        yield _indivisible(key, tensor, "intermediate size", shape.ffn_hidden)


def _indivisible(key: str, size: int, what: str, count: int) -> Problem:
    message = f"{size} does not divide the model's {count} {what}; choose one of {_divisors(count)}"
    return Problem(key=key, message=message)


def _divisors(count: int) -> str:
    return ", ".join(str(number) for number in range(1, min(count, 64) + 1) if count % number == 0)
