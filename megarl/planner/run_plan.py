"""The whole plan of a run, from a recipe and the shape of its model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megarl.config.catalogue import CATALOGUE, catalogue_name
from megarl.config.model import ModelShape, read_model_shape
from megarl.config.recipe import Recipe
from megarl.errors import ConfigError, Problem
from megarl.planner.hardware import Gpu
from megarl.planner.memory import EngineMemory, Ledger, StageMemory, engine_memory, ledgers, stage_memory
from megarl.planner.placement import Placement, place
from megarl.planner.reshard import Reshard, reshard
from megarl.planner.timing import Timing, Workload, estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedShape:
    shape: ModelShape
    source: str
    """The folder it was read from, or the entry of the catalogue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Memory and time: what changes when a key is changed."""

    ledgers: tuple[Ledger, ...]
    engine: EngineMemory | None
    timing: Timing | None
    """None on a CPU run: no rates are stated for it."""

    @property
    def worst(self) -> Ledger | None:
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
    model: NamedShape
    gpu: Gpu
    workload: Workload
    placement: Placement
    stages: tuple[StageMemory, ...]
    sizes: Sizes
    reshard: Reshard | None
    """None where nobody generates."""


def find_shape(path: Path, *, name: str | None = None) -> NamedShape:
    """Of the model's folder where it is here, else of the catalogue; `name` asks for an entry whatever the path."""
    if name is not None and name not in CATALOGUE:
        raise _error("--shape", f"unknown {name!r}; one of {', '.join(CATALOGUE)}")
    if name is None and (path / "config.json").is_file():
        return NamedShape(shape=read_model_shape(path), source=str(path))
    entry = name or catalogue_name(path)
    if entry is None:
        known = ", ".join(CATALOGUE)
        raise _error("model.path", f"{path} is neither here nor a known model; name a shape with --shape: {known}")
    return NamedShape(shape=CATALOGUE[entry], source=f"catalogue: {entry}")


def make_plan(recipe: Recipe, model: NamedShape, gpu: Gpu, workload: Workload) -> RunPlan:
    """For a recipe that passed its checks."""
    placement = place(recipe)
    published = None if recipe.roles.rollout is None else reshard(recipe, model.shape, placement, gpu)
    return RunPlan(
        model=model,
        gpu=gpu,
        workload=workload,
        placement=placement,
        stages=tuple(stage_memory(model.shape, placement.parallel, is_cpu=recipe.run.device == "cpu")),
        sizes=size(recipe, model.shape, gpu, workload, publish_s=published.seconds if published else 0.0),
        reshard=published,
    )


def size(recipe: Recipe, shape: ModelShape, gpu: Gpu, workload: Workload, *, publish_s: float) -> Sizes:
    """Without the traffic of a publish, which takes longest to plan and matters least for memory."""
    placement = place(recipe)
    rollout = recipe.roles.rollout
    is_cpu = recipe.run.device == "cpu"
    engine = None if rollout is None else engine_memory(shape, rollout, None if is_cpu else gpu.memory_bytes)
    timing = None
    if not is_cpu:
        timing = estimate(recipe, shape, placement, gpu, workload, engine=engine, publish_s=publish_s)
    return Sizes(
        ledgers=ledgers(recipe, shape, placement, gpu),
        engine=engine,
        timing=timing,
    )


def _error(key: str, message: str) -> ConfigError:
    return ConfigError("megarl plan", (Problem(key=key, message=message),))
