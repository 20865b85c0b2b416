"""Whether roles fit their pools, batches fit the roles, and the model can be split over its ranks. Opens no file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megarl.config.algorithm import AlgorithmConfig
from megarl.config.checks.splits import (
    check_deep_layers,
    check_engine_experts,
    check_engine_split,
    check_expert_ranks,
    check_head,
    check_megatron_split,
    check_stages,
)
from megarl.config.kernels import check_blocks, check_widths
from megarl.config.lora import LoraConfig, check_lora
from megarl.config.recipe import DataConfig, Recipe, SamplingConfig, TrainConfig
from megarl.config.roles import (
    CriticConfig,
    DrafterConfig,
    EngineRoleConfig,
    ModelParallelConfig,
    OptimizerConfig,
    PoolConfig,
    RolesConfig,
    RolloutRoleConfig,
    TeacherRanksConfig,
)
from megarl.config.section import Device
from megarl.errors import Problem
from megarl.families import family_of
from megarl.families.shape import ModelShape

_KEYS_OF_STARTED_ENGINES = (
    "tensor",
    "expert",
    "max_cached_tokens",
    "memory_fraction",
    "release",
    "is_deterministic",
    "start_timeout_s",
    "sglang",
    "precision",
    "keep_bf16",
    "draft",
)


def check_step(recipe: Recipe) -> Iterator[Problem]:
    """Yield what is wrong with pools and batches, whatever the model."""
    roles = recipe.roles
    train = recipe.train
    steps = recipe.run.max_steps
    yield from _pools(recipe.pools, roles)
    if train.prompts_per_update is not None and train.prompts_per_step % train.prompts_per_update:
        yield Problem(
            key="train.prompts_per_update",
            message=f"{train.prompts_per_update} does not divide train.prompts_per_step {train.prompts_per_step}",
        )
    yield from _lengths(recipe.data, recipe.sampling, train, roles)
    yield from check_optimizer(train.optimizer, steps, key="train.optimizer")
    if roles.critic is not None:
        yield from _critic(roles.critic, train, steps)


def check_split(recipe: Recipe, shape: ModelShape) -> Iterator[Problem]:
    """Yield what keeps the model from being split as the recipe says, or from holding the recipe's sequences.

    Teachers, a drafter, and a critic that starts from a folder of its own are checked with their own shapes.
    """
    for role, split in recipe.roles.megatron_roles.items():
        is_elsewhere = isinstance(split, CriticConfig) and split.path is not None
        has_own_shape = is_elsewhere or isinstance(split, TeacherRanksConfig | DrafterConfig)
        if not has_own_shape:
            yield from check_role_split(shape, split, role=role)
    yield from _value_head(recipe, shape)
    if recipe.model.lora is not None:
        yield from check_lora(recipe.model.lora, shape)
    if recipe.roles.rollout is not None:
        yield from check_head(shape, key="model.path")
        yield from _rollout_split(shape, recipe.roles.rollout, device=recipe.run.device)
        yield from check_blocks(shape, recipe.roles.actor, recipe.roles.rollout)
        if recipe.replays_routing(shape):
            yield from _routes(recipe.roles.rollout)
    if shape.experts is None and recipe.train.routing is not None:
        yield Problem(key="train.routing", message="the model has no experts; remove it")
    lengths = {"sampling.max_response_tokens": recipe.sampling.max_response_tokens}
    if recipe.evaluation is not None and recipe.evaluation.max_response_tokens is not None:
        lengths["evaluation.max_response_tokens"] = recipe.evaluation.max_response_tokens
    prompt = recipe.data.max_prompt_tokens
    for key, response in lengths.items():
        if prompt + response > shape.max_context_tokens:
            yield Problem(
                key=key,
                message=f"prompt {prompt} + response {response} = {prompt + response} tokens exceed the model's "
                f"context of {shape.max_context_tokens}",
            )


def _value_head(recipe: Recipe, shape: ModelShape) -> Iterator[Problem]:
    """Yield why a model that starts from the policy's folder cannot have one output per token."""
    needs, critic, reason = recipe.algorithm.needs, recipe.roles.critic, family_of(shape).refuses.get("critic")
    is_critic = critic is not None and critic.path is None and needs.implicit_reward_beta is None
    if reason is not None and (is_critic or needs.is_scorer):
        yield Problem(key="roles.critic" if is_critic else "algorithm.kind", message=reason)


