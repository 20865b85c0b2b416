"""Recipes to plan, without files."""

from __future__ import annotations

from functools import cache

from megarl.config.document import Document, Tree, override
from megarl.config.load import read_recipe
from megarl.config.recipe import Recipe
from megarl.families.shape import ModelShape
from megarl.planner.deployment import Placement, RoleShapes, place
from tests.repository import ROOT

RECIPE_TREE: dict[str, Tree] = {
    "run": {"name": "test", "steps": 10, "ray_address": "auto"},
    "model": {"path": "qwen2.5-7b"},
    "data": {"train": ["train.parquet"], "max_prompt_tokens": 1024},
    "pools": {"train": {"nodes": 2, "gpus_per_node": 8}, "rollout": {"gpus_per_node": 8}},
    "roles": {
        "actor": {"pool": "train", "tensor": 4, "pipeline": 2},
        "rollout": {"pool": "rollout", "tensor": 2, "memory_fraction": 0.6},
    },
    "algorithm": {"kind": "grpo"},
    "sampling": {"max_response_tokens": 3072},
    "train": {"prompts_per_step": 128, "tokens_per_micro_batch": 8192},
}


PPO = (
    "pools.critic={nodes: 2, gpus_per_node: 8}",
    "roles.critic={pool: critic, tensor: 4, pipeline: 2}",
    "roles.reference={}",
    "algorithm={kind: gae, kl: {kind: reward}}",
)
"""Adds a critic in a pool of its own, and a reference in host memory of the actor's ranks."""


@cache
def large_recipes() -> dict[str, Recipe]:
    """Return the shipped recipes of whole nodes by their names; each trains a public model."""
    recipes = {path.stem: read_recipe(path).recipe for path in sorted(ROOT.glob("recipes/*.yaml"))}
    return {name: each for name, each in recipes.items() if sum(pool.gpus for pool in each.pools.values()) >= 8}


def shapes_of(shape: ModelShape) -> RoleShapes:
    return RoleShapes(policy=shape, critic=shape.as_critic(), source="test")


def make_recipe(*assignments: str) -> Recipe:
    document = Document(tree=RECIPE_TREE, origins={})
    for assignment in assignments:
        document = override(document, assignment)
    return Recipe.model_validate(document.tree)


def placement_of(*assignments: str) -> Placement:
    recipe = make_recipe(*assignments)
    return place(recipe.roles, recipe.pools, is_cluster=recipe.run.ray_address is not None)
