"""Small versions of a recipe, for tools that start one trainer and its engines on one machine. Pure.

`single_copy` keeps the model and computes what the recipe computes. `small_layouts` keeps every kind of split, for a
tiny model: a split by more than two is of the same kind as one by two, and the arithmetic of larger ones is checked
with `tiny_for_layouts`, without processes. `small_topology` keeps the pools and roles, for a rehearsal of a whole run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import lcm
from pathlib import Path

from megarl.config.algorithm import AlgorithmConfig, GrpoConfig
from megarl.config.draft import ModelDraftConfig
from megarl.config.lora import LoraConfig
from megarl.config.recipe import (
    CheckpointConfig,
    ClusterConfig,
    DataConfig,
    ModelConfig,
    NetworkConfig,
    ObserveConfig,
    Recipe,
    RolloutSamplesConfig,
    RunConfig,
    SamplingConfig,
    TrainConfig,
)
from megarl.config.reward import FunctionRewardConfig
from megarl.config.roles import (
    ActorConfig,
    EngineRoleConfig,
    ModelParallelConfig,
    PoolConfig,
    ReferenceConfig,
    RolesConfig,
)
from megarl.errors import ConfigError, MachineError, Problem
from megarl.families import family_of
from megarl.families.shape import ModelShape

_TRAINER, _ENGINE = "trainer", "engine"
_MAX_LORA_RANK = 4
_MAX_PARTS = 2
_VOCAB = 130
"""The trainer and the engine pad it to different sizes."""
_IN_BF16: dict[str, object] = {"precision": "bf16", "keep_bf16": ()}
_MAX_CONTEXT = 128
_REHEARSED_STEPS = 6
"""A node is killed after the first; the others leave time to notice it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallRecipe:
    recipe: Recipe
    notes: tuple[str, ...]
    """The differences from the original recipe."""


def single_copy(recipe: Recipe, *, name: str, num_devices: int) -> SmallRecipe:
    """Return the recipe with one copy of the policy and one engine, in the folder `name` inside the recipe's own.

    Where both together need more than `num_devices`, each takes one device.
    """
    _refuse_adapters(recipe.model)
    actor, rollout = recipe.roles.actor, recipe.roles.rollout
    if rollout is None:
        raise _refused("roles.rollout", "missing: there is no engine to compare the trainer with")
    if rollout.precision == "fp8":
        raise _refused("roles.rollout.precision", "fp8 engines have other weights than the trainer; set it to bf16")
    notes = [f"context {actor.context} of the trainer: compared with 1"] if actor.context > 1 else []
    actor = actor.model_copy(update={"context": 1})
    if actor.model_parallel + rollout.tensor > num_devices:
        if num_devices < 2:
            raise MachineError(f"a trainer and an engine need 2 devices, there is {num_devices}; use a larger machine")
        notes.append(
            f"tensor {actor.tensor} * pipeline {actor.pipeline} of the trainer and tensor {rollout.tensor} of the "
            f"engine need more than the {num_devices} devices here: compared with 1 each"
        )
        actor = actor.model_copy(
            update={"tensor": 1, "pipeline": 1, "virtual_pipeline": 1, "is_sequence_parallel": False}
        )
        rollout = rollout.model_copy(update={"tensor": 1})
    if recipe.run.device == "cuda":
        # A captured graph runs its kernels without calling the modules, so that hooks record nothing.
        graphs = {"cuda_graph_backend_decode": "disabled", "cuda_graph_backend_prefill": "disabled"}
        rollout = rollout.model_copy(update={"sglang": {**rollout.sglang, **graphs}})
        notes.append("the engine runs without CUDA graphs")
    pools = {
        _TRAINER: PoolConfig(gpus_per_node=actor.model_parallel),
        _ENGINE: PoolConfig(gpus_per_node=rollout.tensor),
    }
    roles = RolesConfig(
        actor=actor.model_copy(update={"pool": _TRAINER}),
        rollout=rollout.model_copy(update={"pool": _ENGINE, "endpoints": (), "publish_folder": None}),
    )
    run = recipe.run.model_copy(update={"folder": recipe.run_folder, "name": name})
    return SmallRecipe(recipe=recipe.model_copy(update=_sections(run, pools, roles)), notes=tuple(notes))


