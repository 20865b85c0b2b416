"""What generating while training can get wrong together with the rest of a recipe."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.algorithm import PolicyGradientConfig, SftConfig
from megarl.config.recipe import Recipe
from megarl.errors import Problem

_KEY = "train.max_staleness"


def check_staleness(recipe: Recipe) -> Iterator[Problem]:
    rollout, staleness = recipe.roles.rollout, recipe.train.max_staleness
    if staleness == 0:
        if rollout is not None and rollout.in_flight is not None:
            yield Problem(
                key="roles.rollout.in_flight",
                message=f"has no use with {_KEY} 0, where no request runs during a publish; remove it",
            )
        return
    if isinstance(recipe.algorithm, SftConfig):
        yield Problem(key=_KEY, message=f"{staleness} has no use in sft, where nobody generates; remove it")
    if rollout is not None and rollout.pool is not None:
        yield from _shared_pool(recipe, rollout.pool)
    yield from _oversampling(recipe)
    if recipe.checkpoint.keep_best is not None:
        yield Problem(
            key="checkpoint.keep_best",
            message=f"with {_KEY} {staleness} an evaluation ends when the weights it began with are trained on; "
            f"remove it or set {_KEY} to 0",
        )


def _shared_pool(recipe: Recipe, pool: str) -> Iterator[Problem]:
    others = [role for role, used in recipe.used_pools.items() if used == pool and role != "rollout"]
    if others:
        yield Problem(
            key=_KEY,
            message=f"{recipe.train.max_staleness} generates while {others[0]} works, but both have pool {pool}; "
            "give roles.rollout a pool of its own or set it to 0",
        )


def _oversampling(recipe: Recipe) -> Iterator[Problem]:
    algorithm, staleness = recipe.algorithm, recipe.train.max_staleness
    filtering = algorithm.filter if isinstance(algorithm, PolicyGradientConfig) else None
    if filtering is not None and filtering.oversampling > 1:
        yield Problem(
            key="algorithm.filter.oversampling",
            message=f"{filtering.oversampling:g} has no use with {_KEY} {staleness}, which lets {1 + staleness} steps' "
            "worth of prompts be under way; remove it",
        )
