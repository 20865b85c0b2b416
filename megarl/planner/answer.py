"""One question about a recipe file, and everything there is to say: its plan and, where it does not fit, ways out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megarl.config.checks.recipe import check_without_files
from megarl.config.load import read_recipe
from megarl.config.recipe import Recipe
from megarl.errors import ConfigError
from megarl.planner.fit import Proposal, proposals
from megarl.planner.hardware import GpuModel
from megarl.planner.run_plan import RunPlan, make_plan
from megarl.planner.shapes import find_shapes
from megarl.planner.timing import StepWorkload


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanQuestion:
    gpu: GpuModel
    shape_name: str | None = None
    """An entry of the catalogue, instead of what `model.path` says."""
    mean_response_tokens: int | None = None

    def workload(self, recipe: Recipe) -> StepWorkload:
        half = StepWorkload.half(recipe)
        if self.mean_response_tokens is None:
            return half
        return replace(half, mean_response_tokens=self.mean_response_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAnswer:
    recipe: Recipe
    plan: RunPlan
    proposals: tuple[Proposal, ...]
    """Empty where it fits, or where nothing helps."""


def _without_running_engines(recipe: Recipe) -> Recipe:
    """Engines that run already have places of their own."""
    if recipe.roles.rollout is None or recipe.roles.rollout.pool is not None:
        return recipe
    return recipe.model_copy(update={"roles": recipe.roles.model_copy(update={"rollout": None})})


def answer(path: Path, overrides: Sequence[str], question: PlanQuestion) -> PlanAnswer:
    """Reads the recipe and makes all checks that need no file; a ConfigError has every problem."""
    recipe = read_recipe(path, overrides).recipe
    shapes = find_shapes(recipe, name=question.shape_name)
    problems = check_without_files(recipe, shapes.policy, critic=shapes.critic)
    if problems:
        raise ConfigError(str(path), tuple(problems))
    recipe = _without_running_engines(recipe)
    plan = make_plan(recipe, shapes, question.gpu, question.workload(recipe))
    ways_out = [] if plan.sizes.fits else proposals(recipe, shapes, plan.gpu, plan.workload)
    return PlanAnswer(recipe=recipe, plan=plan, proposals=tuple(ways_out))