def small_layouts(recipe: Recipe, *, folder: Path, model_folder: Path, max_engines: int) -> SmallRecipe:
    """Return a recipe for the CPU with the model in `model_folder`, and with every split by at most two.

    The run folder is inside `folder`. The model must have the shape that `tiny_shape` returns for the actor.
    """
    actor, rollout = recipe.roles.actor, recipe.roles.rollout
    if rollout is None:
        raise _refused("roles.rollout", "missing: there is no engine to publish to")
    if rollout.pool is None:
        raise _refused("roles.rollout.endpoints", "engines that run already are published to by files; no layouts")
    _refuse_adapters(recipe.model)
    small_actor = _small_actor(actor)
    is_shared = actor.pool == rollout.pool
    # In a shared pool every further rank is a further engine.
    wanted_data = 1 if is_shared else min(_MAX_PARTS, recipe.data_parallel)
    num_ranks = small_actor.model_parallel * _small_data(small_actor, wanted_data)
    small_rollout = rollout.model_copy(update=_small_engines(rollout))
    pools = {small_actor.pool: PoolConfig(gpus_per_node=num_ranks)}
    if is_shared:
        if num_ranks % small_rollout.tensor:
            small_rollout = small_rollout.model_copy(update={"tensor": 1, "expert": 1})
    else:
        num_engines = min(max_engines, recipe.num_engines)
        pools[rollout.pool] = PoolConfig(gpus_per_node=num_engines * small_rollout.tensor)
    run = recipe.run.model_copy(update={"folder": folder, "name": "check-sync", "device": "cpu"})
    sections = _sections(run, pools, RolesConfig(actor=small_actor, rollout=small_rollout))
    model = recipe.model.model_copy(update={"path": model_folder})
    small = recipe.model_copy(update={**sections, "model": model})
    notes = []
    if (own := describe_layout(recipe)) != describe_layout(small):
        notes.append(f"the recipe's own layout is {own}: splits by more than two are by two here")
    if recipe.run.device != "cpu":
        notes.append("on the CPU in fp32, not on GPUs in bf16; the GPU's padding and KV replicas are in the rehearsal")
    return SmallRecipe(recipe=small, notes=tuple(notes))


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsalFiles:
    """The files of a rehearsal: a tiny model, prompts or demonstrations, and a reward that is right now and then."""

    model: Path
    data: Path
    reward: Path


def small_topology(recipe: Recipe, *, folder: Path, files: RehearsalFiles, max_nodes: int) -> SmallRecipe:
    """Return a recipe for the CPU with the same pools, roles and algorithm, and with every split by at most two.

    A pool of several nodes has at most `max_nodes`. The notes state each number that is another one.
    """
    roles = recipe.roles
    rehearsed = {"rollout", *roles.teachers}  # rewards have a stand-in
    for name in (name for name, role in roles.on_engines.items() if role.pool is None and name in rehearsed):
        raise _refused(f"roles.{name}.endpoints", "engines that run already cannot be rehearsed; name a pool")
    if recipe.algorithm.needs.rows == "pairs":
        raise _refused("algorithm.kind", f"{recipe.algorithm.kind} trains on pairs, which a rehearsal does not have")
    small_roles = _small_roles(roles, files.model)
    pools = {name: _small_pool(name, pool, roles, small_roles, max_nodes) for name, pool in recipe.pools.items()}
    small = Recipe(
        run=RunConfig(name="run", folder=folder, steps=_REHEARSED_STEPS, device="cpu", seed=recipe.run.seed),
        model=ModelConfig(path=files.model, lora=recipe.model.lora and _small_lora(recipe.model.lora)),
        data=DataConfig(train=(files.data,), max_prompt_tokens=16, is_shuffled=recipe.data.is_shuffled),
        cluster=ClusterConfig(node_timeout_s=recipe.cluster.node_timeout_s),
        pools=pools,
        roles=small_roles,
        algorithm=_small_algorithm(recipe.algorithm),
        sampling=_small_sampling(recipe.sampling),
        reward=FunctionRewardConfig(kind="function", path=files.reward, workers=1),
        train=_small_train(recipe.train),
        checkpoint=CheckpointConfig(save_every_steps=1),
        observe=ObserveConfig(rollouts=RolloutSamplesConfig(groups_per_step=0)),
        # Another network is the cluster's own, and no machine here is in it.
        network=recipe.network if recipe.network.bind == "private" else NetworkConfig(),
    )
    notes = [*_pool_changes(recipe.pools, pools), *_role_changes(roles, small_roles)]
    if roles.rollout is not None and small_roles.rollout is not None:
        engines = small.num_engines
        tensor = small_roles.rollout.tensor
        notes.append(f"engines: {recipe.num_engines} of TP{roles.rollout.tensor} -> {engines} of TP{tensor}")
        rollouts = small.sampling.rollouts_per_prompt
        own = recipe.sampling.rollouts_per_prompt
        limit = small.sampling.max_response_tokens
        notes.append(f"rollouts: {own} per prompt -> {rollouts}, of at most {limit} tokens")
    notes.append(f"a step: {recipe.train.prompts_per_step} prompts -> {small.train.prompts_per_step}")
    return SmallRecipe(recipe=small, notes=tuple(notes))


