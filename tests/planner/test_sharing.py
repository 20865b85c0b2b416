"""Shared prompts in a plan."""

from __future__ import annotations

import pytest

from megarl.families import PUBLIC_MODELS
from megarl.planner.activations import activation_bytes
from megarl.planner.deployment import deploy
from megarl.planner.fit import PlanQuestion, answer_for
from megarl.planner.hardware import GPUS
from megarl.planner.sharing import GroupTokens, prompt_obstacle
from megarl.planner.timing import Timing
from tests.planner.recipes import make_recipe, shapes_of


def test_a_prompt_is_counted_once_for_the_rows_that_a_micro_batch_holds() -> None:
    sizes = {"num_rows": 32, "prompt_tokens": 2048, "response_tokens": 512}
    whole, halves, apart = (
        GroupTokens.of(group=group, tokens_per_micro_batch=tokens, **sizes)
        for group, tokens in ((16, 10_240), (16, 6_144), (1, 10_240))
    )
    assert [tokens.num_computed for tokens in (whole, halves, apart)] == [20_480, 24_576, 81_920]
    assert apart.num_computed == whole.num_trained
    assert (apart.num_squared_shared, whole.num_squared_shared) == (0, 30 * 2048**2)


def timing_of(*assignments: str) -> Timing:
    recipe = make_recipe("data.max_prompt_tokens=4096", "sampling.max_response_tokens=1024", *assignments)
    timing = answer_for(recipe, PlanQuestion(gpu=GPUS["h100"])).plan.sizes.timing
    assert timing is not None
    return timing


def test_shared_prompts_shorten_the_passes_of_every_model() -> None:
    kl = ("roles.reference={}", "algorithm.kl={kind: loss}")
    together, apart = timing_of(*kl), timing_of(*kl, "train.share_prefixes=false")
    assert apart.computed_tokens == apart.trained_tokens == together.trained_tokens == 128 * 8 * 2560
    assert together.computed_tokens == 128 * (2048 + 8 * 512)
    assert apart.shared_s == 0
    assert together.shared_s == pytest.approx(
        sum(apart.seconds(phase.name) - phase.seconds for phase in together.phases), rel=1e-6
    )
    assert together.shared_s > 0.5 * sum(phase.seconds for phase in together.phases if "log-prob" in phase.name)


@pytest.mark.parametrize(
    ("model", "assignment", "obstacle"),
    [
        ("qwen2.5-7b", "run.name=plain", None),
        ("qwen2.5-7b", "train.share_prefixes=false", "train.share_prefixes is false"),
        ("qwen2.5-7b", "roles.actor.context=2", None),
        (
            "qwen2.5-7b",
            "roles.actor={pool: train, context: 2, context_exchange: ring}",
            "context_exchange: ring sends whole rows",
        ),
        ("qwen3.5-2b", "run.name=plain", "delta nets carry a state from token to token, which has no branches"),
        ("qwen3-30b-a3b", "run.name=plain", None),
        ("qwen2.5-7b", "sampling.rollouts_per_prompt=1", "each prompt has one answer"),
    ],
)
def test_a_plan_says_in_one_sentence_why_prompts_are_not_shared(
    model: str, assignment: str, obstacle: str | None
) -> None:
    recipe, shape = make_recipe(assignment), PUBLIC_MODELS[model]
    found = prompt_obstacle(recipe, recipe.roles.actor, shape)
    assert (found or "").startswith(obstacle or "")
    assert (found is None) == (obstacle is None)
    group = deploy(recipe, shapes_of(shape), GPUS["h100"]).models["actor"].group
    assert group == (8 if obstacle is None else 1)


def test_keys_of_whole_rows_take_memory() -> None:
    """Keys of an expanded latent are as wide as the queries."""
    shape = PUBLIC_MODELS["deepseek-v2-lite"]
    works = [
        deploy(make_recipe("data.max_prompt_tokens=8192", *change), shapes_of(shape), GPUS["h100"]).models["actor"].work
        for change in (("train.routing=live",), ("train.share_prefixes=false",))
    ]
    assert [round(work.keys_per_token, 2) for work in works] == [1.83, 1]
    # Of 192 elements for each of 16 heads, over four ranks, a key and a value for 0.83 tokens more.
    layers = [work.layer_bytes for work in works]
    assert layers[0].attention - layers[1].attention == pytest.approx(2 * 2 * 192 * 16 / 4 * 5 / 6, rel=1e-3)
    assert activation_bytes(works[0], 0) > activation_bytes(works[1], 0)
