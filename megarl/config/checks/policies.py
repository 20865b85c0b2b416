"""Refuses what would keep several policies from being trained side by side, each exactly as alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from megarl.config.document import Key, leaves
from megarl.config.recipe import POLICIES_FOLDER, Recipe
from megarl.config.roles import PoolConfig, RolesConfig
from megarl.errors import Problem
from megarl.families.shape import ModelShape

_OWN: tuple[Key, ...] = (
    ("data",),
    ("reward",),
    ("algorithm",),
    ("sampling",),
    ("evaluation",),
    ("observe",),
    ("train", "optimizer"),
    ("train", "prompts_per_step"),
    ("train", "prompts_per_update"),
    ("train", "epochs"),
    ("run", "seed"),
    ("run", "steps"),
    ("run", "epochs"),
)
"""Keys that a policy may set."""
_SHARED: tuple[Key, ...] = (("data", "max_prompt_tokens"), ("sampling", "max_response_tokens"))
"""Keys among them that decide what fits the devices, which all policies share."""


def check_policies(recipe: Recipe) -> Iterator[Problem]:
    """Yield what in a recipe contradicts its policies."""
    if not recipe.policies:
        return
    yield from _shared(recipe)
    for name, keys in recipe.policies.items():
        for key, _ in leaves(keys):
            is_own = not key or any(key[: len(own)] == own for own in _OWN)
            if not is_own or key in _SHARED:
                message = "is the same for all policies; set it outside of policies"
                yield Problem(key=".".join((POLICIES_FOLDER, name, *key)), message=message)
    recipes = recipe.by_policy()
    for name, policy in recipes.items():
        if not policy.algorithm.needs.has_engines:
            message = f"{policy.algorithm.kind} uses no engines, which policies share; train it alone"
            yield Problem(key=f"{POLICIES_FOLDER}.{name}.algorithm", message=message)
    yield from _places(list(recipes.values()))


def _places(recipes: Sequence[Recipe]) -> Iterator[Problem]:
    """Yield what several policies would write to."""
    for place in (("observe", "metrics_port"), ("observe", "tensorboard", "folder")):
        values = [value for each in recipes for key, value in leaves(each.model_dump()) if key == place and value]
        if len(set(values)) < len(values):
            message = f"{values[0]} cannot be that of several policies; give each its own, or leave it out"
            yield Problem(key=".".join(place), message=message)


def _shared(recipe: Recipe) -> Iterator[Problem]:
    """Yield keys of all policies with which they cannot be trained side by side."""
    roles, lora = recipe.roles, recipe.model.lora
    if lora is None:
        yield Problem(key="model.lora", message="missing; policies are adapters of one base")
    elif lora.is_merged:
        message = "engines get adapters of experts as whole models, and hold one; remove experts, or train one policy"
        yield Problem(key="model.lora.modules", message=message)
    if roles.actor.precision == "fp8":
        message = "the base would be quantised once for each policy; remove it"
        yield Problem(key="roles.actor.precision", message=message)
    if recipe.checkpoint.mirror is not None:
        yield Problem(key="checkpoint.mirror", message="copies the checkpoints of one policy; remove it")
    if recipe.environment is not None:
        message = "its processes and their limits are those of one policy; train one at a time"
        yield Problem(key="environment", message=message)
    yield from _roles(roles, recipe.pools)


def _roles(roles: RolesConfig, pools: Mapping[str, PoolConfig]) -> Iterator[Problem]:
    if roles.critic is not None:
        yield Problem(key="roles.critic", message="a critic learns the values of one policy; train it alone")
    for role in (*roles.frozen, *roles.teacher_ranks):
        yield Problem(key=f"roles.{role}", message="it serves one policy; train one at a time")
    rollout = roles.rollout
    if rollout is None or rollout.pool is None:
        return
    if rollout.pool == roles.actor.pool and rollout.release != "nothing":
        message = (
            "policies are trained at different times, and engines could give their memory up at none; set it to "
            "nothing, or give the engines a pool of their own"
        )
        yield Problem(key="roles.rollout.release", message=message)
    default = 0 if pools[rollout.pool].nodes == 1 else 1
    if rollout.workers if rollout.workers is not None else default:
        message = "policies are sampled by the driver; set it to 0"
        yield Problem(key="roles.rollout.workers", message=message)


def check_seen(recipe: Recipe, shape: ModelShape) -> Iterator[Problem]:
    """Yield why policies cannot have this model."""
    if recipe.policies and shape.vision is not None:
        message = "it sees images, which are prepared for one policy; train one at a time"
        yield Problem(key="model.path", message=message)