def check_role_split(shape: ModelShape, split: ModelParallelConfig, *, role: str) -> Iterator[Problem]:
    """Yield what keeps Megatron from splitting a model of this shape as the role says."""
    prefix = f"roles.{role}."
    yield from check_megatron_split(shape, split, prefix=prefix)
    yield from check_deep_layers(shape, split, prefix=prefix)
    if split.context_exchange != "gather" and (shape.latent or shape.window or shape.has_sinks or shape.delta):
        others = "windows, sinks, delta nets or values of another width"
        message = f"{split.context_exchange} was not tried with {others}; set it to gather"
        yield Problem(key=f"{prefix}context_exchange", message=message)
    if shape.experts is None:
        yield from _no_experts(
            prefix,
            expert=split.expert > 1,
            expert_tensor=split.expert_tensor is not None,
            dispatcher=split.dispatcher != "alltoall",
        )
    elif split.tensor > 1 and not split.is_sequence_parallel:
        yield Problem(
            key=f"{prefix}is_sequence_parallel",
            message=f"must be true for a mixture of experts with tensor {split.tensor}: "
            "each rank sends its own part of the tokens to the experts",
        )
    yield from check_widths(shape, split, prefix=prefix)


def check_unused_keys(roles: RolesConfig) -> Iterator[Problem]:
    """Yield keys of roles that are set and have no effect."""
    for role, split in roles.megatron_roles.items():
        yield from check_stages(split, prefix=f"roles.{role}.")
        if split.is_sequence_parallel and split.tensor == 1:
            yield Problem(key=f"roles.{role}.is_sequence_parallel", message="does nothing with tensor 1; remove it")
        if split.expert == 1 and split.expert_tensor not in (None, split.tensor):
            yield Problem(
                key=f"roles.{role}.expert_tensor",
                message="needs expert > 1; without it tensor divides experts like everything else; remove it",
            )
    engine_pool = None if roles.rollout is None else roles.rollout.pool
    yield from _offload(roles, engine_pool)
    if roles.rollout is not None and roles.rollout.release is not None and engine_pool:
        yield from _release(roles, roles.rollout.release)
    reference = roles.reference
    if reference is not None and reference.pool is None:
        for name in sorted(reference.model_fields_set - {"pool", "path"}):
            yield Problem(
                key=f"roles.reference.{name}",
                message="has no effect in the actor's ranks, which split it like the actor; remove it or name a pool",
            )


def _release(roles: RolesConfig, release: str) -> Iterator[Problem]:
    pool = roles.used_pools["rollout"]
    key = "roles.rollout.release"
    if not roles.beside_engines:
        message = f"{release} is what engines give up for trainers, and none are in pool {pool}; remove it"
        yield Problem(key=key, message=message)
    elif release == "nothing" and (others := roles.in_turns_with_engines):
        yield Problem(key=key, message=f"nothing leaves no room for {others[0]}; set it to kv_cache")


def _offload(roles: RolesConfig, engine_pool: str | None) -> Iterator[Problem]:
    for role, trained in roles.trained.items():
        if trained.offload == "nothing" or trained.pool == engine_pool:
            continue
        if trained.pool not in roles.frozen_in_turns.values():
            yield Problem(
                key=f"roles.{role}.offload",
                message=f"{trained.offload} makes room for engines, and none are in pool {trained.pool}; remove it",
            )
        elif role != "critic" and trained.offload == "everything":
            message = "everything takes weights away that engines in another pool may need; set it to optimizer"
            yield Problem(key=f"roles.{role}.offload", message=message)


def check_lora_roles(roles: RolesConfig, *, is_served: bool) -> Iterator[Problem]:
    """Yield keys of roles that contradict `model.lora`, or have no effect beside an adapter that engines serve."""
    rollout, reference = roles.rollout, roles.reference
    if rollout is not None and rollout.endpoints:
        message = "engines that run already get whole models, and model.lora trains an adapter; name a pool instead"
        yield Problem(key="roles.rollout.endpoints", message=message)
    if is_served and rollout is not None and rollout.release == "everything":
        message = "everything would give up the base, and a publish brings adapters only; use kv_cache with model.lora"
        yield Problem(key="roles.rollout.release", message=message)
    for name in ("in_flight", "relays_weights"):
        if is_served and rollout is not None and name in rollout.model_fields_set:
            message = "has no effect with model.lora: running requests keep their adapter; remove it"
            yield Problem(key=f"roles.rollout.{name}", message=message)
    if reference is not None and reference.pool is None and reference.path is not None:
        message = "with model.lora the reference is the base in the actor's ranks; remove it, or name a pool"
        yield Problem(key="roles.reference.path", message=message)


