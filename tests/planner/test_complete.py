"""A plan completes a recipe: the tokens of a micro-batch."""

from __future__ import annotations

import pytest

from megarl.families import PUBLIC_MODELS
from megarl.planner.complete import complete
from megarl.planner.deployment import deploy
from megarl.planner.hardware import GPUS
from megarl.planner.ledger import ledgers
from tests.planner.recipes import make_recipe, shapes_of

ONE_GPU = (
    "train.tokens_per_micro_batch=null",
    "pools={gpu: {gpus_per_node: 1}}",
    "roles={actor: {pool: gpu}, rollout: {pool: gpu, memory_fraction: 0.3}}",
    "run.ray_address=null",
    "sampling={rollouts_per_prompt: 16, max_response_tokens: 256}",
    "data.max_prompt_tokens=256",
)


def tokens_of(model: str, gpu: str, *assignments: str) -> int:
    recipe = make_recipe(*ONE_GPU, *assignments)
    completed, _ = complete(recipe, shapes_of(PUBLIC_MODELS[model]), GPUS[gpu])
    return completed.train.micro_batch_tokens


def test_small_layers_get_more_tokens_and_large_ones_no_fewer_than_fill_the_gpu() -> None:
    found = {name: tokens_of(name, "h200") for name in ("smollm2-135m", "qwen2.5-0.5b", "qwen2.5-3b")}
    assert found["smollm2-135m"] == 131072
    assert found["smollm2-135m"] > found["qwen2.5-0.5b"] >= found["qwen2.5-3b"] == 8192


@pytest.mark.parametrize("share", [0.3, 0.6, 0.8])
def test_the_memory_that_engines_leave_is_not_exceeded(share: float) -> None:
    recipe = make_recipe(*ONE_GPU, f"roles.rollout.memory_fraction={share}", "roles.rollout.release=nothing")
    shapes = shapes_of(PUBLIC_MODELS["smollm2-135m"])
    completed, _ = complete(recipe, shapes, GPUS["h100"])
    found = ledgers(deploy(completed, shapes, GPUS["h100"]), completed.algorithm)
    assert completed.train.micro_batch_tokens >= 512
    assert min(ledger.margin_bytes or 0 for ledger in found) >= 0.05 * GPUS["h100"].memory_bytes


def test_the_longest_sequence_fits_whatever_is_left() -> None:
    long = ("sampling.max_response_tokens=30000", "roles.actor.context=1")
    assert tokens_of("qwen2.5-7b", "h200", *long) == 30256
    assert tokens_of("qwen2.5-7b", "h200", *long, "roles.actor.megatron.recompute_granularity=selective") == 30256


def test_an_update_is_not_exceeded_and_stages_get_several() -> None:
    assert tokens_of("smollm2-135m", "h200", "train.prompts_per_step=1") == 8192
    pipeline = (
        "pools={gpu: {gpus_per_node: 2}, rollout: {gpus_per_node: 1}}",
        "roles={actor: {pool: gpu, pipeline: 2}, rollout: {pool: rollout}}",
        "train.prompts_per_step=32",
    )
    # 32 * 16 sequences of at most 512 tokens in eight micro-batches or more.
    assert tokens_of("smollm2-135m", "h200", *pipeline) == 32768


def test_a_key_and_a_cpu_need_no_plan() -> None:
    assert tokens_of("qwen2.5-7b", "h200", "train.tokens_per_micro_batch=1000") == 1000
    assert tokens_of("qwen2.5-7b", "h200", "run.device=cpu") == 8192
    assert tokens_of("qwen2.5-7b", "h200", "run.device=cpu", "sampling.max_response_tokens=9000") == 9256


def tree_of(*assignments: str) -> int | None:
    shapes = shapes_of(PUBLIC_MODELS["qwen2.5-7b"])
    written = ("roles.actor.offload=optimizer", "train.tokens_per_micro_batch=1024")
    recipe, _ = complete(make_recipe(*ONE_GPU, *written, *assignments), shapes, GPUS["h200"])
    found = ledgers(deploy(recipe, shapes, GPUS["h200"]), recipe.algorithm)
    if recipe.train.tokens_per_tree is not None:
        assert min(ledger.margin_bytes or 0 for ledger in found) >= 0.05 * GPUS["h200"].memory_bytes
    return recipe.train.tokens_per_tree


def test_a_tree_may_have_the_memory_that_the_plan_finds_and_no_more() -> None:
    found = [tree_of(f"roles.rollout.memory_fraction={share}", "roles.rollout.release=nothing") for share in (0.3, 0.5)]
    assert found[0] is not None
    assert found[1] is None or 1024 < found[1] < found[0] <= 8192
    assert tree_of("train.tokens_per_tree=2048") == 2048
    assert tree_of("train.share_prefixes=false") is None
    assert tree_of("sampling.rollouts_per_prompt=1") is None
    assert tree_of("run.device=cpu") is None
