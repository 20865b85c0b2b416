from __future__ import annotations

import pytest

from megarl.config.model import ModelShape
from megarl.config.public_models import PUBLIC_MODELS
from megarl.config.recipe import Recipe
from megarl.planner.deployment import deploy
from megarl.planner.hardware import GPUS, HOST_GB_PER_S, TRAIN_EFFICIENCY
from megarl.planner.ledger import snapshot_bytes
from megarl.planner.memory import bare_weights
from megarl.planner.timing import PhaseName, StepWorkload, Timing, estimate
from tests.planner.recipes import PPO, make_recipe, placement_of, shapes_of

SHAPE = PUBLIC_MODELS["qwen2.5-7b"]
H100 = GPUS["h100"]


def time_of(recipe: Recipe, *, response: int = 1000, shape: ModelShape = SHAPE) -> Timing:
    deployment = deploy(recipe, shapes_of(shape), H100)
    return estimate(
        deployment,
        StepWorkload(mean_prompt_tokens=100, mean_response_tokens=response),
        algorithm=recipe.algorithm,
        train=recipe.train,
        sampling=recipe.sampling,
        snapshots={
            role: snapshot_bytes(model, recipe.checkpoint)
            for role, model in deployment.models.items()
            if role != "reference"
        },
        publish_s=0.5,
    )


def test_an_update_is_six_operations_per_weight_and_token() -> None:
    timing = time_of(make_recipe("roles.actor={pool: train, tensor: 4}"))
    multiplied = 7_615_616_512 - 152064 * 3584
    attention = 2 * 28 * 3584 * 1100
    flops = 3 * timing.trained_tokens * (2 * multiplied + attention)
    assert timing.trained_tokens == 128 * 8 * 1100
    assert timing.seconds(PhaseName.UPDATE) == pytest.approx(flops / (16 * 989e12 * TRAIN_EFFICIENCY))


def test_a_mixture_computes_with_the_experts_of_a_token_and_reads_those_of_the_batch() -> None:
    mixture = PUBLIC_MODELS["qwen3-30b-a3b"]
    recipe = make_recipe("roles.actor={pool: train, expert: 8}")
    timing = time_of(recipe, shape=mixture)
    attention = 2 * 48 * 32 * 128 * 1100
    flops = 3 * timing.trained_tokens * (2 * (3_353_032_704 - 151936 * 2048) + attention)
    assert timing.seconds(PhaseName.UPDATE) == pytest.approx(flops / (16 * 989e12 * TRAIN_EFFICIENCY))
    alone = time_of(make_recipe("roles.rollout.max_running_requests=1"), shape=mixture)
    many = time_of(make_recipe("roles.rollout.max_running_requests=64"), shape=mixture)
    fast, slow = many.seconds(PhaseName.ROLLOUT), alone.seconds(PhaseName.ROLLOUT)
    assert fast < slow < 16 * fast


def test_old_log_probabilities_cost_a_forward_pass_only_with_several_updates() -> None:
    assert time_of(make_recipe()).seconds(PhaseName.OLD) == 0
    timing = time_of(make_recipe("train.prompts_per_update=64"))
    assert timing.seconds(PhaseName.OLD) == pytest.approx(timing.seconds(PhaseName.UPDATE) / 3)


def test_a_pipeline_has_a_bubble_that_chunks_make_smaller() -> None:
    plain = time_of(make_recipe())
    chunked = time_of(make_recipe("roles.actor.virtual_pipeline=2"))
    assert plain.bubble == pytest.approx(1 / (plain.num_micro_batches + 1))
    assert 0 < chunked.bubble < plain.bubble


def test_the_longest_response_sets_the_pace_of_a_small_step() -> None:
    small = time_of(make_recipe("train.prompts_per_step=4"), response=10)
    longer = time_of(make_recipe("train.prompts_per_step=4", "sampling.max_response_tokens=6144"), response=10)
    assert longer.seconds(PhaseName.ROLLOUT) == pytest.approx(2 * small.seconds(PhaseName.ROLLOUT), rel=0.02)


def test_a_small_cache_lets_fewer_requests_run() -> None:
    assert time_of(make_recipe()).running_requests == 128
    assert time_of(make_recipe("roles.rollout.max_cached_tokens=6000")).running_requests == 10