def _small_lora(lora: LoraConfig) -> LoraConfig:
    return lora.model_copy(update={"rank": min(lora.rank, _MAX_LORA_RANK), "path": None})


def _refuse_adapters(model: ModelConfig) -> None:
    if model.lora is not None:
        message = "whole models are compared here; `megarl export --merge`, then --set model.path=OUT model.lora=null"
        raise _refused("model.lora", message)


def _small_roles(roles: RolesConfig, model: Path) -> RolesConfig:
    critic, drafter = roles.critic, roles.drafter
    reference = roles.reference
    rollout = roles.rollout
    # A draft that is not taught shows nothing: here it is as large as the policy.
    draft = {"draft": drafter and ModelDraftConfig(kind="model", path=model, num_tokens=1)}
    trained: dict[str, object] = {"megatron_optimizer": {}, "megatron_ddp": {}}
    even: dict[str, object] = {"first_stage_layers": None, "last_stage_layers": None}
    same = even | {"path": None}
    learning = {"path": None, "prompts_per_update": None, "warmup_steps": 0}
    return RolesConfig(
        actor=roles.actor.model_copy(update=_small_split(roles.actor) | trained | even),
        critic=critic and critic.model_copy(update=_small_split(critic) | trained | even | learning),
        reference=reference
        and (reference.model_copy(update=_small_split(reference) | same) if reference.pool else ReferenceConfig()),
        drafter=drafter
        and drafter.model_copy(update=_small_split(drafter) | trained | even | {"every_steps": 1, "epochs": 1}),
        rollout=rollout and rollout.model_copy(update=_small_engines(rollout) | draft),
        teacher={
            name: each.model_copy(
                update=(_small_split(each) | even if each.kind == "ranks" else _small_engines(each))
                | {"model": model, "sources": (name,) * min(index, 1)}
            )
            for index, (name, each) in enumerate(roles.teacher.items())
        },
    )


def _small_pool(name: str, pool: PoolConfig, roles: RolesConfig, small: RolesConfig, max_nodes: int) -> PoolConfig:
    """Return the smallest pool of at most two devices a node, or more where the roles need them."""
    nodes = min(max_nodes, pool.nodes)
    per_node = min(_MAX_PARTS, pool.gpus_per_node)
    splits = [split for role, split in small.megatron_roles.items() if small.used_pools[role] == name]
    tensor = small.rollout.tensor if small.rollout is not None and small.rollout.pool == name else 1
    if roles.rollout is not None and roles.rollout.pool == name and roles.rollout.tensor > pool.gpus_per_node:
        # An engine over several whole nodes.
        nodes = max(nodes, tensor)
        per_node = 1
    while any(nodes * per_node % _ranks_needed(split) for split in splits) or nodes * per_node % tensor:
        per_node += 1
    return PoolConfig(nodes=nodes, gpus_per_node=per_node)


