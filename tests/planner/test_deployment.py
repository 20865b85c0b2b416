from __future__ import annotations

from pathlib import Path

import pytest

from megarl.families import PUBLIC_MODELS
from megarl.planner.deployment import StepWorkload, deploy, engine_requests
from megarl.planner.hardware import GPUS
from megarl.tools.quickstart.tiny_model import TinyShape, write_tiny_model
from tests.planner.recipes import PPO, make_recipe, placement_of, shapes_of


def test_ranks_have_the_coordinates_of_the_weights_layout_and_groups_and_engines_share_a_node() -> None:
    placement = placement_of()
    assert len(placement.ranks) == 16
    for rank in placement.ranks:
        found = placement.parallel.rank(tensor=rank.tensor, data=rank.data, pipeline=rank.pipeline)
        assert found == rank.rank
    for first in range(0, 16, 4):
        assert len({rank.place.node for rank in placement.ranks[first : first + 4]}) == 1, "tensor neighbours"
    engines = placement_of("pools.rollout.nodes=2")
    assert engines.num_engines == 8
    for engine in range(8):
        assert len({rank.place.node for rank in engines.engine_ranks if rank.engine == engine}) == 1


def test_separate_pools_share_no_gpu_and_a_shared_one_is_counted_once() -> None:
    separate = placement_of()
    assert not separate.is_shared
    assert (separate.num_gpus, separate.num_nodes) == (24, 3)
    shared = placement_of("roles.rollout.pool=train")
    assert shared.is_shared
    assert (shared.num_gpus, shared.num_engines) == (16, 8)


def test_pools_lie_side_by_side_on_one_machine() -> None:
    placement = placement_of("run.ray_address=null", "pools.train={gpus_per_node: 8}")
    assert placement.num_nodes == 1
    assert not placement.is_shared
    assert {rank.place.gpu for rank in placement.engine_ranks} == set(range(8, 16))


def test_a_run_without_engines_has_none() -> None:
    placement = placement_of("roles.rollout=null", "algorithm={kind: sft}")
    assert placement.num_engines == 0
    assert not placement.is_shared


def test_critic_and_reference_have_ranks_where_they_have_a_pool() -> None:
    apart = placement_of(*PPO)
    assert list(apart.models) == ["actor", "critic"]
    assert (apart.num_gpus, apart.num_nodes) == (40, 5)
    shared = placement_of(*PPO[1:], "roles.critic.pool=train", "roles.reference={pool: train, tensor: 8}")
    assert list(shared.models) == ["actor", "critic", "reference"]
    assert shared.models["reference"].parallel.data == 2
    assert (shared.num_gpus, shared.num_nodes) == (24, 3)


@pytest.mark.parametrize(("mean", "longest"), [(500, 1000), (900, 1000), (100, 4096)])
def test_assumed_lengths_have_the_mean_and_the_maximum(mean: int, longest: int) -> None:
    workload = StepWorkload(mean_prompt_tokens=10, mean_response_tokens=mean, max_response_tokens=longest)
    lengths = workload.lengths(1000)
    assert len(lengths) == 1000
    assert max(lengths) == longest
    assert sum(lengths) / 1000 == pytest.approx(mean, rel=0.02)


def test_recorded_lengths_are_replayed_between_their_quantiles() -> None:
    workload = StepWorkload(
        mean_prompt_tokens=10, mean_response_tokens=40, max_response_tokens=200, quantiles=(10, 20, 30, 200)
    )
    lengths = sorted(workload.lengths(300))
    assert lengths[-1] == 200
    assert lengths[100] == pytest.approx(20, abs=1)
    assert lengths[200] == pytest.approx(30, abs=1)


def test_long_and_short_responses_are_mixed_in_the_order_of_requests() -> None:
    workload = StepWorkload(mean_prompt_tokens=10, mean_response_tokens=500, max_response_tokens=1000)
    lengths = workload.lengths(400)
    for first in range(0, 400, 100):
        assert sum(lengths[first : first + 100]) / 100 == pytest.approx(500, rel=0.1)
    assert workload.lengths(1) == [1000]


@pytest.mark.parametrize(
    ("model", "assignments", "requests", "limit"),
    [
        # 128 prompts x 8 rollouts on 4 engines.
        ("qwen2.5-7b", (), 256, "all that it gets at once"),
        ("qwen2.5-1.5b", ("pools.rollout.gpus_per_node=2", "sampling.rollouts_per_prompt=16"), 2048, "all that"),
        ("qwen2.5-7b", ("train.max_staleness=2",), 512, "all that"),
        # A few rollouts of training, and an evaluation of nobody knows how many prompts.
        ("qwen2.5-7b", ("train.prompts_per_step=8", "evaluation={every_steps: 1}"), 64, "all that"),
        ("qwen2.5-7b", ("roles.rollout.max_cached_tokens=20480",), 16, "its cache holds 20,480 tokens, 1,280 for each"),
        ("qwen2.5-7b", ("roles.rollout.max_running_requests=7",), 7, "max_running_requests of the recipe"),
        ("qwen2.5-7b", ("train.prompts_per_step=100000",), 4096, "more are never derived"),
    ],
)
def test_an_engine_runs_what_it_gets_as_far_as_its_cache_holds_it(
    model: str, assignments: tuple[str, ...], requests: int, limit: str
) -> None:
    recipe = make_recipe(f"model.path={model}", "roles.rollout.max_cached_tokens=100000000", *assignments)
    deployment = deploy(recipe, shapes_of(PUBLIC_MODELS[model]), GPUS["h200"])
    rollout = deployment.roles.rollout
    assert rollout is not None
    assert recipe.roles.rollout is not None
    assert rollout.running_requests == requests
    assert rollout.outstanding_requests == requests + max(1, requests // 8), "some wait in the engine"
    assert engine_requests(recipe, recipe.roles.rollout, deployment.engine).limit.startswith(limit)


def cached_tokens(*assignments: str) -> int:
    deployment = deploy(make_recipe(*assignments), shapes_of(PUBLIC_MODELS["qwen2.5-1.5b"]), GPUS["h200"])
    assert deployment.engine is not None
    return deployment.engine.cached_tokens


def test_engines_beside_trainers_cache_no_more_than_all_requests_at_their_longest() -> None:
    shared = ("roles.rollout.pool=train", "roles.rollout.max_running_requests=64", "data.max_prompt_tokens=100")
    assert cached_tokens(*shared, "sampling.max_response_tokens=200") == 64 * 300
    evaluated = "evaluation={every_steps: 1, max_response_tokens: 900}"
    assert cached_tokens(*shared, "sampling.max_response_tokens=200", evaluated) == 64 * 1000
    assert cached_tokens(*shared, "roles.rollout.max_cached_tokens=1000000") == 1_000_000
    whole = cached_tokens(*shared[1:], "sampling.max_response_tokens=200")
    assert whole > 1_000_000, "elsewhere nobody has a use for it"
    small = cached_tokens(*shared, "roles.rollout.memory_fraction=0.013")
    assert 0 < small < 64 * (100 + 1024), "no more than there is"


def test_frozen_models_get_their_requests_as_well(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "judge", TinyShape(), seed=1)
    judge = f"roles.judge.strict={{pool: rollout, model: {tmp_path / 'judge'}, tensor: 1, max_cached_tokens: 20480}}"
    deployment = deploy(make_recipe(judge), shapes_of(PUBLIC_MODELS["qwen2.5-7b"]), GPUS["h200"])
    assert deployment.roles.frozen["judge.strict"].running_requests == 16
