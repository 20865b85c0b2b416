from __future__ import annotations

from dataclasses import replace

import pytest

from megarl.config.recipe import Recipe
from megarl.errors import ConfigError
from megarl.families import PUBLIC_MODELS
from megarl.planner.deployment import StepWorkload, deploy
from megarl.planner.fit import Proposal, Sizes, check_fit, proposals, size
from megarl.planner.hardware import GPUS, GpuModel, reported_gpu
from tests.planner.recipes import PPO, make_recipe, shapes_of

SHAPES = shapes_of(PUBLIC_MODELS["qwen2.5-7b"])
H100 = GPUS["h100"]


def workload_of(recipe: Recipe) -> StepWorkload:
    return StepWorkload.half(recipe.data, recipe.sampling)


def size_of(recipe: Recipe) -> Sizes:
    return size(recipe, deploy(recipe, SHAPES, H100), workload_of(recipe), publish_s=0)


def proposals_for(recipe: Recipe, gpu: GpuModel = H100) -> list[Proposal]:
    return proposals(recipe, SHAPES, gpu, workload_of(recipe))


def test_each_proposal_makes_the_recipe_fit() -> None:
    recipe = make_recipe("roles.rollout.memory_fraction=0.98")
    assert not size_of(recipe).fits
    found = proposals_for(recipe)
    assert 1 <= len(found) <= 3
    for proposal in found:
        changed = make_recipe("roles.rollout.memory_fraction=0.98", *proposal.assignments)
        sizes = size_of(changed)
        assert sizes.fits
        assert sizes.worst is not None
        assert sizes.worst.margin_bytes == proposal.margin_bytes
    # The smallest change of a key.
    assert ("roles.rollout.memory_fraction=0.75",) in [proposal.assignments for proposal in found]


def test_two_changes_are_proposed_where_one_is_not_enough() -> None:
    recipe = make_recipe("roles.rollout.memory_fraction=0.98", "train.tokens_per_micro_batch=65536")
    found = proposals_for(recipe)
    assert found
    assert all("roles.rollout.memory_fraction" in str(item.assignments) for item in found)
    assert all(len(item.assignments) > 1 for item in found)


def test_nothing_is_proposed_for_a_gpu_that_is_far_too_small() -> None:
    assert proposals_for(make_recipe(), replace(H100, memory_gib=2)) == []


def test_recomputation_is_a_way_out_and_a_change_of_three_keys() -> None:
    recipe = make_recipe("train.tokens_per_micro_batch=120000")
    found = proposals_for(recipe)
    options = [f"roles.actor.megatron.recompute_{name}" for name in ("granularity", "method", "num_layers")]
    assert options in [[assignment.partition("=")[0] for assignment in item.assignments] for item in found]


def test_a_critic_that_is_too_large_gets_ways_out_of_its_own() -> None:
    recipe = make_recipe(*PPO, "pools.critic={gpus_per_node: 4}", "roles.critic={pool: critic}")
    found = proposals_for(recipe)
    assert found
    assert all("critic" in assignment for item in found for assignment in item.assignments[:1])


def test_a_gpu_that_ray_does_not_name_is_a_warning_and_a_small_one_a_refusal() -> None:
    recipe = make_recipe()
    assert check_fit(recipe, H100) is None
    assert "set cluster.gpu" in (check_fit(recipe, reported_gpu(["TPU-V4"])) or "")
    with pytest.raises(ConfigError, match=r"does not fit a100-40g: .* GiB too much \(actor, training\); fits with "):
        check_fit(make_recipe("train.tokens_per_micro_batch=40000"), reported_gpu(["H100", "A100-40G"]))
