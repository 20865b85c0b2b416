"""The smallest layouts with every kind of split that a recipe's have, and tiny shapes for both. Pure.

A split by more than two is of the same kind as one by two: what differs is arithmetic, for which the full layout is
rehearsed without processes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm
from pathlib import Path

from megarl.config.algorithm import GrpoConfig
from megarl.config.model import Experts, ModelShape
from megarl.config.recipe import ActorConfig, PoolConfig, Recipe, RolesConfig, RolloutRoleConfig
from megarl.errors import ConfigError, Problem

_MOST = 2
"""Parts that anything is split into."""
_VOCAB = 130
"""Padded to other sizes by trainer and engine."""
_MAX_CONTEXT = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallSync:
    """What can be started here in place of a recipe."""

    recipe: Recipe
    shape: ModelShape
    notes: tuple[str, ...]
    """What is not as the recipe says."""


def small_sync(recipe: Recipe, shape: ModelShape, *, folder: Path, model_folder: Path, max_engines: int) -> SmallSync:
    """On the CPU, with the model in `model_folder` and everything that is written in `folder`."""
    actor, rollout = recipe.roles.actor, recipe.roles.rollout
    if rollout is None:
        problem = Problem(key="roles.rollout", message="missing: there is no engine to publish to")
        raise ConfigError("recipe", (problem,))
    if rollout.pool is None:
        message = "engines that run already are published to by files; there are no layouts to check"
        raise ConfigError("recipe", (Problem(key="roles.rollout.endpoints", message=message),))
    small_actor = _small_actor(actor)
    is_shared = actor.pool == rollout.pool
    data = _small_data(recipe, small_actor, is_least=is_shared)
    num_ranks = small_actor.model_parallel * data
    small_rollout = _small_rollout(rollout)
    pools = {small_actor.pool: PoolConfig(gpus_per_node=num_ranks)}
    if is_shared:
        if num_ranks % small_rollout.tensor:
            small_rollout = small_rollout.model_copy(update={"tensor": 1, "expert": 1})
    else:
        num_engines = min(max_engines, recipe.num_engines)
        pools[rollout.pool] = PoolConfig(gpus_per_node=num_engines * small_rollout.tensor)
    small = recipe.model_copy(
        update={
            "run": recipe.run.model_copy(update={"folder": folder, "name": "check-sync", "device": "cpu"}),
            "model": recipe.model.model_copy(update={"path": model_folder}),
            "pools": pools,
            "roles": RolesConfig(actor=small_actor, rollout=small_rollout),
            # One that needs no further role.
            "algorithm": GrpoConfig(kind="grpo"),
        }
    )
    return SmallSync(recipe=small, shape=_tiny(shape, small_actor), notes=tuple(_notes(recipe, small)))


def rehearsed(recipe: Recipe, shape: ModelShape) -> tuple[Recipe, ModelShape]:
    """The recipe with its own layouts, and a tiny shape that they divide: heads and stages are as many as in the model.

    Stages with another number of layers than the rest have one layer; of the experts each rank has two.
    """
    actor, rollout = recipe.roles.actor, recipe.roles.rollout
    assert rollout is not None, "a rehearsal without engines"
    ends = {"first_stage_layers": actor.first_stage_layers, "last_stage_layers": actor.last_stage_layers}
    uneven = {key: 1 for key, given in ends.items() if given is not None}
    actor = actor.model_copy(update=uneven)
    per_stage = 2 if actor.virtual_pipeline == 1 else 1
    experts = shape.experts
    tiny = replace(
        shape,
        num_layers=per_stage * actor.pipeline * actor.virtual_pipeline - len(uneven),
        hidden=8,
        head_dim=2,
        ffn_hidden=4 * lcm(actor.ranks_per_expert, actor.tensor, rollout.tensor),
        vocab=_VOCAB,
        max_context_tokens=_MAX_CONTEXT,
        experts=None if experts is None else replace(experts, num=2 * lcm(actor.expert, rollout.expert)),
    )
    roles = recipe.roles.model_copy(update={"actor": actor})
    return recipe.model_copy(update={"roles": roles}), tiny


def told_layout(recipe: Recipe) -> str:
    """A recipe's layouts in one line."""
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
    where = "one pool" if actor.pool == rollout.pool else "separate pools"
    engines = f"{recipe.num_engines} engine(s) of TP{rollout.tensor}{expert}"
    return f"trainer {' '.join(parts)} ({ranks} ranks) -> {engines}, {where}"


def _small_actor(actor: ActorConfig) -> ActorConfig:
    tensor = min(_MOST, actor.tensor)
    stages = {
        key: None if given is None else 1
        for key, given in (("first", actor.first_stage_layers), ("last", actor.last_stage_layers))
    }
    return actor.model_copy(
        update={
            "tensor": tensor,
            "pipeline": min(_MOST, actor.pipeline),
            "virtual_pipeline": min(_MOST, actor.virtual_pipeline),
            "is_sequence_parallel": tensor > 1 and (actor.is_sequence_parallel or actor.expert > 1),
            "expert": min(_MOST, actor.expert),
            "expert_tensor": None if actor.expert_tensor is None else min(tensor, actor.expert_tensor),
            "first_stage_layers": stages["first"],
            # With two stages, one of which is given, the other one has the rest.
            "last_stage_layers": stages["last"] if stages["first"] is None else None,
            "megatron": {},
            "megatron_optimizer": {},
            "megatron_ddp": {},
        }
    )


def _small_data(recipe: Recipe, actor: ActorConfig, *, is_least: bool) -> int:
    """As few replicas as the experts allow; two where the recipe has several, unless every rank is one more engine."""
    wanted = 1 if is_least else min(_MOST, recipe.data_parallel)
    of_experts = actor.expert * actor.ranks_per_expert
    while actor.tensor * wanted % of_experts:
        wanted += 1
    return wanted


def _small_rollout(rollout: RolloutRoleConfig) -> RolloutRoleConfig:
    tensor = min(_MOST, rollout.tensor)
    return rollout.model_copy(
        update={
            "tensor": tensor,
            "expert": min(tensor, rollout.expert),
            "max_running_requests": 8,
            "max_cached_tokens": None,
            "sglang": {},
        }
    )


def _tiny(shape: ModelShape, actor: ActorConfig) -> ModelShape:
    per_stage = 2 if actor.virtual_pipeline == 1 else 1
    layers = per_stage * actor.pipeline * actor.virtual_pipeline
    layers -= sum(given is not None for given in (actor.first_stage_layers, actor.last_stage_layers))
    experts = shape.experts
    return replace(
        shape,
        num_layers=layers,
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


def _notes(recipe: Recipe, small: Recipe) -> list[str]:
    before, after = told_layout(recipe), told_layout(small)
    notes = [] if before == after else [f"the recipe's own layout is {before}: splits by more than two are by two here"]
    if recipe.run.device != "cpu":
        notes.append("on the CPU in fp32, not on GPUs in bf16; the GPU's padding and KV replicas are in the rehearsal")
    return notes
