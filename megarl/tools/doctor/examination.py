"""All checks of a machine and a recipe, in the order they are shown."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.checks.recipe import check_recipe
from megarl.config.model import read_model_shape
from megarl.config.recipe import Recipe
from megarl.config.reward import BySourceRewardConfig, CodeTestsRewardConfig, RewardConfig
from megarl.errors import ConfigError
from megarl.tools.doctor.checks import Check, CheckStatus
from megarl.tools.doctor.gpus import ask_topology, check_gpus, find_gpus
from megarl.tools.doctor.machine import check_disk, check_machine, check_metrics_port, check_sandbox
from megarl.tools.doctor.patches import check_patches
from megarl.tools.doctor.torch_build import check_torch
from megarl.tools.doctor.versions import check_versions


def examine_machine(recipe: Recipe | None, *, is_joined: bool) -> Iterator[Check]:
    """`is_joined`: the recipe runs on a cluster, and this machine need not have its GPUs."""
    gpus = find_gpus()
    wants_gpu = recipe is not None and recipe.run.device == "cuda" and not is_joined
    yield from check_versions(has_gpu=bool(gpus))
    yield from check_torch(has_gpu=bool(gpus))
    yield from check_patches()
    needed = sum(pool.gpus for pool in recipe.pools.values()) if recipe is not None and wants_gpu else 0
    yield from check_gpus(gpus, needed=needed, topology=ask_topology() if gpus else None)
    yield from check_machine()


def examine_recipe(recipe: Recipe) -> Iterator[Check]:
    problems = check_recipe(recipe)
    for problem in problems:
        yield Check(
            area="recipe", name=problem.key, found="cannot run", verdict=CheckStatus.ERROR, remedy=problem.message
        )
    if not problems:
        yield Check(area="recipe", name="recipe", found=f"{recipe.algorithm.kind}, no problem", verdict=CheckStatus.OK)
    yield from check_metrics_port(recipe)
    if _runs_code(recipe.reward):
        yield check_sandbox(is_needed=True)
    try:
        shape = read_model_shape(recipe.model.path)
        critic = recipe.roles.critic
        critic_shape = None if critic is None else read_model_shape(critic.path or recipe.model.path)
    except ConfigError:
        return
    yield check_disk(recipe, shape, critic_shape)


def _runs_code(reward: RewardConfig) -> bool:
    parts = reward.sources.values() if isinstance(reward, BySourceRewardConfig) else (reward,)
    return any(isinstance(part, CodeTestsRewardConfig) and part.sandbox == "bubblewrap" for part in parts)
