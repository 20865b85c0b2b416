"""The whole plan of a run, from a recipe and the shapes of its models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megarl.config.recipe import Recipe
from megarl.planner.hardware import GpuModel
from megarl.planner.ledger import HostLedger, MemoryLedger, host_ledgers, ledgers
from megarl.planner.memory import EngineMemory, StageMemory, engine_memory, stage_memory
from megarl.planner.placement import Placement, place
from megarl.planner.reshard import Reshard, reshard
from megarl.planner.shapes import RoleShapes
from megarl.planner.timing import StepWorkload, Timing, estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Memory and time: what changes when a key is changed."""

    ledgers: tuple[MemoryLedger, ...]
    hosts: tuple[HostLedger, ...]
    engine: EngineMemory | None
    timing: Timing | None
    """None on a CPU run: no rates are stated for it."""

    @property
    def worst(self) -> MemoryLedger | None:
        """The fullest; None where there is no limit."""
        limited = [(ledger.margin_bytes, ledger) for ledger in self.ledgers if ledger.margin_bytes is not None]
        return min(limited, key=lambda pair: pair[0])[1] if limited else None

    @property
    def fits(self) -> bool:
        worst = self.worst
        has_cache = self.engine is None or self.engine.cached_tokens > 0
        return has_cache and (worst is None or worst.margin_bytes is None or worst.margin_bytes >= 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    shapes: RoleShapes
    gpu: GpuModel
    workload: StepWorkload
    placement: Placement
    stages: Mapping[str, tuple[StageMemory, ...]]
    """By trained role, stage after stage."""
    sizes: Sizes
    reshard: Reshard | None
    """None where nobody generates."""


def make_plan(recipe: Recipe, shapes: RoleShapes, gpu: GpuModel, workload: StepWorkload) -> RunPlan:
    """For a recipe that passed its checks."""
    placement = place(recipe)
    published = None if recipe.roles.rollout is None else reshard(recipe, shapes.policy, placement, gpu)
    return RunPlan(
        shapes=shapes,
        gpu=gpu,
        workload=workload,
        placement=placement,
        stages={
            role: tuple(stage_memory(shapes.of(role), model.parallel, dtype=recipe.run.dtype))
            for role, model in placement.models.items()
            if role != "reference"
        },
        sizes=size(recipe, shapes, gpu, workload, publish_s=published.seconds if published else 0.0),
        reshard=published,
    )


def size(recipe: Recipe, shapes: RoleShapes, gpu: GpuModel, workload: StepWorkload, *, publish_s: float) -> Sizes:
    """Without the traffic of a publish, which takes longest to plan and matters least for memory."""
    placement = place(recipe)
    rollout = recipe.roles.rollout
    is_cpu = recipe.run.device == "cpu"
    engine = None if rollout is None else engine_memory(shapes.policy, rollout, None if is_cpu else gpu.memory_bytes)
    timing = None
    if not is_cpu:
        timing = estimate(recipe, shapes, placement, gpu, workload, engine=engine, publish_s=publish_s)
    return Sizes(
        ledgers=ledgers(recipe, shapes, placement, gpu),
        hosts=host_ledgers(recipe, shapes, placement),
        engine=engine,
        timing=timing,
    )
