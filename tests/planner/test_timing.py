from __future__ import annotations

import pytest

from megarl.config.catalogue import CATALOGUE
from megarl.config.model import ModelShape
from megarl.config.recipe import Recipe
from megarl.planner.hardware import GPUS, TRAIN_EFFICIENCY
from megarl.planner.memory import engine_memory
from megarl.planner.placement import place
from megarl.planner.timing import Timing, Workload, estimate
from tests.planner.recipes import make_recipe

SHAPE = CATALOGUE["qwen2.5-7b"]
H100 = GPUS["h100"]


def time_of(recipe: Recipe, *, response: int = 1000, shape: ModelShape = SHAPE) -> Timing:
    assert recipe.roles.rollout is not None
    return estimate(
        recipe,
        shape,
        place(recipe),
        H100,
        Workload(mean_prompt_tokens=100, mean_response_tokens=response),
        engine=engine_memory(shape, recipe.roles.rollout, H100.memory_bytes),
        publish_s=0.5,
    )


def test_an_update_is_six_operations_per_weight_and_token() -> None:
    timing = time_of(make_recipe("roles.actor={pool: train, tensor: 4}"))
    multiplied = 7_615_616_512 - 152064 * 3584
    attention = 2 * 28 * 3584 * 1100
    flops = 3 * timing.trained_tokens * (2 * multiplied + attention)
    assert timing.trained_tokens == 128 * 8 * 1100
    assert timing.update_s == pytest.approx(flops / (16 * 989e12 * TRAIN_EFFICIENCY))


def test_a_mixture_computes_with_the_experts_of_a_token_and_reads_those_of_the_batch() -> None:
    mixture = CATALOGUE["qwen3-30b-a3b"]
    recipe = make_recipe("roles.actor={pool: train, expert: 8}")
    timing = time_of(recipe, shape=mixture)
    attention = 2 * 48 * 32 * 128 * 1100
    flops = 3 * timing.trained_tokens * (2 * (3_353_032_704 - 151936 * 2048) + attention)
    assert timing.update_s == pytest.approx(flops / (16 * 989e12 * TRAIN_EFFICIENCY))
    alone = time_of(make_recipe("roles.rollout.max_running_requests=1"), shape=mixture)
    many = time_of(make_recipe("roles.rollout.max_running_requests=64"), shape=mixture)
    assert many.rollout_s < alone.rollout_s < 16 * many.rollout_s


def test_old_log_probabilities_cost_a_forward_pass_only_with_several_updates() -> None:
    assert time_of(make_recipe()).logprobs_s == 0
    timing = time_of(make_recipe("train.prompts_per_update=64"))
    assert timing.logprobs_s == pytest.approx(timing.update_s / 3)


def test_a_pipeline_has_a_bubble_that_chunks_make_smaller() -> None:
    plain = time_of(make_recipe())
    chunked = time_of(make_recipe("roles.actor.virtual_pipeline=2"))
    assert plain.bubble == pytest.approx(1 / (plain.num_micro_batches + 1))
    assert 0 < chunked.bubble < plain.bubble


def test_the_longest_response_sets_the_pace_of_a_small_step() -> None:
    small = time_of(make_recipe("train.prompts_per_step=4"), response=10)
    longer = time_of(make_recipe("train.prompts_per_step=4", "sampling.max_response_tokens=6144"), response=10)
    assert longer.rollout_s == pytest.approx(2 * small.rollout_s, rel=0.02)


def test_a_small_cache_lets_fewer_requests_run() -> None:
    assert time_of(make_recipe()).running_requests == 128
    assert time_of(make_recipe("roles.rollout.max_cached_tokens=6000")).running_requests == 10


def test_a_step_is_the_sum_of_its_phases() -> None:
    timing = time_of(make_recipe())
    assert timing.step_s == timing.rollout_s + timing.logprobs_s + timing.update_s + 0.5


def test_half_of_what_is_allowed_is_assumed() -> None:
    assert Workload.half(make_recipe()) == Workload(mean_prompt_tokens=512, mean_response_tokens=1536)
