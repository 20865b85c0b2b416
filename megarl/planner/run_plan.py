"""The whole plan of a run, and the answer to a question about a recipe file: its plan and changes that make it fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megarl.config.checks.recipe import check_without_files
from megarl.config.cluster import ClusterConfig
from megarl.config.load import read_recipe
from megarl.config.recipe import DataConfig, Recipe, SamplingConfig
from megarl.config.roles import RolesConfig
from megarl.errors import ConfigError, Problem
from megarl.planner.deployment import Placement, RoleShapes, deploy, find_shapes
from megarl.planner.fit import Proposal, Sizes, proposals, size
from megarl.planner.hardware import GpuModel, gpu_of
from megarl.planner.memory import StageMemory
from megarl.planner.replay import RecordedRun, Replay, replay
from megarl.planner.reshard import Reshard, reshard
from megarl.planner.workload import StepWorkload


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanQuestion:
    gpu: GpuModel | None = None
    """None takes the GPU that the recipe names."""
    shape_name: str | None = None
    """A public model whose shape replaces that of `model.path`."""
    mean_response_tokens: int | None = None
    recorded: StepWorkload | None = None
    """Lengths that a run recorded, instead of assumed ones. A CPU run is then timed as well."""
    recorded_gpu: GpuModel | None = None
    """The GPU of that run, for a recipe that names none."""

    def gpu_for(self, cluster: ClusterConfig) -> GpuModel:
        if self.gpu is None and cluster.gpu is None and self.recorded_gpu is not None:
            return self.recorded_gpu
        return self.gpu or gpu_of(cluster)

    def workload(self, data: DataConfig, sampling: SamplingConfig) -> StepWorkload:
        if self.recorded is not None:
            return self.recorded.limited(sampling.max_response_tokens)
        half = StepWorkload.half(data, sampling)
        if self.mean_response_tokens is None:
            return half
        return replace(half, mean_response_tokens=self.mean_response_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    shapes: RoleShapes
    gpu: GpuModel
    workload: StepWorkload
    placement: Placement
    stages: Mapping[str, tuple[StageMemory, ...]]
    """Memory per pipeline stage, by trained role."""
    sizes: Sizes
    reshard: Reshard | None
    """None for a run without engines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAnswer:
    recipe: Recipe
    plan: RunPlan
    proposals: tuple[Proposal, ...]
    """Empty if the recipe fits, or if no proposal helps."""


def answer(path: Path, overrides: Sequence[str], question: PlanQuestion) -> PlanAnswer:
    """Read the recipe and plan it."""
    return answer_for(read_recipe(path, overrides).recipe, question, source=str(path))


def answer_for(recipe: Recipe, question: PlanQuestion, *, source: str = "recipe") -> PlanAnswer:
    """Make all checks that need no file, and plan a recipe; a ConfigError has every problem."""
    shapes = find_shapes(recipe.model, recipe.roles, name=question.shape_name, algorithm=recipe.algorithm)
    problems = check_without_files(recipe, shapes.policy, critic=shapes.critic)
    if problems:
        raise ConfigError(source, tuple(problems))
    recipe = recipe.model_copy(update={"roles": _without_running_engines(recipe.roles)})
    gpu, workload = question.gpu_for(recipe.cluster), question.workload(recipe.data, recipe.sampling)
    deployment = deploy(recipe, shapes, gpu)
    # Loading an adapter beside running requests takes nothing from them.
    is_sent = deployment.engine is not None and not deployment.publishes_adapters
    published = reshard(deployment) if is_sent else None
    sizes = size(
        recipe,
        deployment,
        workload,
        publish_s=published.seconds if published else 0.0,
        times_cpu=question.recorded is not None,
    )
    plan = RunPlan(
        shapes=shapes,
        gpu=gpu,
        workload=workload,
        placement=deployment.placement,
        stages={role: model.stages for role, model in deployment.models.items() if model.is_trained},
        sizes=sizes,
        reshard=published,
    )
    fitting = [] if sizes.fits else proposals(recipe, shapes, gpu, workload)
    return PlanAnswer(recipe=recipe, plan=plan, proposals=tuple(fitting))


def replay_run(run: RecordedRun, *, shape_name: str | None = None) -> Replay:
    """Replay a run through the model of its own recipe."""
    recipe = run.recipe.model_copy(update={"roles": _without_running_engines(run.recipe.roles)})
    shapes = find_shapes(recipe.model, recipe.roles, name=shape_name, algorithm=recipe.algorithm)
    deployment = deploy(recipe, shapes, run.gpu or gpu_of(recipe.cluster))
    is_sent = deployment.engine is not None and not deployment.publishes_adapters
    publish_s = reshard(deployment).seconds if is_sent else 0.0
    timings = [
        size(recipe, deployment, step.workload, publish_s=publish_s, times_cpu=True).timing for step in run.steps
    ]
    return replay(run, [timing for timing in timings if timing is not None])


def check_fit(recipe: Recipe, gpu: GpuModel | None) -> str | None:
    """Raise a ConfigError if the run needs more memory than its GPUs have; it names what is too much and a way out.

    Return a warning where the GPU is not known.
    """
    if gpu is None:
        return "Ray reports no GPU that the planner knows: whether the run fits is not checked; set cluster.gpu"
    shapes = find_shapes(recipe.model, recipe.roles, algorithm=recipe.algorithm)
    recipe = recipe.model_copy(update={"roles": _without_running_engines(recipe.roles)})
    deployment, workload = deploy(recipe, shapes, gpu), StepWorkload.half(recipe.data, recipe.sampling)
    sizes = size(recipe, deployment, workload, publish_s=0.0)
    if sizes.fits:
        return None
    found = proposals(recipe, shapes, gpu, workload)
    changes = " ".join(f"--set {assignment}" for assignment in found[0].assignments) if found else "more or larger GPUs"
    message = f"{sizes.excess}; fits with {changes}; `megarl plan` has more, --override-fit starts anyway"
    raise ConfigError(recipe.run.name, (Problem(key=f"does not fit {gpu.name}", message=message),))


def _without_running_engines(roles: RolesConfig) -> RolesConfig:
    """Return the roles without engines that run already: those use none of the pools."""
    if roles.rollout is None or roles.rollout.pool is not None:
        return roles
    return roles.model_copy(update={"rollout": None})
