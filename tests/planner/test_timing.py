from __future__ import annotations

import pytest

from megarl.config.recipe import Recipe
from megarl.families import PUBLIC_MODELS
from megarl.families.shape import ModelShape
from megarl.planner.deployment import StepWorkload, deploy
from megarl.planner.flops import forward_work
from megarl.planner.hardware import (
    ALL_TO_ALL_EFFICIENCY,
    DENSE_EFFICIENCY,
    DETERMINISTIC_SLOWDOWN,
    FP8_SPEEDUP,
    GPUS,
    HOST_GB_PER_S,
    PASS_S,
    SWITCH_S,
)
from megarl.planner.ledger import snapshot_bytes
from megarl.planner.memory import bare_weights
from megarl.planner.timing import PhaseName, Timing, estimate, longest_call_s
from tests.planner.recipes import PPO, make_recipe, placement_of, shapes_of

SHAPE = PUBLIC_MODELS["qwen2.5-7b"]
H100 = GPUS["h100"]


def time_of(recipe: Recipe, *, response: int = 1000, shape: ModelShape = SHAPE) -> Timing:
    deployment = deploy(recipe, shapes_of(shape), H100)
    return estimate(
        deployment,
        StepWorkload(
            mean_prompt_tokens=100,
            mean_response_tokens=response,
            max_response_tokens=max(response, recipe.sampling.max_response_tokens),
        ),
        algorithm=recipe.algorithm,
        train=recipe.train,
        sampling=recipe.sampling,
        snapshots={
            role: snapshot_bytes(model, recipe.checkpoint)
            for role, model in deployment.models.items()
            if model.is_trained
        },
        file_system_gb_per_s=5,
        publish_s=0.5,
    )


def test_an_update_is_six_operations_per_weight_and_token() -> None:
    one_gpu = ("pools.train={gpus_per_node: 1}", "roles.actor={pool: train}")
    timing = time_of(make_recipe(*one_gpu, "train.share_prefixes=false"))
    multiplied = 7_615_616_512 - 152064 * 3584
    tokens = 128 * 8 * 1100
    assert timing.trained_tokens == tokens
    work = forward_work(SHAPE, num_tokens=tokens, num_squared_tokens=0)
    assert (work.dense, work.expert, work.attention) == (2 * multiplied * tokens, 0, 0)
    least_s = 3 * work.dense / (989e12 * DENSE_EFFICIENCY)
    assert least_s < timing.seconds(PhaseName.UPDATE) < 1.1 * least_s


def test_fp8_shortens_the_products_of_layers_and_not_the_head() -> None:
    def update_s(precision: str) -> float:
        actor = f"roles.actor={{pool: train, precision: {precision}}}"
        return time_of(make_recipe("pools.train={gpus_per_node: 1}", actor)).seconds(PhaseName.UPDATE)

    share = 152064 * 3584 / (7_615_616_512 - 152064 * 3584)
    expected = share + (1 - share) / FP8_SPEEDUP["tensorwise"]
    assert update_s("fp8") / update_s("bf16") == pytest.approx(expected, rel=0.03)


def test_fp8_shortens_no_products_of_experts() -> None:
    mixture = PUBLIC_MODELS["qwen3-30b-a3b"]

    def timing_in(precision: str) -> Timing:
        actor = f"roles.actor={{pool: train, precision: {precision}}}"
        return time_of(make_recipe("pools.train={gpus_per_node: 1}", actor), shape=mixture)

    wide, narrow = timing_in("bf16"), timing_in("fp8")
    work = forward_work(mixture, num_tokens=wide.computed_tokens, num_squared_tokens=0)
    in_fp8 = work.dense - 2 * mixture.vocab * mixture.hidden * wide.computed_tokens
    saved_s = 3 * in_fp8 * (1 - 1 / FP8_SPEEDUP["tensorwise"]) / (989e12 * DENSE_EFFICIENCY)
    gained_s = wide.seconds(PhaseName.UPDATE) - narrow.seconds(PhaseName.UPDATE)
    assert gained_s == pytest.approx(saved_s, rel=1e-3)


def test_attention_is_the_causal_half_of_the_squared_lengths() -> None:
    work = forward_work(SHAPE, num_tokens=0, num_squared_tokens=1100**2)
    assert work.total == work.attention == 2 * 28 * 3584 * 1100**2


def test_a_mixture_computes_with_the_experts_of_a_token_and_reads_those_of_the_batch() -> None:
    mixture = PUBLIC_MODELS["qwen3-30b-a3b"]
    work = forward_work(mixture, num_tokens=1, num_squared_tokens=0)
    assert work.total == 2 * (3_353_032_704 - 151936 * 2048)
    assert work.expert == 2 * 48 * 8 * 3 * 768 * 2048
    alone = time_of(make_recipe("roles.rollout.max_running_requests=1"), shape=mixture)
    many = time_of(make_recipe("roles.rollout.max_running_requests=64"), shape=mixture)
    fast, slow = many.seconds(PhaseName.ROLLOUT), alone.seconds(PhaseName.ROLLOUT)
    assert fast < slow < 16 * fast