def _ranks_needed(split: ModelParallelConfig) -> int:
    """Return the number that the ranks of a model are a multiple of."""
    return lcm(split.model_parallel, split.pipeline * split.expert * split.ranks_per_expert)


def _small_algorithm(algorithm: AlgorithmConfig) -> AlgorithmConfig:
    if algorithm.overlong is None:
        return algorithm
    buffer_tokens = algorithm.overlong.buffer_tokens
    overlong = algorithm.overlong.model_copy(update={"buffer_tokens": buffer_tokens and min(2, buffer_tokens)})
    return algorithm.model_copy(update={"overlong": overlong})


def _small_sampling(sampling: SamplingConfig) -> SamplingConfig:
    return sampling.model_copy(
        update={"rollouts_per_prompt": min(4, sampling.rollouts_per_prompt), "max_response_tokens": 6}
    )


def _small_train(train: TrainConfig) -> TrainConfig:
    """Return eight prompts a step, in two updates where the recipe has several, with the recipe's staleness."""
    has_updates = train.prompts_per_update not in (None, train.prompts_per_step)
    optimizer = train.optimizer.model_copy(update={"warmup_steps": 0, "warmup_share": 0.0})
    return TrainConfig(
        prompts_per_step=8,
        prompts_per_update=4 if has_updates else None,
        epochs=train.epochs,
        tokens_per_micro_batch=128,
        max_staleness=train.max_staleness,
        optimizer=optimizer,
    )


def _pool_changes(pools: Mapping[str, PoolConfig], small: Mapping[str, PoolConfig]) -> Iterator[str]:
    for name, pool in pools.items():
        if pool != small[name]:
            nodes, devices = small[name].nodes, small[name].gpus_per_node
            yield f"pools.{name}: {pool.nodes} node(s) of {pool.gpus_per_node} -> {nodes} of {devices}"


def _role_changes(roles: RolesConfig, small: RolesConfig) -> Iterator[str]:
    for role, split in roles.megatron_roles.items():
        own, changed = _describe_split(split), _describe_split(small.megatron_roles[role])
        if own != changed:
            yield f"roles.{role}: {own} -> {changed}"


def describe_layout(recipe: Recipe) -> str:
    """Return the layouts of the trainer and the engines in one line."""
    actor, rollout = recipe.roles.actor, recipe.roles.rollout
    assert rollout is not None, "layouts without engines"
    trainer = f"{_describe_split(actor)} DP{recipe.data_parallel}"
    ranks = recipe.pools[actor.pool].gpus
    expert = f" EP{rollout.expert}" if rollout.expert > 1 else ""
    pools = "one pool" if actor.pool == rollout.pool else "separate pools"
    engines = f"{recipe.num_engines} engine(s) of TP{rollout.tensor}{expert}"
    return f"trainer {trainer} ({ranks} ranks) -> {engines}, {pools}"


def _describe_split(split: ModelParallelConfig) -> str:
    parts = [f"TP{split.tensor}", f"PP{split.pipeline}"]
    sizes = {"VPP": split.virtual_pipeline, "CP": split.context}
    parts += [f"{name}{size}" for name, size in sizes.items() if size > 1]
    if split.expert > 1:
        parts += [f"EP{split.expert}", f"ETP{split.ranks_per_expert}"]
    return " ".join(parts)


def tiny_shape(shape: ModelShape, actor: ActorConfig) -> ModelShape:
    """Return a tiny model of the same family that the layouts of `small_layouts` divide."""
    experts = shape.experts
    tiny = replace(
        shape,
        num_layers=_num_layers(actor),
        hidden=64,
        head_dim=16,
        num_heads=4,
        num_kv_heads=2 if shape.num_kv_heads < shape.num_heads else 4,
        ffn_hidden=128,
        vocab=_VOCAB,
        max_context_tokens=_MAX_CONTEXT,
        dtype="float32",
        experts=None if experts is None else replace(experts, num=8, per_token=2, shared=min(128, experts.shared)),
        dense_hidden=min(128, shape.dense_hidden),
    )
    return family_of(shape).tiny(tiny)


