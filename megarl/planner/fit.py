"""Plans a recipe: memory and time of its run, whether it fits its GPUs, and which changes make it fit, cheapest first.

The cheapest change of one or two settings needs the fewest GPUs, and among equal ones the shortest step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from pydantic import ValidationError

from megarl.config.checks.recipe import check_without_files
from megarl.config.document import Document, override
from megarl.config.load import read_recipe
from megarl.config.recipe import ClusterConfig, DataConfig, Recipe, SamplingConfig
from megarl.config.roles import ModelParallelConfig, PoolConfig, RolloutRoleConfig, TrainedModelConfig
from megarl.config.section import GIB
from megarl.errors import ConfigError, Problem
from megarl.planner.activations import Recomputation
from megarl.planner.complete import complete
from megarl.planner.deployment import Deployment, Placement, RoleShapes, StepWorkload, find_shapes, has_cache
from megarl.planner.hardware import GpuModel, gpu_of
from megarl.planner.ledger import (
    HostLedger,
    MemoryLedger,
    MemoryPhase,
    host_ledgers,
    ledgers,
    snapshot_bytes,
)
from megarl.planner.limits import RunLimits, check_limits, limits_of
from megarl.planner.memory import EngineMemory, StageMemory
from megarl.planner.replay import RecordedRun, Replay, replay
from megarl.planner.reshard import Reshard, draft_reshard, reshard
from megarl.planner.run_time import RunTime, run_time
from megarl.planner.timing import Timing, estimate
from megarl.planner.tower import TowerWork
from megarl.weights.layouts.megatron import MegatronParallel

NUM_PROPOSALS = 3
_FACTORS = (2, 4)
_RECOMPUTE = ("recompute_granularity=full", "recompute_method=uniform", "recompute_num_layers=1")
_RESERVE = 0.1
"""Share of the memory of a GPU that a proposal to recompute less leaves."""
_FRACTIONS = (0.75, 0.7, 0.65, 0.6, 0.55, 0.5, 0.45, 0.4, 0.35, 0.3, 0.25, 0.2)

_Change: TypeAlias = tuple[str, ...]
"""Assignments that belong together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Memory and time of a run."""

    ledgers: tuple[MemoryLedger, ...]
    hosts: tuple[HostLedger, ...]
    engine: EngineMemory | None
    timing: Timing | None
    """None on a CPU run, for which no rates are stated; so are the next two."""
    run_time: RunTime | None
    limits: RunLimits | None

    @property
    def worst(self) -> MemoryLedger | None:
        """The fullest ledger; None without a limit."""
        limited = [(ledger.margin_bytes, ledger) for ledger in self.ledgers if ledger.margin_bytes is not None]
        return min(limited, key=lambda pair: pair[0])[1] if limited else None

    @property
    def fits(self) -> bool:
        return self.excess is None

    @property
    def excess(self) -> str | None:
        """A sentence about the memory that is too much; None if the run fits."""
        worst = self.worst
        if worst is not None and worst.margin_bytes is not None and worst.margin_bytes < 0:
            return f"{-worst.margin_bytes / GIB:.1f} GiB too much ({worst.where}, {worst.phase})"
        if self.engine is not None and self.engine.cached_tokens == 0:
            return "roles.rollout.memory_fraction leaves no room for a KV cache beside the weights"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Changes that make the recipe fit, or faster."""

    assignments: _Change
    num_gpus: int
    margin_bytes: int
    """Memory that the fullest GPU has left in any phase."""
    training_margin_bytes: int
    step_s: float


def size(
    recipe: Recipe, deployment: Deployment, workload: StepWorkload, *, publish_s: float, times_cpu: bool = False
) -> Sizes:
    """Return memory and time; `publish_s` is given, because planning a publish takes longest.

    A CPU run is timed with the rates of the deployment's GPU, for comparisons, if `times_cpu`.
    """
    timing = outside = limits = None
    if deployment.device != "cpu" or times_cpu:
        timing = estimate(
            deployment,
            workload,
            algorithm=recipe.algorithm,
            train=recipe.train,
            sampling=recipe.sampling,
            snapshots={
                role: snapshot_bytes(model, recipe.checkpoint)
                for role, model in deployment.models.items()
                if model.is_trained
            },
            publish_s=publish_s,
            file_system_gb_per_s=recipe.cluster.file_system_gb_per_s,
        )
    if timing is not None and deployment.device != "cpu":
        outside = run_time(recipe, deployment, workload, timing)
        limits = limits_of(recipe, deployment, workload, timing, outside)
    return Sizes(
        ledgers=ledgers(deployment, recipe.algorithm),
        hosts=host_ledgers(deployment, recipe.checkpoint),
        engine=deployment.engine,
        timing=timing,
        run_time=outside,
        limits=limits,
    )