def test_every_token_computes_with_the_shared_expert() -> None:
    mixture = PUBLIC_MODELS["qwen1.5-moe-a2.7b"]
    work = forward_work(mixture, num_tokens=1, num_squared_tokens=0)
    assert work.total == 2 * (2_689_173_504 - 151936 * 2048)
    assert work.expert == 2 * 24 * 4 * 3 * 1408 * 2048


def test_old_log_probabilities_cost_a_forward_pass_only_with_several_updates() -> None:
    assert time_of(make_recipe()).seconds(PhaseName.OLD) == 0
    timing = time_of(make_recipe("train.prompts_per_update=64"))
    forward_s, update_s = timing.seconds(PhaseName.OLD) - PASS_S, timing.seconds(PhaseName.UPDATE) - PASS_S
    assert 0.25 < forward_s / update_s < 0.4


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
    assert time_of(make_recipe()).running_requests == 256
    assert time_of(make_recipe("roles.rollout.max_cached_tokens=6000")).running_requests == 4


def test_a_step_is_the_sum_of_its_phases() -> None:
    timing = time_of(make_recipe())
    assert [phase.name for phase in timing.phases] == [PhaseName.ROLLOUT, PhaseName.UPDATE, PhaseName.PUBLISH]
    assert timing.step_s == sum(phase.seconds for phase in timing.phases)
    assert timing.seconds(PhaseName.PUBLISH) == 0.5


def test_half_of_what_is_allowed_is_assumed() -> None:
    recipe = make_recipe()
    assert StepWorkload.half(recipe.data, recipe.sampling) == StepWorkload(
        mean_prompt_tokens=512, mean_response_tokens=1536, max_response_tokens=3072
    )


RECOMPUTING = "{recompute_granularity: full, recompute_method: uniform, recompute_num_layers: 1}"
FILTER = "algorithm={{kind: grpo, filter: {{oversampling: {}}}}}".format


@pytest.mark.parametrize(
    ("before", "after", "phase", "lowest", "highest"),
    [
        # Epochs repeat the updates and not the questions.
        (("train.prompts_per_update=64",), ("train.epochs=2",), PhaseName.UPDATE, 2, 2),
        (("train.prompts_per_update=64",), ("train.epochs=2",), PhaseName.OLD, 1, 1),
        # A forward pass more.
        ((), (f"roles.actor.megatron={RECOMPUTING}",), PhaseName.UPDATE, 1.2, 4 / 3),
        # Generated and not trained.
        ((FILTER(1),), (FILTER(3),), PhaseName.ROLLOUT, 1.5, 3),
        ((FILTER(1),), (FILTER(3),), PhaseName.UPDATE, 1, 1),
        (
            (),
            ("roles.rollout.is_deterministic=true",),
            PhaseName.ROLLOUT,
            0.95 * DETERMINISTIC_SLOWDOWN,
            1.05 * DETERMINISTIC_SLOWDOWN,
        ),
        # Steps under way at once share the wait for the longest response.
        (
            ("train.max_staleness=1", "train.prompts_per_step=32"),
            ("train.max_staleness=4",),
            PhaseName.ROLLOUT,
            0.1,
            0.6,
        ),
    ],
)
def test_a_change_costs_this_much_more(
    before: tuple[str, ...], after: tuple[str, ...], phase: PhaseName, lowest: float, highest: float
) -> None:
    plain, changed = time_of(make_recipe(*before)), time_of(make_recipe(*before, *after))
    assert changed.trained_tokens == plain.trained_tokens
    assert lowest <= changed.seconds(phase) / plain.seconds(phase) <= highest


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
    assert timing.seconds(PhaseName.CRITIC_UPDATE) > 5 * (timing.seconds(PhaseName.VALUES) - PASS_S)


def test_a_draft_costs_its_update_in_one_of_several_steps() -> None:
    often, seldom = (
        time_of(make_recipe("pools.spare={gpus_per_node: 8}", f"roles.drafter={{pool: spare, every_steps: {every}}}"))
        for every in (1, 4)
    )
    assert often.seconds(PhaseName.DRAFT_UPDATE) == pytest.approx(4 * seldom.seconds(PhaseName.DRAFT_UPDATE))
    assert {phase.name: phase.is_waited_for for phase in seldom.phases}[PhaseName.DRAFT_UPDATE] is False


def test_the_longest_call_is_a_whole_update_of_a_draft_that_learns_seldom() -> None:
    longest = [
        longest_call_s(
            deploy(recipe, shapes_of(SHAPE), H100),
            StepWorkload.half(recipe.data, recipe.sampling),
            algorithm=recipe.algorithm,
            train=recipe.train,
            sampling=recipe.sampling,
        )
        for recipe in (
            make_recipe("pools.spare={gpus_per_node: 1}", f"roles.drafter={{pool: spare, every_steps: {every}}}")
            for every in (1, 8)
        )
    ]
    assert longest[0] == pytest.approx(longest[1])


