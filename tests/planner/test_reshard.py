from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from megarl.config.recipe import Recipe
from megarl.families import PUBLIC_MODELS
from megarl.families.shape import Experts, ModelShape
from megarl.planner.deployment import Deployment, PublishWay, deploy
from megarl.planner.hardware import GLOO_GB_PER_S, GPUS
from megarl.planner.memory import PUBLISH_COMMUNICATOR_BYTES
from megarl.planner.reshard import LinkClass, Reshard, draft_reshard, publish_plan, reshard
from megarl.weights.algebra.buckets import DEFAULT_BUCKET_BYTES, buckets_to
from megarl.weights.layouts.canonical import canonical_tensors
from tests.planner.recipes import make_recipe, shapes_of

H100 = GPUS["h100"]
SHAPE = replace(PUBLIC_MODELS["qwen2.5-0.5b"], num_layers=8, num_heads=16, num_kv_heads=4, head_dim=64)
LARGE = replace(PUBLIC_MODELS["llama-3.1-70b"], num_layers=16)
MIXTURE = replace(
    PUBLIC_MODELS["qwen3-30b-a3b"], num_layers=6, experts=Experts(num=16, per_token=2, is_normalized=True), vocab=4096
)

SEPARATE = make_recipe(
    "roles.actor={pool: train, tensor: 8, pipeline: 2}", "pools.rollout.nodes=2", "roles.rollout.tensor=4"
)
"""16 GPUs train, 16 others generate."""
SHARED = make_recipe(
    "roles.actor={pool: train, tensor: 8, pipeline: 2}", "roles.rollout={pool: train, tensor: 4, memory_fraction: 0.5}"
)


def deployed(recipe: Recipe, shape: ModelShape) -> Deployment:
    return deploy(recipe, shapes_of(shape), H100)


def resharded(recipe: Recipe, shape: ModelShape) -> Reshard:
    return reshard(deployed(recipe, shape))


def model_bytes(shape: ModelShape) -> int:
    return sum(spec.num_bytes for spec in canonical_tensors(shape).values())


@pytest.mark.parametrize(
    ("shape", "assignments"),
    [
        (SHAPE, ("roles.actor={pool: train, tensor: 2, pipeline: 2}",)),
        (SHAPE, ("roles.actor={pool: train, pipeline: 4, virtual_pipeline: 2}", "roles.rollout.tensor=4")),
        (MIXTURE, ("roles.actor={pool: train, tensor: 2, pipeline: 2, expert: 4}",)),
        (MIXTURE, ("roles.actor={pool: train, tensor: 4, expert: 8, expert_tensor: 1}", "roles.rollout.expert=2")),
    ],
)
def test_figures_are_those_of_the_plan_that_is_carried_out(shape: ModelShape, assignments: tuple[str, ...]) -> None:
    recipe = make_recipe(*assignments)
    whole = publish_plan(deployed(recipe, shape))
    found = resharded(recipe, shape)
    buckets = [
        bucket
        for holding in whole.target.holdings
        for bucket in buckets_to(whole, holding.rank, bucket_bytes=DEFAULT_BUCKET_BYTES)
    ]
    assert found.hash == whole.hash
    assert found.total_bytes == sum(move.num_bytes for move in whole.moves)
    assert found.num_messages == pytest.approx(len(buckets), rel=0.1)
    largest = max(bucket.num_bytes for bucket in buckets)
    assert largest <= found.staging_bytes <= 2 * max(DEFAULT_BUCKET_BYTES, largest)
    assert found.way is PublishWay.NCCL
    assert (found.communicator_bytes, found.host_bytes) == (PUBLISH_COMMUNICATOR_BYTES, 0)
    on_one = Counter(bucket.target_rank for bucket in buckets)
    assert max(on_one.values()) <= found.num_rounds <= len(buckets)


def test_a_model_enters_each_rollout_node_once() -> None:
    found = resharded(SEPARATE, LARGE)
    assert found.bytes_by_link[LinkClass.NETWORK] == 2 * model_bytes(LARGE)
    assert found.bytes_by_link[LinkClass.SAME_GPU] == 0
    assert found.num_hops == 2


def test_a_relay_takes_as_much_over_the_network_and_less_from_the_trainers() -> None:
    relayed = make_recipe(
        "roles.actor={pool: train, tensor: 8, pipeline: 2}",
        "pools.rollout.nodes=2",
        "roles.rollout={pool: rollout, tensor: 4, memory_fraction: 0.6, relays_weights: true}",
    )
    whole = publish_plan(deployed(relayed, LARGE))
    assert sum(whole.traffic.sent_bytes.values()) == model_bytes(LARGE)
    assert resharded(relayed, LARGE).bytes_by_link == resharded(SEPARATE, LARGE).bytes_by_link
    assert resharded(relayed, LARGE).num_hops == 3