def proposals(recipe: Recipe, shapes: RoleShapes, gpu: GpuModel, workload: StepWorkload) -> list[Proposal]:
    """Return at most three proposals, each sufficient by itself; pairs of changes if no single change is."""
    tokens = complete(recipe, shapes, gpu)[0].train.micro_batch_tokens
    singles: list[_Change] = [
        *_micro_batch_changes(tokens, smallest=recipe.max_context_tokens),
        *(change for role, split in recipe.roles.megatron_roles.items() for change in _model_changes(role, split)),
        *_pool_changes(recipe.pools),
        *_engine_changes(recipe.roles.rollout),
    ]
    # Only keys that were written: some keys are refused where they have no use, whatever their value.
    document = Document(tree=recipe.model_dump(mode="json", exclude_unset=True), origins={})
    fitting = list(_fitting(document, shapes, gpu, workload, singles))
    if not fitting:
        pairs = [a + b for index, a in enumerate(singles) for b in singles[index + 1 :] if _keys(a) != _keys(b)]
        fitting = list(_fitting(document, shapes, gpu, workload, pairs))
    return _best_per_keys(fitting)[:NUM_PROPOSALS]


def less_recomputation(
    recipe: Recipe, shapes: RoleShapes, gpu: GpuModel, workload: StepWorkload, *, publish_s: float
) -> Proposal | None:
    """Return the fewest layers that have to be recomputed where the actor recomputes all and memory is left, with a
    reserve: activations are estimated. None where all are needed."""
    recomputation = Recomputation.of(recipe.roles.actor)
    if recomputation is None or not recomputation.is_full or recomputation.method != "uniform":
        return None
    document = Document(tree=recipe.model_dump(mode="json", exclude_unset=True), origins={})

    def proposed(num_layers: int) -> Proposal | None:
        changes = ("recompute_method=block", f"recompute_num_layers={num_layers}")
        assignments = tuple(f"roles.actor.megatron.{change}" for change in changes)
        found = next(_fitting(document, shapes, gpu, workload, [assignments], publish_s=publish_s), None)
        return found if found is not None and found.training_margin_bytes >= _RESERVE * gpu.memory_bytes else None

    parallel = MegatronParallel.of(recipe.roles.actor, data=1)
    layers = max(
        len(parallel.chunk_layers(shapes.policy.num_layers, stage=stage, chunk=0)) for stage in range(parallel.pipeline)
    )
    fewest = bisect_left(range(1, layers), 1, key=lambda number: int(proposed(number) is not None)) + 1
    return proposed(fewest) if fewest < layers else None


def _best_per_keys(fitting: list[Proposal]) -> list[Proposal]:
    """Return the cheapest proposal of each set of keys."""
    best: dict[tuple[str, ...], Proposal] = {}
    # The sort is stable: among equally cheap proposals the smallest change, tried first, stays first.
    for proposal in sorted(fitting, key=lambda item: (item.num_gpus, item.step_s)):
        best.setdefault(_keys(proposal.assignments), proposal)
    return list(best.values())


def _fitting(
    document: Document,
    shapes: RoleShapes,
    gpu: GpuModel,
    workload: StepWorkload,
    candidates: Sequence[_Change],
    *,
    publish_s: float = 0.0,
) -> Iterator[Proposal]:
    for assignments in candidates:
        changed = _changed(document, assignments)
        if changed is None or check_without_files(changed, shapes.policy, critic=shapes.critic):
            continue
        if not has_cache(changed, shapes, gpu):
            continue  # whatever else was changed
        changed, deployment = complete(changed, shapes, gpu)
        of_gpus = ledgers(deployment, changed.algorithm)
        worst = min(of_gpus, key=lambda ledger: ledger.margin_bytes or 0)
        if worst.margin_bytes is None or worst.margin_bytes < 0:
            continue  # estimating the time takes longest
        sizes = size(changed, deployment, workload, publish_s=publish_s)
        if sizes.fits and sizes.timing is not None:
            yield Proposal(
                assignments=assignments,
                num_gpus=deployment.placement.num_gpus,
                margin_bytes=worst.margin_bytes,
                training_margin_bytes=min(
                    each.margin_bytes or 0 for each in of_gpus if each.phase is MemoryPhase.TRAINING
                ),
                step_s=sizes.timing.step_s,
            )


