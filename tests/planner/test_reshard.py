"""The thin plan against the whole one, which the run computes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megarl.config.catalogue import CATALOGUE
from megarl.config.model import Experts, ModelShape
from megarl.planner.hardware import GPUS
from megarl.planner.placement import place
from megarl.planner.reshard import LinkClass, reshard
from megarl.weights.buckets import DEFAULT_BUCKET_BYTES, buckets_to
from megarl.weights.megatron import megatron_layout
from megarl.weights.plan import plan
from megarl.weights.sglang import sglang_layout
from tests.planner.recipes import make_recipe

H100 = GPUS["h100"]
SHAPE = replace(CATALOGUE["qwen2.5-0.5b"], num_layers=8, num_heads=16, num_kv_heads=4, head_dim=64)

SPLITS = [
    ("roles.actor={pool: train, tensor: 2, pipeline: 2}",),
    ("roles.actor={pool: train, tensor: 1, pipeline: 4, virtual_pipeline: 2}", "roles.rollout.tensor=4"),
    ("roles.actor={pool: train, tensor: 8}", "roles.rollout.tensor=1"),
]


MIXTURE = replace(
    CATALOGUE["qwen3-30b-a3b"], num_layers=6, experts=Experts(num=16, per_token=2, is_normalized=True), vocab=4096
)

MIXTURE_SPLITS = [
    ("roles.actor={pool: train, tensor: 2, pipeline: 2, expert: 4}",),
    (
        "roles.actor={pool: train, tensor: 4, expert: 8, expert_tensor: 1}",
        "roles.rollout={pool: rollout, tensor: 4, expert: 4}",
    ),
    ("roles.actor={pool: train, pipeline: 4, expert: 4, last_stage_layers: 3}", "roles.rollout.expert=2"),
]


@pytest.mark.parametrize(
    ("shape", "assignments"),
    [*((SHAPE, split) for split in SPLITS), *((MIXTURE, split) for split in MIXTURE_SPLITS)],
)
def test_bytes_are_those_of_the_whole_plan(shape: ModelShape, assignments: tuple[str, ...]) -> None:
    recipe = make_recipe(*assignments)
    placement = place(recipe)
    rollout = recipe.roles.rollout
    assert rollout is not None
    engines = sglang_layout(
        shape,
        tensor=rollout.tensor,
        expert=rollout.expert,
        num_engines=placement.num_engines,
        dtype="bfloat16",
    )
    whole = plan(megatron_layout(shape, placement.parallel, dtype="bfloat16"), engines)
    found = reshard(recipe, shape, placement, H100)
    assert found.total_bytes == sum(whole.bytes_by_link.values())
    assert found.staging_bytes == whole.peak_staging_bytes
    assert found.floor_bytes == whole.floor_bytes
    assert found.busiest_bytes == pytest.approx(whole.busiest_bytes, rel=0.15)
    ranks = [holding.rank for holding in whole.target.holdings]
    messages = sum(len(buckets_to(whole, rank, bucket_bytes=DEFAULT_BUCKET_BYTES)) for rank in ranks)
    assert found.num_messages == pytest.approx(messages, rel=0.4)


def test_separate_nodes_talk_over_the_network_and_one_machine_does_not() -> None:
    apart = make_recipe()
    found = reshard(apart, SHAPE, place(apart), H100)
    assert found.bytes_by_link[LinkClass.NETWORK] == found.total_bytes
    together = make_recipe("run.ray_address=null", "pools.train={gpus_per_node: 8}")
    found = reshard(together, SHAPE, place(together), H100)
    assert found.bytes_by_link[LinkClass.SAME_NODE] == found.total_bytes


def test_a_shared_pool_finds_some_bytes_on_the_same_gpu() -> None:
    recipe = make_recipe("roles.rollout.pool=train")
    found = reshard(recipe, SHAPE, place(recipe), H100)
    assert 0 < found.bytes_by_link[LinkClass.SAME_GPU] < found.total_bytes


def test_no_scheme_that_gathers_whole_models_moves_less() -> None:
    recipe = make_recipe()
    found = reshard(recipe, SHAPE, place(recipe), H100)
    assert found.gathered_bytes > found.total_bytes
    assert found.floor_s <= found.seconds