def test_a_step_is_the_sum_of_its_phases() -> None:
    timing = time_of(make_recipe())
    assert [phase.name for phase in timing.phases] == [PhaseName.ROLLOUT, PhaseName.UPDATE, PhaseName.PUBLISH]
    assert timing.step_s == sum(phase.seconds for phase in timing.phases)
    assert timing.seconds(PhaseName.PUBLISH) == 0.5


def test_half_of_what_is_allowed_is_assumed() -> None:
    recipe = make_recipe()
    assert StepWorkload.half(recipe.data, recipe.sampling) == StepWorkload(
        mean_prompt_tokens=512, mean_response_tokens=1536
    )


def test_epochs_repeat_the_updates_and_not_the_questions() -> None:
    once, twice = (
        time_of(make_recipe("train.prompts_per_update=64")),
        time_of(make_recipe("train.prompts_per_update=64", "train.epochs=2")),
    )
    assert twice.seconds(PhaseName.UPDATE) == 2 * once.seconds(PhaseName.UPDATE)
    assert twice.seconds(PhaseName.OLD) == once.seconds(PhaseName.OLD)
    assert twice.num_micro_batches == once.num_micro_batches


def test_a_step_with_critic_and_reference_waits_for_the_slower_pool() -> None:
    timing = time_of(make_recipe(*PPO, "roles.critic.epochs=2"))
    waited = {phase.name: phase.is_waited_for for phase in timing.phases}
    assert waited == {
        PhaseName.ROLLOUT: True,
        PhaseName.OLD: True,
        PhaseName.REFERENCE: True,
        PhaseName.VALUES: False,
        PhaseName.UPDATE: False,
        PhaseName.CRITIC_UPDATE: True,
        PhaseName.PUBLISH: True,
    }
    assert timing.seconds(PhaseName.CRITIC_UPDATE) == pytest.approx(6 * timing.seconds(PhaseName.VALUES))


def test_models_of_one_pool_wait_for_each_other() -> None:
    together = time_of(make_recipe(*PPO[1:], "roles.critic.pool=train"))
    assert all(phase.is_waited_for for phase in together.phases)


def test_weights_that_change_places_cost_time_over_the_host_link() -> None:
    timing = time_of(make_recipe(*PPO))
    exchange = timing.seconds(PhaseName.REFERENCE) - timing.seconds(PhaseName.OLD)
    weights = max(stage.num_bytes for stage in bare_weights(SHAPE, placement_of().parallel, dtype="bfloat16"))
    assert exchange == pytest.approx(4 * weights / (HOST_GB_PER_S * 1e9))


def test_recomputation_adds_a_forward_pass_to_the_update() -> None:
    options = "{recompute_granularity: full, recompute_method: uniform, recompute_num_layers: 1}"
    plain, recomputing = time_of(make_recipe()), time_of(make_recipe(f"roles.actor.megatron={options}"))
    assert recomputing.seconds(PhaseName.UPDATE) == pytest.approx(4 / 3 * plain.seconds(PhaseName.UPDATE))


def test_a_save_copies_first_and_writes_behind_the_training() -> None:
    whole, weights = time_of(make_recipe()), time_of(make_recipe("checkpoint.contents=weights"))
    assert 0 < weights.copy_s < whole.copy_s < whole.save_s
    # 2 bytes of weights and 12 of optimizer per parameter, over two nodes, up to padding.
    assert whole.save_s == pytest.approx(14 * 7.6156e9 / (2 * 2e9), rel=0.01)


@pytest.mark.parametrize("response", [50, 4000])
def test_with_staleness_a_step_takes_as_long_as_its_longer_side(response: int) -> None:
    in_turn = time_of(make_recipe(), response=response)
    beside = time_of(make_recipe("train.max_staleness=1"), response=response)
    assert [(phase.name, phase.seconds) for phase in beside.phases] == [
        (phase.name, phase.seconds) for phase in in_turn.phases
    ]
    generating, publishing = in_turn.seconds(PhaseName.ROLLOUT), in_turn.seconds(PhaseName.PUBLISH)
    training = in_turn.step_s - generating - publishing
    assert beside.step_s == pytest.approx(max(generating, training) + publishing)
    assert beside.step_s < in_turn.step_s
