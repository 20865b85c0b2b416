"""Small versions of a recipe, for tools that start one trainer and its engines on one machine. Pure.

`single_copy` keeps the model and computes what the recipe computes. `small_layouts` keeps every kind of split, for a
tiny model: a split by more than two is of the same kind as one by two, and the arithmetic of larger ones is checked
with `tiny_for_layouts`, without processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import lcm
from pathlib import Path

from megarl.config.algorithm import GrpoConfig
from megarl.config.model import Experts, ModelShape
from megarl.config.recipe import Recipe, RunConfig
from megarl.config.roles import ActorConfig, PoolConfig, RolesConfig, RolloutRoleConfig
from megarl.errors import ConfigError, MachineError, Problem

_TRAINER, _ENGINE = "trainer", "engine"
_MAX_PARTS = 2
_VOCAB = 130
"""The trainer and the engine pad it to different sizes."""
_MAX_CONTEXT = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallRecipe:
    recipe: Recipe
    notes: tuple[str, ...]
    """How it differs from the given recipe."""


def single_copy(recipe: Recipe, *, name: str, num_devices: int) -> SmallRecipe:
    """Return the recipe with one copy of the policy and one engine, in the folder `name` inside the recipe's own.

    Where both together need more than `num_devices`, each takes one device.
    """
    actor, rollout = recipe.roles.actor, recipe.roles.rollout
    if rollout is None:
        raise _missing_engine("missing: there is no engine to compare the trainer with")
    notes = []
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
        raise _missing_engine("missing: there is no engine to publish to")
    if rollout.pool is None:
        message = "engines that run already are published to by files; there are no layouts to check"
        raise ConfigError("recipe", (Problem(key="roles.rollout.endpoints", message=message),))
    small_actor = _small_actor(actor)
    is_shared = actor.pool == rollout.pool
    # In a shared pool every further rank is a further engine.
    wanted_data = 1 if is_shared else min(_MAX_PARTS, recipe.data_parallel)
    num_ranks = small_actor.model_parallel * _small_data(small_actor, wanted_data)
    small_rollout = _small_rollout(rollout)
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


def describe_layout(recipe: Recipe) -> str:
    """Return the layouts of the trainer and the engines in one line."""
    actor, rollout = recipe.roles.actor, recipe.roles.rollout
    assert rollout is not None, "layouts without engines"
    parts = [f"TP{actor.tensor}", f"PP{actor.pipeline}"]
    if actor.virtual_pipeline > 1:
        parts.append(f"VPP{actor.virtual_pipeline}")
    if actor.expert > 1:
        parts += [f"EP{actor.expert}", f"ETP{actor.ranks_per_expert}"]
    parts.append(f"DP{recipe.data_parallel}")
    ranks = recipe.pools[actor.pool].gpus
    expert = f" EP{rollout.expert}" if rollout.expert > 1 else ""
    pools = "one pool" if actor.pool == rollout.pool else "separate pools"
    engines = f"{recipe.num_engines} engine(s) of TP{rollout.tensor}{expert}"
    return f"trainer {' '.join(parts)} ({ranks} ranks) -> {engines}, {pools}"


def tiny_shape(shape: ModelShape, actor: ActorConfig) -> ModelShape:
    """Return a tiny model of the same family that the layouts of `small_layouts` divide."""
    experts = shape.experts
    return replace(
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
        experts=None if experts is None else Experts(num=8, per_token=2, is_normalized=experts.is_normalized),
    )


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
    tiny = replace(
        shape,
        num_layers=_num_layers(actor),
        hidden=8,
        head_dim=2,
        ffn_hidden=4 * lcm(actor.ranks_per_expert, actor.tensor, rollout.tensor),
        vocab=_VOCAB,
        max_context_tokens=_MAX_CONTEXT,
        experts=None if experts is None else replace(experts, num=2 * lcm(actor.expert, rollout.expert)),
    )
    return roles.model_copy(update={"actor": actor}), tiny


def _missing_engine(message: str) -> ConfigError:
    return ConfigError("recipe", (Problem(key="roles.rollout", message=message),))


def _sections(run: RunConfig, pools: Mapping[str, PoolConfig], roles: RolesConfig) -> dict[str, object]:
    """Return the changed sections, with an algorithm that needs no role but the actor and the engines."""
    return {"run": run, "pools": pools, "roles": roles, "algorithm": GrpoConfig(kind="grpo")}


def _small_actor(actor: ActorConfig) -> ActorConfig:
    tensor = min(_MAX_PARTS, actor.tensor)
    stages = {
        key: None if given is None else 1
        for key, given in (("first", actor.first_stage_layers), ("last", actor.last_stage_layers))
    }
    return actor.model_copy(
        update={
            "tensor": tensor,
            "pipeline": min(_MAX_PARTS, actor.pipeline),
            "virtual_pipeline": min(_MAX_PARTS, actor.virtual_pipeline),
            "is_sequence_parallel": tensor > 1 and (actor.is_sequence_parallel or actor.expert > 1),
            "expert": min(_MAX_PARTS, actor.expert),
            "expert_tensor": None if actor.expert_tensor is None else min(tensor, actor.expert_tensor),
            "first_stage_layers": stages["first"],
            # Of two stages, only one can have its own number of layers; the other one has the rest.
            "last_stage_layers": stages["last"] if stages["first"] is None else None,
            "megatron": {},
            "megatron_optimizer": {},
            "megatron_ddp": {},
        }
    )


def _small_data(actor: ActorConfig, wanted: int) -> int:
    """Return the smallest number of replicas, at least `wanted`, that the experts divide."""
    of_experts = actor.expert * actor.ranks_per_expert
    while actor.tensor * wanted % of_experts:
        wanted += 1
    return wanted


def _small_rollout(rollout: RolloutRoleConfig) -> RolloutRoleConfig:
    tensor = min(_MAX_PARTS, rollout.tensor)
    return rollout.model_copy(
        update={
            "tensor": tensor,
            "expert": min(tensor, rollout.expert),
            "max_running_requests": 8,
            "max_cached_tokens": None,
            "sglang": {},
        }
    )


def _num_layers(actor: ActorConfig) -> int:
    """Return two layers per stage, or one per virtual stage; stages with their own number of layers have one."""
    per_stage = 2 if actor.virtual_pipeline == 1 else 1
    num_uneven = sum(given is not None for given in (actor.first_stage_layers, actor.last_stage_layers))
    return per_stage * actor.pipeline * actor.virtual_pipeline - num_uneven
