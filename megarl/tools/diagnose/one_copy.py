"""The smallest recipe that computes what a recipe computes: one copy of the policy, one engine, nobody else. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.algorithm import GrpoConfig
from megarl.config.recipe import PoolConfig, Recipe, RolesConfig
from megarl.errors import ConfigError, MachineError, Problem

_TRAINER, _ENGINE = "trainer", "engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class OneCopy:
    recipe: Recipe
    notes: tuple[str, ...]
    """What is not as the recipe says."""


def one_copy(recipe: Recipe, *, name: str, num_devices: int) -> OneCopy:
    """In a run folder `name` inside the recipe's own; with whole models on one device each where it does not fit."""
    actor, rollout = recipe.roles.actor, recipe.roles.rollout
    if rollout is None:
        problem = Problem(key="roles.rollout", message="missing: there is no engine to compare the trainer with")
        raise ConfigError("recipe", (problem,))
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
        # Kernels that were captured run without the modules, and nobody would hear them.
        graphs = {"cuda_graph_backend_decode": "disabled", "cuda_graph_backend_prefill": "disabled"}
        rollout = rollout.model_copy(update={"sglang": {**rollout.sglang, **graphs}})
        notes.append("the engine runs without CUDA graphs")
    reduced = recipe.model_copy(
        update={
            "run": recipe.run.model_copy(update={"folder": recipe.run_folder, "name": name}),
            "pools": {
                _TRAINER: PoolConfig(gpus_per_node=actor.model_parallel),
                _ENGINE: PoolConfig(gpus_per_node=rollout.tensor),
            },
            "roles": RolesConfig(
                actor=actor.model_copy(update={"pool": _TRAINER}),
                rollout=rollout.model_copy(update={"pool": _ENGINE, "endpoints": (), "publish_folder": None}),
            ),
            # One that needs no further role.
            "algorithm": GrpoConfig(kind="grpo"),
        }
    )
    return OneCopy(recipe=reduced, notes=tuple(notes))
