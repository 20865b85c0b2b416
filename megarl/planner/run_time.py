"""Time of a run outside of its steps: starting, reading weights, resuming, evaluating; and the whole of it.

Reading and writing share one file system, whose rate is a number of the cluster, not of a node.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from megarl.config.recipe import Recipe
from megarl.planner.deployment import EVALUATED_AT_ONCE, Deployment, PlannedModel, StepWorkload
from megarl.planner.hardware import START_S
from megarl.planner.timing import RolloutTime, Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTime:
    start_s: float
    """Until all processes run, without reading."""
    load_s: float
    """Reading the models of all roles that have ranks, once per node: its page cache serves the other ranks."""
    resume_s: float
    """Reading a checkpoint instead: what each rank keeps, and everything once more to compare it with its digests."""
    evaluation_s: float
    """One evaluation; 0 without one."""
    evaluated_prompts: int
    """Prompts of an evaluation; assumed where the recipe has no limit: rows are not counted before they are read."""
    is_evaluated_beside: bool
    """Whether steps go on meanwhile."""
    total_s: float | None
    """From the first start to the last step, without interruption; None for a run of epochs."""


def run_time(recipe: Recipe, deployment: Deployment, workload: StepWorkload, timing: Timing) -> RunTime:
    rate = recipe.cluster.file_system_gb_per_s * 1e9
    load_s = sum(_loaded_bytes(model) for model in deployment.models.values()) / rate
    base_s = load_s if recipe.model.lora is not None else 0.0
    resume_s = base_s + sum(2 * _resumed_bytes(model) for model in deployment.models.values()) / rate
    evaluation_s = _evaluation_s(recipe, deployment, workload)
    is_beside = recipe.train.max_staleness > 0
    total_s = None
    if recipe.run.steps is not None:
        num_evaluations = 0 if is_beside or not evaluation_s else _num_evaluations(recipe, recipe.run.steps)
        total_s = START_S + load_s + recipe.run.steps * timing.step_s + num_evaluations * evaluation_s
    return RunTime(
        start_s=START_S,
        load_s=load_s,
        resume_s=resume_s,
        evaluation_s=evaluation_s,
        evaluated_prompts=_evaluated_prompts(recipe),
        is_evaluated_beside=is_beside,
        total_s=total_s,
    )


def _loaded_bytes(model: PlannedModel) -> int:
    """Return the weights that all nodes read: each node those of its ranks, replicas on a node once."""
    parallel = model.placement.parallel
    parts = defaultdict[str, dict[tuple[str, int, int], int]](dict)
    for rank in model.placement.ranks:
        in_stage = (rank.data * parallel.context + rank.context) * parallel.tensor + rank.tensor
        share = in_stage // parallel.ranks_per_expert % parallel.expert
        weights = model.bare_weights[rank.pipeline]
        on_node = parts[rank.place.node]
        on_node["dense", rank.pipeline, rank.tensor] = weights.dense_bytes
        on_node["expert", rank.pipeline, share] = weights.num_bytes - weights.dense_bytes
    return sum(sum(on_node.values()) for on_node in parts.values())


def _resumed_bytes(model: PlannedModel) -> int:
    """Return the master weights and moments of all ranks; weights are rounded from them. Frozen models load theirs."""
    if not model.is_trained:
        return 0
    return sum(model.stages[rank.pipeline].optimizer_bytes for rank in model.placement.ranks)


def _evaluation_s(recipe: Recipe, deployment: Deployment, workload: StepWorkload) -> float:
    evaluation, rollout = recipe.evaluation, deployment.roles.rollout
    if evaluation is None or rollout is None or deployment.engine is None or not recipe.data.eval:
        return 0.0
    limit = evaluation.max_response_tokens or recipe.sampling.max_response_tokens
    num_prompts = _evaluated_prompts(recipe)
    if limit < workload.max_response_tokens:
        workload = workload.limited(limit)
    else:
        workload = replace(workload, max_response_tokens=limit)
    counts = [1] * evaluation.is_greedy
    counts += [evaluation.sampled.rollouts_per_prompt] if evaluation.sampled is not None else []
    return sum(
        RolloutTime(deployment, workload, num_sequences=num_prompts * count).seconds(num_prompts=num_prompts)
        for count in counts
    )


def _evaluated_prompts(recipe: Recipe) -> int:
    evaluation = recipe.evaluation
    return 0 if evaluation is None else evaluation.max_prompts or EVALUATED_AT_ONCE


def _num_evaluations(recipe: Recipe, steps: int) -> int:
    evaluation = recipe.evaluation
    assert evaluation is not None, "an evaluation that takes time, and none in the recipe"
    return sum(evaluation.is_due(step, is_last=step == steps) for step in range(steps + 1))