def check_dropout(lora: LoraConfig, algorithm: AlgorithmConfig, roles: RolesConfig) -> Iterator[Problem]:
    """Yield why an update may not leave out inputs of adapters."""
    key = "model.lora.dropout"
    if lora.dropout and algorithm.needs.has_engines:
        message = (
            f"with {algorithm.kind} the policy that is trained would not be the one that generated; set it to 0: it is "
            "for answers of the data (sft, dpo)"
        )
        yield Problem(key=key, message=message)
    for role, split in roles.megatron_roles.items():
        modules = split.megatron.get("recompute_modules")
        if lora.dropout and split.pipeline > 1 and isinstance(modules, list) and "mlp" in modules:
            message = (
                f"roles.{role}.megatron recomputes mlp alone, when other micro-batches have passed it; set dropout to "
                "0, or recompute_granularity to full"
            )
            yield Problem(key=key, message=message)


def check_endpoints(role: str, engines: EngineRoleConfig) -> Iterator[Problem]:
    """Yield what contradicts the choice between engines that are started and engines that run already."""
    key = f"roles.{role}"
    if not engines.endpoints:
        if engines.pool is None:
            message = "missing; name a pool, or engines that run already in endpoints"
            yield Problem(key=f"{key}.pool", message=message)
        if isinstance(engines, RolloutRoleConfig) and engines.publish_folder is not None:
            message = "only engines of endpoints are published to by files; remove it"
            yield Problem(key=f"{key}.publish_folder", message=message)
        return
    if engines.pool is not None:
        message = "endpoints are engines that run already, and a pool is for starting engines; remove one"
        yield Problem(key=f"{key}.endpoints", message=message)
    for name in sorted(engines.model_fields_set.intersection(_KEYS_OF_STARTED_ENGINES)):
        message = "has no effect on engines that run already; remove it, and start them with it"
        yield Problem(key=f"{key}.{name}", message=message)
    urls = [endpoint.url for endpoint in engines.endpoints]
    for url in sorted({url for url in urls if urls.count(url) > 1}):
        yield Problem(key=f"{key}.endpoints", message=f"{url} is given twice; name each engine once")


def _pools(pools: Mapping[str, PoolConfig], roles: RolesConfig) -> Iterator[Problem]:
    used = roles.used_pools
    names = ", ".join(sorted(pools))
    for role, pool in used.items():
        if pool not in pools:
            yield Problem(key=f"roles.{role}.pool", message=f"no pool named {pool}; pools are {names}")
    for role, split in roles.megatron_roles.items():
        pool = used[role]
        if pool in pools and pools[pool].gpus % split.model_parallel:
            yield Problem(
                key=f"roles.{role}",
                message=f"{_product(split)} = {split.model_parallel} "
                f"does not divide the {pools[pool].gpus} gpus of pool {pool}",
            )
        elif pool in pools:
            yield from _tensor_groups(split.tensor, pools[pool], role=role, pool_name=pool)
            stage_ranks = pools[pool].gpus // split.pipeline
            yield from check_expert_ranks(split, stage_ranks=stage_ranks, prefix=f"roles.{role}.")
    for role, engines in roles.on_engines.items():
        if engines.pool is None or engines.pool not in pools:
            continue
        yield from _tensor_groups(engines.tensor, pools[engines.pool], role=role, pool_name=engines.pool)
        if (gpus := pools[engines.pool].gpus) % engines.tensor:
            message = f"engines of {engines.tensor} gpus do not fill the {gpus} gpus of pool {engines.pool}"
            yield Problem(key=f"roles.{role}.tensor", message=message)
        yield from check_engine_experts(tensor=engines.tensor, expert=engines.expert, prefix=f"roles.{role}.")
    for name in sorted(set(pools) - set(used.values())):
        yield Problem(key=f"pools.{name}", message="no role uses this pool; remove it or name it in a role")


def _product(split: ModelParallelConfig) -> str:
    sizes = {"tensor": split.tensor, "context": split.context, "pipeline": split.pipeline}
    return " * ".join(f"{name} {size}" for name, size in sizes.items() if name != "context" or size > 1)


def _tensor_groups(tensor: int, pool: PoolConfig, *, role: str, pool_name: str) -> Iterator[Problem]:
    """Yield a problem where the ranks of one tensor-parallel group would be spread over parts of nodes."""
    per_node = pool.gpus_per_node
    if pool.nodes > 1 and per_node % tensor and tensor % per_node:
        yield Problem(
            key=f"roles.{role}.tensor",
            message=f"{tensor} and the {per_node} gpus of a node of pool {pool_name} do not divide one another; "
            "a tensor-parallel group has a share of one node or several whole nodes",
        )