def test_models_of_one_pool_wait_for_each_other() -> None:
    together = time_of(make_recipe(*PPO[1:], "roles.critic.pool=train"))
    assert all(phase.is_waited_for for phase in together.phases)


def test_weights_that_change_places_cost_time_over_the_host_link() -> None:
    timing = time_of(make_recipe(*PPO))
    exchange = timing.seconds(PhaseName.REFERENCE) - timing.seconds(PhaseName.OLD)
    weights = max(stage.num_bytes for stage in bare_weights(SHAPE, placement_of().parallel, dtype="bfloat16"))
    assert exchange == pytest.approx(4 * weights / (HOST_GB_PER_S * 1e9))


def test_a_save_copies_first_and_writes_behind_the_training() -> None:
    whole, weights = time_of(make_recipe()), time_of(make_recipe("checkpoint.contents=weights"))
    assert 0 < weights.copy_s < whole.copy_s < whole.save_s
    # 2 bytes of weights and 12 of optimizer per parameter, to one file system, up to padding.
    assert whole.save_s == pytest.approx(14 * 7.6156e9 / 5e9, rel=0.01)


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


def test_the_all_to_all_of_a_mixture_takes_its_time_over_the_network() -> None:
    """The update of grpo_235b: 262 kB per token and layer, 131,072 tokens and 12 layers per GPU, half of it to the
    other node of sixteen expert ranks."""
    mixture = PUBLIC_MODELS["qwen3-235b-a22b"]
    recipe = make_recipe(
        "pools={train: {nodes: 32, gpus_per_node: 8}, rollout: {nodes: 8, gpus_per_node: 8}}",
        "roles.actor={pool: train, tensor: 4, is_sequence_parallel: true, pipeline: 8, last_stage_layers: 10, "
        "expert: 16, expert_tensor: 1}",
        "roles.rollout={pool: rollout, tensor: 8}",
        "train={prompts_per_step: 256, prompts_per_update: 128, tokens_per_micro_batch: 8192}",
    )
    network_s = 131_072 * 12 * 262_144 / 2 / (50e9 * ALL_TO_ALL_EFFICIENCY)
    timing = time_of(recipe, shape=mixture, response=1948)
    assert timing.trained_tokens == pytest.approx(131_072 * 32, rel=0.001)
    assert timing.seconds(PhaseName.UPDATE) > max(11, network_s)


def test_tensor_parallelism_costs_traffic_and_more_of_it_between_nodes() -> None:
    pool = "pools.train={nodes: 2, gpus_per_node: 4}"
    alone, near, far = (
        time_of(make_recipe(pool, f"roles.actor={{pool: train, {split}}}"), shape=PUBLIC_MODELS["llama-3.1-8b"])
        for split in ("tensor: 1", "tensor: 4", "tensor: 8")
    )
    assert alone.seconds(PhaseName.UPDATE) < near.seconds(PhaseName.UPDATE) < far.seconds(PhaseName.UPDATE) / 1.5


def test_a_shared_pool_changes_hands_once_a_step() -> None:
    assert time_of(make_recipe()).seconds(PhaseName.SWITCH) == 0
    stays, without_optimizer, leaves = (
        time_of(make_recipe("roles.rollout.pool=train", f"roles.actor.offload={level}")).seconds(PhaseName.SWITCH)
        for level in ("nothing", "optimizer", "everything")
    )
    assert stays == without_optimizer == SWITCH_S
    assert leaves > stays + 0.1


def test_an_optimizer_in_host_memory_passes_through_the_gpu_in_every_update() -> None:
    def update_s(level: str, prompts_per_update: int) -> float:
        changes = (f"roles.actor.offload={level}", f"train.prompts_per_update={prompts_per_update}")
        return time_of(make_recipe("roles.rollout.pool=train", *changes)).seconds(PhaseName.UPDATE)

    once, four_times = (update_s("optimizer", count) - update_s("nothing", count) for count in (128, 32))
    assert once > 0
    assert four_times == pytest.approx(4 * once)


def test_a_teacher_scores_before_the_update() -> None:
    teacher = "roles.teacher.same={kind: ranks, pool: train, tensor: 4, pipeline: 2, model: qwen2.5-7b}"
    taught = time_of(make_recipe(teacher, "algorithm={kind: grpo, distillation: {kind: reverse_kl}}"))
    plain = time_of(make_recipe())
    (phase,) = (phase for phase in taught.phases if phase.name is PhaseName.TEACHER)
    assert phase.is_waited_for
    assert taught.step_s == pytest.approx(plain.step_s + phase.seconds)
    assert phase.seconds > 0
