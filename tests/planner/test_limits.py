"""Time between saves, grace and deadlines: derived for every recipe, refused where a recipe contradicts its plan."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from megarl.config.load import read_recipe
from megarl.errors import ConfigError
from megarl.planner.complete import complete
from megarl.planner.deployment import StepWorkload, find_shapes
from megarl.planner.fit import PlanAnswer, PlanQuestion, answer, answer_for, check_fit, size
from megarl.planner.hardware import GPUS, gpu_of
from megarl.planner.limits import HOUR_S, with_limits
from tests.planner.recipes import make_recipe
from tests.repository import ROOT

RECIPES = sorted(ROOT.glob("recipes/*.yaml"))
ON_GPUS = [path for path in RECIPES if read_recipe(path, []).recipe.run.device != "cpu"]
MADE = dict.fromkeys(("gpu_rehearsal", "gpu_smoke", "gpu_smoke_sft"), "qwen2.5-0.5b")
MADE |= dict.fromkeys(("gsm8k_smollm", "gsm8k_smollm_tool", "gsm8k_smollm_tool_sft"), "smollm2-135m")
MADE |= dict.fromkeys(("gpu_images", "gpu_images_sft"), "qwen2.5-vl-3b")
"""Recipes of models that something writes, and a public model of about that size."""


def shape_of(name: str) -> str | None:
    return MADE.get(name)


@cache
def plan_of(name: str, *overrides: str) -> PlanAnswer:
    return answer(ROOT / "recipes" / f"{name}.yaml", overrides, PlanQuestion(shape_name=shape_of(name)))


@pytest.mark.parametrize("name", [path.stem for path in ON_GPUS])
def test_no_recipe_loses_more_than_an_hour_or_misses_a_deadline(name: str) -> None:
    """Planned as a run does it, without the moves of a publish."""
    recipe = read_recipe(ROOT / "recipes" / f"{name}.yaml", []).recipe
    shapes = find_shapes(recipe.model, recipe.roles, name=shape_of(name), algorithm=recipe.algorithm)
    workload = StepWorkload.half(recipe.data, recipe.sampling)
    completed, deployment = complete(recipe, shapes, gpu_of(recipe.cluster))
    sizes = size(completed, deployment, workload, publish_s=0.0)
    timing, outside, limits = sizes.timing, sizes.run_time, sizes.limits
    assert timing is not None
    assert outside is not None
    assert limits is not None
    every_steps = recipe.checkpoint.save_every_steps
    if recipe.checkpoint.contents == "everything":
        steps = recipe.run.steps if every_steps is None else every_steps
        num_steps = limits.steps_per_hour if steps == "hourly" else steps
        assert isinstance(num_steps, int)
        assert num_steps == 1 or num_steps * timing.step_s <= HOUR_S
    limited = with_limits(recipe, limits)
    # An update that outlasts the other half is given up.
    assert limited.checkpoint.time_to_save_s >= 2 * (timing.copy_s + timing.save_s)
    longest = int(0.9 * recipe.sampling.max_response_tokens)
    workload = replace(workload, mean_response_tokens=longest)
    at_length = size(completed, deployment, workload, publish_s=0.0).timing
    assert at_length is not None
    of_actor = sum(phase.seconds for phase in at_length.phases if phase.name in ("update", "old log-probabilities"))
    for seconds in (of_actor, at_length.save_s, outside.start_s + outside.load_s, outside.start_s + outside.resume_s):
        assert limited.train.deadline_s >= 2.99 * seconds


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            "checkpoint.save_every_steps=50",
            "checkpoint.save_every_steps: 50 steps, about 47.0 h by the plan, which a crash or a time limit may cost; "
            "leave the key out, or set at most 1",
        ),
        ("checkpoint.save_every_steps=null", "checkpoint.save_every_steps: null saves only the last step, about 282.0"),
        ("checkpoint.grace_s=60", "checkpoint.grace_s: 60 s, and a save takes about 92 s at"),
        ("train.operation_timeout_s=1800", "train.operation_timeout_s: 1800 s, and the longest call to ranks takes"),
    ],
)
def test_limits_that_contradict_the_plan_are_refused(change: str, problem: str) -> None:
    path = ROOT / "recipes" / "dapo_32b.yaml"
    with pytest.raises(ConfigError) as planned:
        answer(path, [change], PlanQuestion())
    assert [str(each).startswith(problem) for each in planned.value.problems] == [True], planned.value
    with pytest.raises(ConfigError) as started:
        check_fit(read_recipe(path, [change]).recipe, GPUS["h100"])
    assert started.value.problems == planned.value.problems


def test_what_a_recipe_sets_is_kept_where_it_holds() -> None:
    recipe = make_recipe("checkpoint.grace_s=900", "train.operation_timeout_s=36000", "cluster.gpu=h100")
    limited = with_limits(recipe, answer_for(recipe, PlanQuestion(shape_name="qwen2.5-7b")).plan.sizes.limits)
    assert limited.checkpoint.time_to_save_s == 900
    assert limited.train.deadline_s == 36000


def test_the_file_system_is_one_for_all_nodes() -> None:
    """Twice the nodes write what there is no faster; a faster file system does."""
    first, wider, faster = (
        plan_of("grpo_70b", *changes).plan.sizes
        for changes in ((), ("pools.train.nodes=32",), ("cluster.file_system_gb_per_s=50",))
    )
    assert first.timing is not None
    assert wider.timing is not None
    assert faster.timing is not None
    assert wider.timing.save_s == pytest.approx(first.timing.save_s, rel=0.02)
    assert faster.timing.save_s == pytest.approx(first.timing.save_s / 10)


def test_a_longer_run_is_planned_with_its_evaluations() -> None:
    often, seldom = (plan_of("dapo_32b", f"evaluation.every_steps={every}").plan.sizes.run_time for every in (1, 300))
    assert often is not None
    assert seldom is not None
    assert often.evaluation_s == seldom.evaluation_s > 300
    assert often.total_s is not None
    assert seldom.total_s is not None
    assert often.total_s - seldom.total_s == pytest.approx(299 * often.evaluation_s)


def test_less_recomputation_is_proposed_where_memory_is_left() -> None:
    planned = plan_of("dapo_32b")
    faster, timing = planned.faster, planned.plan.sizes.timing
    assert faster is not None
    assert timing is not None
    assert faster.assignments[0] == "roles.actor.megatron.recompute_method=block"
    reserve = 0.1 * planned.plan.gpu.memory_bytes
    assert faster.training_margin_bytes >= reserve
    assert faster.step_s < 0.97 * timing.step_s
    changed = plan_of("dapo_32b", *faster.assignments).plan.sizes
    assert changed.timing is not None
    assert changed.timing.step_s == pytest.approx(faster.step_s)
    number = int(faster.assignments[1].rpartition("=")[2])
    one_less = (faster.assignments[0], f"roles.actor.megatron.recompute_num_layers={number - 1}")
    training = [each for each in plan_of("dapo_32b", *one_less).plan.sizes.ledgers if each.phase == "training"]
    assert all(each.margin_bytes is not None and each.margin_bytes < reserve for each in training)


def test_nothing_is_proposed_to_a_recipe_that_recomputes_nothing_or_is_full() -> None:
    assert plan_of("grpo_70b").faster is None
    full = plan_of("dapo_32b", "train.tokens_per_micro_batch=300000")
    assert full.plan.sizes.fits
    assert full.faster is None