def tiny_for_layouts(roles: RolesConfig, shape: ModelShape) -> tuple[RolesConfig, ModelShape]:
    """Return the roles with their own layouts, and a tiny shape that these divide.

    The numbers of heads and stages are the model's. A stage with its own number of layers has one layer, and each rank
    has two experts.
    """
    actor, rollout = roles.actor, roles.rollout
    assert rollout is not None, "layouts without engines"
    ends = {"first_stage_layers": actor.first_stage_layers, "last_stage_layers": actor.last_stage_layers}
    actor = actor.model_copy(update={key: 1 for key, given in ends.items() if given is not None})
    experts = shape.experts
    ffn = 4 * lcm(actor.ranks_per_expert, actor.tensor, rollout.tensor)
    tiny = replace(
        shape,
        num_layers=_num_layers(actor),
        hidden=8,
        head_dim=2,
        ffn_hidden=ffn,
        vocab=_VOCAB,
        max_context_tokens=_MAX_CONTEXT,
        experts=None
        if experts is None
        else replace(experts, num=2 * lcm(actor.expert, rollout.expert), shared=min(ffn, experts.shared)),
        dense_hidden=min(ffn, shape.dense_hidden),
    )
    tiny = family_of(shape).tiny(tiny)
    return roles.model_copy(update={"actor": actor, "rollout": rollout.model_copy(update=_IN_BF16)}), tiny


def _refused(key: str, message: str) -> ConfigError:
    return ConfigError("recipe", (Problem(key=key, message=message),))


def _sections(run: RunConfig, pools: Mapping[str, PoolConfig], roles: RolesConfig) -> dict[str, object]:
    """Return the changed sections, with an algorithm that needs no role but the actor and the engines."""
    return {"run": run, "pools": pools, "roles": roles, "algorithm": GrpoConfig(kind="grpo")}


def _small_actor(actor: ActorConfig) -> ActorConfig:
    stages = {
        key: None if given is None else 1
        for key, given in (("first", actor.first_stage_layers), ("last", actor.last_stage_layers))
    }
    return actor.model_copy(
        update=_small_split(actor)
        | {
            "first_stage_layers": stages["first"],
            # Of two stages, only one can have its own number of layers; the other one has the rest.
            "last_stage_layers": stages["last"] if stages["first"] is None else None,
            "megatron_optimizer": {},
            "megatron_ddp": {},
        }
    )


def _small_split(split: ModelParallelConfig) -> dict[str, object]:
    tensor = min(_MAX_PARTS, split.tensor)
    return {
        "tensor": tensor,
        "pipeline": min(_MAX_PARTS, split.pipeline),
        "virtual_pipeline": min(_MAX_PARTS, split.virtual_pipeline),
        "context": min(_MAX_PARTS, split.context),
        "is_sequence_parallel": tensor > 1 and (split.is_sequence_parallel or split.expert > 1),
        "expert": min(_MAX_PARTS, split.expert),
        "expert_tensor": None if split.expert_tensor is None else min(tensor, split.expert_tensor),
        "megatron": {},
    }


def _small_data(actor: ActorConfig, wanted: int) -> int:
    """Return the smallest data-parallel size, at least `wanted`, that the experts divide."""
    of_experts = actor.expert * actor.ranks_per_expert
    while actor.tensor * actor.context * wanted % of_experts:
        wanted += 1
    return wanted


def _small_engines(role: EngineRoleConfig) -> dict[str, object]:
    tensor = min(_MAX_PARTS, role.tensor)
    small: dict[str, object] = {"tensor": tensor, "expert": min(tensor, role.expert), "max_running_requests": 8}
    return small | {"max_cached_tokens": None, "sglang": {}} | (_IN_BF16 if role.fp8_keep is not None else {})


def _num_layers(actor: ActorConfig) -> int:
    """Return two layers per stage, or one per virtual stage; stages with their own number of layers have one."""
    per_stage = 2 if actor.virtual_pipeline == 1 else 1
    num_uneven = sum(given is not None for given in (actor.first_stage_layers, actor.last_stage_layers))
    return per_stage * actor.pipeline * actor.virtual_pipeline - num_uneven