def _lengths(data: DataConfig, sampling: SamplingConfig, train: TrainConfig, roles: RolesConfig) -> Iterator[Problem]:
    num_tokens = data.max_prompt_tokens + sampling.max_response_tokens
    longest = (
        f"one sequence of data.max_prompt_tokens {data.max_prompt_tokens} + "
        f"sampling.max_response_tokens {sampling.max_response_tokens}"
    )
    if train.tokens_per_micro_batch is None:
        pass  # the plan chooses enough
    elif num_tokens > train.tokens_per_micro_batch:
        yield Problem(
            key="train.tokens_per_micro_batch", message=f"{train.tokens_per_micro_batch} cannot hold {longest}"
        )
    else:
        multiples = {role: split.sequence_multiple for role, split in roles.megatron_roles.items()}
        role = max(multiples, key=multiples.__getitem__)
        padded = -(-num_tokens // multiples[role]) * multiples[role]
        if padded > train.tokens_per_micro_batch:
            yield Problem(
                key="train.tokens_per_micro_batch",
                message=f"{train.tokens_per_micro_batch} cannot hold {longest}, padded to {padded}: a multiple of "
                f"2 * roles.{role}.context",
            )
    if train.tokens_per_tree is not None and train.tokens_per_tree < (train.tokens_per_micro_batch or num_tokens):
        yield Problem(
            key="train.tokens_per_tree",
            message=f"{train.tokens_per_tree} is less than train.tokens_per_micro_batch or the longest sequence; leave "
            "it out, or raise it",
        )
    cached_tokens = roles.rollout.max_cached_tokens if roles.rollout else None
    if cached_tokens is not None and num_tokens > cached_tokens:
        yield Problem(key="roles.rollout.max_cached_tokens", message=f"{cached_tokens} cannot hold {longest}")


def _critic(critic: CriticConfig, train: TrainConfig, steps: int) -> Iterator[Problem]:
    yield from check_optimizer(critic.optimizer, steps, key="roles.critic.optimizer")
    if critic.prompts_per_update is not None and train.prompts_per_step % critic.prompts_per_update:
        yield Problem(
            key="roles.critic.prompts_per_update",
            message=f"{critic.prompts_per_update} does not divide train.prompts_per_step {train.prompts_per_step}",
        )
    if critic.warmup_steps >= steps:
        yield Problem(
            key="roles.critic.warmup_steps",
            message=f"{critic.warmup_steps} leaves the actor no step of run.steps {steps} to learn",
        )


def check_optimizer(optimizer: OptimizerConfig, steps: int, *, key: str) -> Iterator[Problem]:
    """Yield what an optimizer never reaches in so many steps, or is told twice."""
    if optimizer.warmup_steps > steps:
        yield Problem(
            key=f"{key}.warmup_steps",
            message=f"{optimizer.warmup_steps} is more than run.steps {steps}; "
            "the learning rate would never be reached",
        )
    if optimizer.warmup_steps and optimizer.warmup_share:
        yield Problem(key=f"{key}.warmup_share", message="warmup_steps is given as well; remove one of the two")
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


def _rollout_split(shape: ModelShape, rollout: RolloutRoleConfig, *, device: Device) -> Iterator[Problem]:
    prefix = "roles.rollout."
    yield from check_engine_split(
        shape, tensor=rollout.tensor, expert=rollout.expert, pads_vocabulary=device == "cpu", prefix=prefix
    )
    if shape.experts is None:
        yield from _no_experts(prefix, expert=rollout.expert > 1)


def _routes(rollout: RolloutRoleConfig) -> Iterator[Problem]:
    """Yield options of SGLang with which it loses the experts of a token, or gives those of another."""
    chunk = rollout.sglang.get("chunked_prefill_size")
    if isinstance(chunk, int) and chunk <= 0:
        message = f"{chunk} leaves no room to record experts; remove it, or set train.routing: live"
        yield Problem(key="roles.rollout.sglang.chunked_prefill_size", message=message)
    for name in ("enable_hierarchical_cache", "enable_lmcache"):
        if rollout.sglang.get(name):
            message = "tokens come back from it without their experts; remove it, or set train.routing: live"
            yield Problem(key=f"roles.rollout.sglang.{name}", message=message)


def _no_experts(prefix: str, **is_set: bool) -> Iterator[Problem]:
    for name, is_claimed in is_set.items():
        if is_claimed:
            yield Problem(key=f"{prefix}{name}", message="the model has no experts; remove it")