def test_one_machine_needs_no_network() -> None:
    together = make_recipe("run.ray_address=null", "pools.train={gpus_per_node: 8}")
    found = resharded(together, SHAPE)
    assert found.bytes_by_link[LinkClass.SAME_NODE] == found.total_bytes


def test_in_a_shared_pool_only_what_a_node_lacks_crosses_the_network() -> None:
    found = resharded(SHARED, LARGE)
    # Each of two nodes has one of two stages.
    assert found.bytes_by_link[LinkClass.NETWORK] == pytest.approx(model_bytes(LARGE), rel=0.001)
    assert found.bytes_by_link[LinkClass.SAME_GPU] > model_bytes(LARGE) / 4


@pytest.mark.parametrize(
    "assignments",
    [
        (),
        ("roles.rollout.pool=train",),
        ("roles.rollout.pool=train", "roles.actor.pipeline=1"),
        ("roles.rollout.pool=train", "roles.actor={pool: train, tensor: 8}"),
        ("run.ray_address=null", "pools.train.nodes=1"),
    ],
)
def test_the_ledger_knows_the_way_of_the_plan_without_making_it(assignments: tuple[str, ...]) -> None:
    deployment = deployed(make_recipe(*assignments), SHAPE)
    assert deployment.publish_way is reshard(deployment).way


def test_a_shared_pool_of_whole_replicas_per_node_is_read_in_place() -> None:
    found = resharded(make_recipe("roles.rollout={pool: train, tensor: 4}", "roles.actor.pipeline=1"), SHAPE)
    assert found.way is PublishWay.MEMORY
    assert (found.num_messages, found.num_rounds, found.staging_bytes, found.communicator_bytes) == (0, 0, 0, 0)
    assert found.bytes_by_link[LinkClass.SAME_NODE] > 0


def test_between_the_nodes_of_a_shared_pool_host_memory_sets_the_time() -> None:
    found = resharded(SHARED, LARGE)
    assert found.way is PublishWay.HOST
    assert found.host_bytes == found.staging_bytes > 0
    assert found.seconds > found.busiest_bytes[LinkClass.NETWORK] / (GLOO_GB_PER_S * 1e9)


def test_a_70b_model_is_published_within_about_a_second() -> None:
    found = resharded(SEPARATE, PUBLIC_MODELS["llama-3.1-70b"])
    assert found.floor_s == pytest.approx(0.353, abs=0.002)
    assert found.floor_s < found.seconds <= 1.05


def test_no_scheme_that_gathers_whole_models_moves_less() -> None:
    found = resharded(make_recipe(), SHAPE)
    assert found.gathered_bytes > found.total_bytes
    assert all(found.floor_bytes[link] <= found.busiest_bytes[link] for link in LinkClass)


@pytest.mark.parametrize("shape", [LARGE, replace(MIXTURE, ffn_hidden=1024)], ids=["dense", "mixture"])
def test_engines_with_fp8_weights_hold_and_receive_half(shape: ModelShape) -> None:
    split = ("roles.actor={pool: train, tensor: 4, pipeline: 2}", "roles.rollout.tensor=4")
    in_fp8 = (*split, "roles.rollout.precision=fp8")
    kept = "roles.rollout.keep_bf16=['*.o_proj', 'model.layers.0.*']"
    recipes = [make_recipe(*split), make_recipe(*in_fp8), make_recipe(*in_fp8, kept)]
    deployments = [deployed(recipe, shape) for recipe in recipes]
    moved = [reshard(each).total_bytes for each in deployments]
    held = [each.engine.weight_bytes for each in deployments if each.engine is not None]
    matrices = 1 - 2 * 2 * shape.vocab * shape.hidden / model_bytes(shape)
    for whole, half, between in (moved, held):
        # Norms, router and scales are small beside the matrices; embedding and head stay.
        assert half / whole == pytest.approx(1 - matrices / 2, abs=0.02)
        assert half < between < whole


def test_a_draft_that_learns_is_published_as_a_model_of_its_own_shape() -> None:
    recipe = make_recipe("pools.spare={gpus_per_node: 8}", "roles.drafter={pool: spare, every_steps: 4}")
    small = replace(SHAPE, num_layers=2)
    shapes = replace(shapes_of(SHAPE), others={"drafter": small})
    deployment = deploy(recipe, shapes, H100)
    draft, policy = draft_reshard(deployment), reshard(deployment)
    assert draft is not None
    num_engines = deployment.placement.num_engines
    # Norms are on every rank of an engine.
    assert draft.total_bytes == pytest.approx(num_engines * model_bytes(small), rel=1e-3)
    assert policy.total_bytes == pytest.approx(num_engines * model_bytes(SHAPE), rel=1e-3)
    assert draft_reshard(deploy(make_recipe(), shapes, H100)) is None
