"""Folders of runs whose times are known multiples of the model's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from megarl.config.recipe import Recipe
from megarl.families import PUBLIC_MODELS
from megarl.observe.events import Event, StepFinished
from megarl.planner.complete import complete
from megarl.planner.deployment import Deployment, StepWorkload
from megarl.planner.fit import size
from megarl.planner.hardware import GPUS
from megarl.planner.replay import part_seconds
from megarl.planner.reshard import reshard
from tests.observe.samples import run_started, step_summary, write_events
from tests.planner.recipes import shapes_of

SHAPE = PUBLIC_MODELS["qwen2.5-7b"]
MEANS = (900, 1000, 1100, 1050, 950, 1000)
OTHER_S = 0.25


def recorded_workload(mean: int, *, kept_share: float = 1.0) -> StepWorkload:
    quantiles = tuple(2 * mean * rank // 20 for rank in range(21))
    return StepWorkload(
        mean_prompt_tokens=100,
        mean_response_tokens=mean,
        max_response_tokens=2 * mean,
        quantiles=quantiles,
        kept_share=kept_share,
    )


@cache
def deployed(recipe_json: str) -> tuple[Deployment, float]:
    """Return the deployment of a recipe and the seconds of a publish."""
    _, deployment = complete(Recipe.model_validate_json(recipe_json), shapes_of(SHAPE), GPUS["h100"])
    return deployment, reshard(deployment).seconds


def modelled(recipe: Recipe, workload: StepWorkload) -> dict[str, float]:
    deployment, publish_s = deployed(recipe.model_dump_json())
    timing = size(recipe, deployment, workload, publish_s=publish_s).timing
    assert timing is not None
    return part_seconds(timing, recipe.algorithm)


def write_run(
    folder: Path,
    recipe: Recipe,
    factors: Mapping[str, float],
    *,
    means: Sequence[int] = MEANS,
    num_dropped: int = 0,
) -> Path:
    """Write the events of a run: each part took the model's time and a factor, and 0.25 s were spent elsewhere."""
    started = replace(run_started(steps=len(means)), recipe=recipe.model_dump(mode="json"))
    events: list[Event] = [started]
    num_groups = 8
    for step, mean in enumerate((means[0], *means), start=1):
        workload = recorded_workload(mean, kept_share=num_groups / (num_groups + num_dropped))
        parts = {part: factors.get(part, 1.0) * seconds for part, seconds in modelled(recipe, workload).items()}
        if recipe.train.max_staleness:
            parts["generate"] = max(0.0, parts["generate"] - parts["assign"] - parts["update"])
        phases = {part: parts[part] for part in ("generate", "assign", "update", "publish")}
        summary = step_summary(step, dropped_groups={"equal": num_dropped} if num_dropped else None)
        assert summary.rollouts is not None
        rollouts = replace(
            summary.rollouts,
            response_tokens_mean=float(mean),
            response_tokens_max=workload.max_response_tokens,
            response_tokens_quantiles=workload.quantiles,
        )
        summary = replace(summary, rollouts=rollouts, prompt_tokens_mean=100.0, seconds=sum(phases.values()) + OTHER_S)
        # The first step has the start of the run in it.
        started_s = {"start": 60.0} if step == 1 else {}
        events.append(StepFinished(summary=summary, phase_seconds={**phases, **started_s}))  # type: ignore[dict-item]
    return write_events(folder, events)