# The changes below are those a person would try; none changes what is learned.


def _micro_batch_changes(tokens: int, *, smallest: int) -> Iterator[_Change]:
    smaller = {max(smallest, tokens // factor) for factor in _FACTORS} - {tokens}
    yield from ((f"train.tokens_per_micro_batch={number}",) for number in sorted(smaller, reverse=True))


def _model_changes(role: str, split: ModelParallelConfig) -> Iterator[_Change]:
    key = f"roles.{role}"
    if split.tensor > 1 and not split.is_sequence_parallel:
        yield (f"{key}.is_sequence_parallel=true",)
    if isinstance(split, TrainedModelConfig):
        levels = ("nothing", "optimizer", "everything")
        yield from ((f"{key}.offload={level}",) for level in levels[levels.index(split.offload) + 1 :])
    if isinstance(split, TrainedModelConfig) and "recompute_granularity" not in split.megatron:
        yield tuple(f"{key}.megatron.{option}" for option in _RECOMPUTE)
    for factor in _FACTORS:
        yield (f"{key}.tensor={split.tensor * factor}",)
        yield (f"{key}.pipeline={split.pipeline * factor}",)
        yield (f"{key}.context={split.context * factor}",)
        yield (f"{key}.expert={split.expert * factor}",)


def _pool_changes(pools: Mapping[str, PoolConfig]) -> Iterator[_Change]:
    for name, pool in pools.items():
        yield from ((f"pools.{name}.nodes={pool.nodes * factor}",) for factor in _FACTORS)


def _engine_changes(rollout: RolloutRoleConfig | None) -> Iterator[_Change]:
    if rollout is not None:
        if rollout.release in (None, "kv_cache"):
            yield ("roles.rollout.release=everything",)
        smaller = [fraction for fraction in _FRACTIONS if fraction < rollout.memory_fraction]
        yield from ((f"roles.rollout.memory_fraction={fraction}",) for fraction in smaller)
        yield from ((f"roles.rollout.tensor={rollout.tensor * factor}",) for factor in _FACTORS)


def _changed(document: Document, assignments: _Change) -> Recipe | None:
    """Return the changed recipe, None if it is not valid."""
    for assignment in assignments:
        document = override(document, assignment)
    try:
        return Recipe.model_validate(document.tree)
    except ValidationError:
        return None


def _keys(change: _Change) -> _Change:
    return tuple(assignment.partition("=")[0] for assignment in change)


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
    tokens_per_micro_batch: int
    tower: TowerWork | None
    """None for text alone."""
    tokens_per_tree: int | None
    """More tokens, for rows with a common beginning; None where there are no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAnswer:
    recipe: Recipe
    plan: RunPlan
    proposals: tuple[Proposal, ...]
    """Empty if the recipe fits, or if no proposal helps."""
    faster: Proposal | None = None
    """Less recomputation, where memory is left for it."""


def answer(path: Path, overrides: Sequence[str], question: PlanQuestion) -> PlanAnswer:
    """Read the recipe and plan it."""
    return answer_for(read_recipe(path, overrides).recipe, question, source=str(path))


def answer_for(recipe: Recipe, question: PlanQuestion, *, source: str = "recipe") -> PlanAnswer:
    """Make all checks that need no file, and plan a recipe; a ConfigError has every problem."""
    shapes = find_shapes(recipe.model, recipe.roles, name=question.shape_name, algorithm=recipe.algorithm)
    problems = check_without_files(recipe, shapes.policy, critic=shapes.critic)
    if problems:
        raise ConfigError(source, tuple(problems))
    recipe = _without_running_engines(recipe)
    gpu, workload = question.gpu_for(recipe.cluster), question.workload(recipe.data, recipe.sampling)
    completed, deployment = complete(recipe, shapes, gpu)
    published = _published(deployment)
    sizes = size(
        completed,
        deployment,
        workload,
        publish_s=_publish_s(deployment, published),
        times_cpu=question.recorded is not None,
    )
    if contradictions := tuple(check_limits(recipe, sizes.limits)):
        raise ConfigError(source, contradictions)
    plan = RunPlan(
        shapes=shapes,
        gpu=gpu,
        workload=workload,
        placement=deployment.placement,
        stages={role: model.stages for role, model in deployment.models.items() if model.is_trained},
        sizes=sizes,
        reshard=published,
        tokens_per_micro_batch=completed.train.micro_batch_tokens,
        tower=deployment.models["actor"].tower,
        tokens_per_tree=completed.train.tokens_per_tree,
    )
    fitting = [] if sizes.fits else proposals(recipe, shapes, gpu, workload)
    faster = None
    if sizes.fits and sizes.limits is not None:
        publish_s = _publish_s(deployment, published)
        faster = less_recomputation(recipe, shapes, gpu, workload, publish_s=publish_s)
    return PlanAnswer(recipe=recipe, plan=plan, proposals=tuple(fitting), faster=faster)


def replay_run(run: RecordedRun, *, shape_name: str | None = None) -> Replay:
    """Replay a run through the model of its own recipe."""
    recipe = _without_running_engines(run.recipe)
    shapes = find_shapes(recipe.model, recipe.roles, name=shape_name, algorithm=recipe.algorithm)
    recipe, deployment = complete(recipe, shapes, run.gpu or gpu_of(recipe.cluster))
    published = _published(deployment)
    publish_s = _publish_s(deployment, published)
    timings = [
        size(recipe, deployment, step.workload, publish_s=publish_s, times_cpu=True).timing for step in run.steps
    ]
    return replay(run, [timing for timing in timings if timing is not None])


def planned(recipe: Recipe, gpu: GpuModel) -> Recipe:
    """Return the recipe with what it leaves to the plan."""
    shapes = find_shapes(recipe.model, recipe.roles, algorithm=recipe.algorithm)
    return complete(recipe, shapes, gpu)[0]


def planned_limits(recipe: Recipe, gpu: GpuModel) -> RunLimits | None:
    """Return the limits of a run on these GPUs; None on a CPU."""
    if recipe.run.device == "cpu":
        return None
    shapes = find_shapes(recipe.model, recipe.roles, algorithm=recipe.algorithm)
    recipe = _without_running_engines(recipe)
    workload = StepWorkload.half(recipe.data, recipe.sampling)
    recipe, deployment = complete(recipe, shapes, gpu)
    return size(recipe, deployment, workload, publish_s=0.0).limits


def check_fit(recipe: Recipe, gpu: GpuModel | None) -> str | None:
    """Raise a ConfigError if the run needs more memory than its GPUs have, or more time than its own limits; it names
    what is too much and a way out.

    Return a warning where the GPU is not known.
    """
    if gpu is None:
        return "Ray reports no GPU that the planner knows: whether the run fits is not checked; set cluster.gpu"
    shapes = find_shapes(recipe.model, recipe.roles, algorithm=recipe.algorithm)
    recipe = _without_running_engines(recipe)
    completed, deployment = complete(recipe, shapes, gpu)
    workload = StepWorkload.half(recipe.data, recipe.sampling)
    sizes = size(completed, deployment, workload, publish_s=0.0)
    if contradictions := tuple(check_limits(recipe, sizes.limits)):
        raise ConfigError(recipe.run.name, contradictions)
    if sizes.fits:
        return None
    found = proposals(recipe, shapes, gpu, workload)
    changes = " ".join(f"--set {assignment}" for assignment in found[0].assignments) if found else "more or larger GPUs"
    message = f"{sizes.excess}; fits with {changes}; `megarl plan` has more, --override-fit starts anyway"
    raise ConfigError(recipe.run.name, (Problem(key=f"does not fit {gpu.name}", message=message),))


def _published(deployment: Deployment) -> Reshard | None:
    """Return what a publish moves; None for adapters, which are a hundredth of the weights."""
    is_sent = deployment.engine is not None and not deployment.publishes_adapters
    return reshard(deployment) if is_sent else None


def _publish_s(deployment: Deployment, published: Reshard | None) -> float:
    """Return the time of a publish, and the mean of a draft, which has learned in one of several steps."""
    draft, drafter = draft_reshard(deployment), deployment.roles.drafter
    seconds = published.seconds if published else 0.0
    return seconds if draft is None or drafter is None else seconds + draft.seconds / drafter.every_steps


def _without_running_engines(recipe: Recipe) -> Recipe:
    """Return the recipe without rollout engines that run already: those use none of the pools."""
    if recipe.roles.rollout is None or recipe.roles.rollout.pool is not None:
        return recipe
    return recipe.model_copy(update={"roles": recipe.roles.model_copy(update={"rollout": None})})
