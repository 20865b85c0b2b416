"""Memory of GPUs in each phase, and host memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megarl.config.recipe import Recipe
from megarl.families import PUBLIC_MODELS
from megarl.planner.deployment import deploy, find_shapes
from megarl.planner.hardware import GPUS
from megarl.planner.ledger import (
    ALLOCATOR_SHARE,
    TRAINER_CONTEXT_BYTES,
    HostLedger,
    LedgerItem,
    MemoryLedger,
    MemoryPhase,
    host_ledgers,
    ledgers,
    with_release,
)
from megarl.planner.memory import PUBLISH_COMMUNICATOR_BYTES, bare_weights, stage_memory
from megarl.weights.algebra.buckets import DEFAULT_BUCKET_BYTES
from megarl.weights.layouts.canonical import num_parameters
from megarl.weights.layouts.megatron import MegatronParallel
from tests.planner.recipes import PPO, make_recipe, shapes_of

SHAPE = replace(PUBLIC_MODELS["qwen2.5-7b"], num_layers=8)
SHAPES = shapes_of(SHAPE)
H100 = GPUS["h100"]
SPLIT = MegatronParallel(tensor=4, pipeline=2, data=2)


def found_in(recipe: Recipe) -> dict[tuple[str, MemoryPhase], dict[str, int]]:
    found: dict[tuple[str, MemoryPhase], dict[str, int]] = {}
    for ledger in ledgers(deploy(recipe, SHAPES, H100), recipe.algorithm):
        items = found.setdefault((ledger.where, ledger.phase), {})
        for item in ledger.items:
            items[item.name] = items.get(item.name, 0) + item.num_bytes
    return found


def names(ledger: MemoryLedger | HostLedger) -> set[str]:
    return {item.name for item in ledger.items}


def test_a_shared_pool_holds_trainer_and_engine_at_once() -> None:
    recipe = make_recipe("roles.rollout.pool=train")
    found = {item.phase: item for item in ledgers(deploy(recipe, SHAPES, H100), recipe.algorithm)}
    assert set(found) == set(MemoryPhase) - {MemoryPhase.SCORING, MemoryPhase.JUDGING}
    assert {"optimizer", "KV cache", "engine weights"} <= names(found[MemoryPhase.GENERATING])
    assert "KV cache" not in names(found[MemoryPhase.TRAINING])
    assert "activations" in names(found[MemoryPhase.TRAINING])


def test_what_an_actor_offloads_is_in_host_memory() -> None:
    plain = found_in(make_recipe("roles.rollout.pool=train"))
    shared = "actor + engine"
    for offload, weights in (("optimizer", set[str]()), ("everything", {"weights"})):
        recipe = make_recipe("roles.rollout.pool=train", f"roles.actor.offload={offload}")
        found = found_in(recipe)
        gone = {phase: set(plain[shared, phase]) - set(found[shared, phase]) for _, phase in found}
        assert gone == {
            MemoryPhase.STARTING: {"optimizer"},
            MemoryPhase.GENERATING: {"optimizer", "gradients", *weights},
            MemoryPhase.TRAINING: {"optimizer"},
            MemoryPhase.PUBLISHING: {"optimizer", "gradients"},
        }
        # Two pieces of 64 MiB: master weights, two moments and what Adam computes with.
        assert found[shared, MemoryPhase.TRAINING]["optimizer in pieces"] == 2 * 4 * 64 << 20
        (host,) = host_ledgers(deploy(recipe, SHAPES, H100), recipe.checkpoint)
        kept = sum(item.num_bytes for item in host.items if item.name in ("actor's optimizer", "actor's weights"))
        stages = stage_memory(SHAPE, SPLIT, dtype="bfloat16")
        # A node has the eight ranks of one stage.
        assert kept == 8 * max(stage.optimizer_bytes + len(weights) * stage.weight_bytes for stage in stages)


def test_a_model_is_built_with_its_weights_twice_before_there_is_an_optimizer() -> None:
    found = found_in(make_recipe("roles.rollout.pool=train", "roles.actor.offload=optimizer"))
    starting = found["actor + engine", MemoryPhase.STARTING]
    assert starting["weights before their buffer"] == starting["weights"]


def test_policies_share_a_base_that_the_next_one_has_for_itself_while_it_starts() -> None:
    adapted = ("model.lora={rank: 8}",)
    one = found_in(make_recipe(*adapted))
    four = found_in(make_recipe(*adapted, "policies={a: {}, b: {}, c: {}, d: {}}"))
    (base,) = {each.num_bytes for each in bare_weights(SHAPE, SPLIT, dtype="bfloat16")[:1]}
    starting = four["actor", MemoryPhase.STARTING]
    assert ("actor", MemoryPhase.STARTING) not in one
    assert starting["base before it is shared"] <= starting["weights"]
    assert abs(starting["base before it is shared"] - base) < base / 4, "that of the fullest stage"
    for phase, times in ((MemoryPhase.TRAINING, 4), (MemoryPhase.STARTING, 4)):
        assert four["actor", phase]["optimizer"] == times * one["actor", MemoryPhase.TRAINING]["optimizer"]
    slots = ("engine", MemoryPhase.GENERATING)
    # One more is for requests without an adapter.
    assert 3 * four[slots]["adapter slots"] == 9 * one[slots]["adapter slots"]


def test_no_bucket_is_held_where_engines_find_the_whole_model_on_their_node() -> None:
    recipe = make_recipe("roles.rollout={pool: train, tensor: 4}", "roles.actor.pipeline=1")
    for items in found_in(recipe).values():
        assert not {name for name in items if name.startswith("publish")}


def test_both_ends_of_a_publish_over_the_network_hold_a_communicator_and_two_buckets() -> None:
    found = found_in(make_recipe())
    for items in (found["actor", MemoryPhase.TRAINING], found["engine", MemoryPhase.GENERATING]):
        assert items["publish communicator"] == PUBLISH_COMMUNICATOR_BYTES
        assert items["publish buckets"] == 2 * DEFAULT_BUCKET_BYTES


def test_a_shared_pool_whose_nodes_lack_weights_publishes_through_host_memory() -> None:
    recipe = make_recipe("roles.rollout.pool=train")
    assert "publish communicator" not in found_in(recipe)["actor + engine", MemoryPhase.PUBLISHING]
    (host,) = host_ledgers(deploy(recipe, SHAPES, H100), recipe.checkpoint)
    (lanes,) = (item.num_bytes for item in host.items if item.name == "publish buckets")
    assert lanes == 2 * 8 * 2 * DEFAULT_BUCKET_BYTES


def test_a_publish_to_another_pool_meets_the_memory_that_the_last_pass_left_with_the_allocator() -> None:
    found = found_in(make_recipe())
    training, publishing = (found["actor", phase] for phase in (MemoryPhase.TRAINING, MemoryPhase.PUBLISHING))
    assert sum(publishing.values()) == sum(training.values())
    shared = found_in(make_recipe("roles.rollout.pool=train", "roles.rollout.release=everything"))
    assert "allocator" not in shared["actor + engine", MemoryPhase.PUBLISHING]


def test_engines_sleep_beside_trainers_and_release_everything_leaves_their_weights_until_the_publish() -> None:
    awake = {MemoryPhase.GENERATING, MemoryPhase.PUBLISHING}
    for release, expected in (
        ("kv_cache", {*awake, MemoryPhase.STARTING, MemoryPhase.TRAINING}),
        ("everything", awake),
    ):
        found = found_in(make_recipe("roles.rollout.pool=train", f"roles.rollout.release={release}"))
        assert {phase for (_, phase), items in found.items() if "engine weights" in items} == expected
        starting = found["actor + engine", MemoryPhase.STARTING]
        assert {"weights", "gradients", "optimizer", "engine graphs"} <= set(starting)
        assert "KV cache" not in starting


def test_engines_give_up_nothing_beside_trainers_that_fit_besides() -> None:
    def released(*overrides: str) -> str | None:
        recipe = make_recipe("roles.rollout.pool=train", *overrides)
        rollout = with_release(deploy(recipe, SHAPES, H100), recipe.algorithm).roles.rollout
        assert rollout is not None
        return rollout.release

    assert released() == "nothing"
    assert released("roles.rollout.max_cached_tokens=7500000") == "kv_cache"
    assert released("roles.actor.offload=optimizer") == "kv_cache"
    assert released("roles.rollout.release=everything") == "everything"
    found = found_in(make_recipe("roles.rollout.pool=train", "roles.rollout.release=nothing"))
    assert all("KV cache" in items for items in found.values())
    training, generating = (found["actor + engine", phase] for phase in (MemoryPhase.TRAINING, MemoryPhase.GENERATING))
    assert sum(generating.values()) == sum(training.values())


def test_blocks_that_the_allocator_cannot_use_are_counted_in_a_pass() -> None:
    training = found_in(make_recipe())["actor", MemoryPhase.TRAINING]
    activations = training["activations"] + training.get("log-probabilities", 0)
    assert training["allocator"] == pytest.approx(ALLOCATOR_SHARE * activations, abs=1)


def test_separate_pools_are_counted_apart() -> None:
    recipe = make_recipe()
    found = ledgers(deploy(recipe, SHAPES, H100), recipe.algorithm)
    assert {item.where for item in found} == {"actor", "engine"}
    for ledger in found:
        assert ("optimizer" in names(ledger)) != ("KV cache" in names(ledger))


def test_a_cpu_run_has_no_limit() -> None:
    recipe = make_recipe("run.device=cpu")
    assert all(item.margin_bytes is None for item in ledgers(deploy(recipe, SHAPES, H100), recipe.algorithm))


def test_a_critic_of_its_own_pool_holds_what_an_actor_would_without_logits() -> None:
    found = found_in(make_recipe(*PPO))
    assert [phase for where, phase in found if where == "critic"] == [MemoryPhase.SCORING, MemoryPhase.TRAINING]
    critic = found["critic", MemoryPhase.TRAINING]
    stage = max(stage_memory(SHAPE.as_critic(), SPLIT, dtype="bfloat16"), key=lambda stage: stage.weight_bytes)
    assert critic["weights"] == stage.weight_bytes
    assert critic["gradients"] == 2 * critic["weights"]
    assert critic["optimizer"] == 6 * critic["weights"] // 2
    assert "log-probabilities" not in critic


def test_a_reference_in_host_memory_costs_the_gpu_one_tensor_while_scoring() -> None:
    found = found_in(make_recipe(*PPO))
    largest = max(stage.largest_bytes for stage in bare_weights(SHAPE, SPLIT, dtype="bfloat16"))
    assert found["actor", MemoryPhase.SCORING]["exchanged tensor"] == largest
    assert "exchanged tensor" not in found["actor", MemoryPhase.TRAINING]
    plain = found_in(make_recipe())
    assert ("actor", MemoryPhase.SCORING) not in plain
    assert found["actor", MemoryPhase.TRAINING] == plain["actor", MemoryPhase.TRAINING]


def test_a_reference_with_a_pool_holds_its_weights_and_nothing_else() -> None:
    pool = ("pools.reference={gpus_per_node: 8}", "roles.reference={pool: reference, tensor: 4}")
    found = found_in(make_recipe(*PPO, *pool))
    assert [phase for where, phase in found if where == "reference"] == [MemoryPhase.SCORING]
    reference = found["reference", MemoryPhase.SCORING]
    (stage,) = bare_weights(SHAPE, MegatronParallel(tensor=4), dtype="bfloat16")
    assert reference["weights"] == stage.num_bytes
    assert set(reference) == {"weights", "activations", "log-probabilities", "allocator", "context"}


def test_models_of_one_pool_are_all_held_and_compute_in_turn() -> None:
    recipe = make_recipe(*PPO[1:], "roles.critic.pool=train", "roles.reference={pool: train, tensor: 4}")
    found = found_in(recipe)
    where = "actor + critic + reference"
    for phase in (MemoryPhase.SCORING, MemoryPhase.TRAINING, MemoryPhase.PUBLISHING):
        assert {"actor weights", "critic optimizer", "reference weights"} <= set(found[where, phase])
        assert found[where, phase]["context"] == 3 * TRAINER_CONTEXT_BYTES
    training = found[where, MemoryPhase.TRAINING]
    assert sum(name.endswith("activations") for name in training) == 1


@pytest.mark.parametrize("contents", ["weights", "everything"])
def test_host_memory_holds_the_reference_and_what_a_save_copies(contents: str) -> None:
    recipe = make_recipe(*PPO, f"checkpoint.contents={contents}")
    actor, critic = host_ledgers(deploy(recipe, SHAPES, H100), recipe.checkpoint)
    assert (actor.where, critic.where) == ("actor", "critic")
    # A node has the eight ranks of one stage: four shares of it, each twice.
    weights = bare_weights(SHAPE, SPLIT, dtype="bfloat16")
    optimizer = stage_memory(SHAPE, SPLIT, dtype="bfloat16")
    items = {item.name: item.num_bytes for item in actor.items}
    assert items["reference weights"] == 8 * max(stage.num_bytes for stage in weights)
    copied = [
        stage.num_bytes // 2 + (state.optimizer_bytes if contents == "everything" else 0)
        for stage, state in zip(weights, optimizer, strict=True)
    ]
    assert items["actor's snapshot, while saving"] == 8 * max(copied)
    assert names(critic) == {"critic's snapshot, while saving"}


def test_nothing_is_copied_where_nothing_is_saved() -> None:
    recipe = make_recipe("checkpoint={save_every_steps: null, save_at_end: false}")
    assert host_ledgers(deploy(recipe, SHAPES, H100), recipe.checkpoint) == ()


def test_one_gpu_for_both_roles_holds_what_was_seen_on_an_h200() -> None:
    """recipes/gpu_smoke.yaml with `offload: everything`; a step was one micro-batch of 5720 tokens. See docs."""
    recipe = make_recipe(
        "pools.train={gpus_per_node: 1}",
        "roles.actor={pool: train, offload: everything}",
        "roles.rollout={pool: train, max_cached_tokens: 200000}",
        "data.max_prompt_tokens=16",
        "sampling.max_response_tokens=5",
        "train.tokens_per_micro_batch=5720",
    )
    shape = PUBLIC_MODELS["qwen2.5-0.5b"]
    found = {
        ledger.phase: ledger.total_bytes / 2**20
        for ledger in ledgers(deploy(recipe, shapes_of(shape), GPUS["h200"]), recipe.algorithm)
    }
    assert found[MemoryPhase.GENERATING] == pytest.approx(8573, rel=0.15)
    assert found[MemoryPhase.TRAINING] == pytest.approx(20_781, rel=0.15)


@pytest.mark.parametrize(
    ("role", "others", "size"),
    [
        ("reward_model.helpful", ("reward={kind: reward_model}",), "7b"),
        ("teacher.large", ("roles.teacher.large.kind=engines", "algorithm={kind: distill}"), "72b"),
    ],
)
def test_the_engines_of_a_frozen_model_fill_their_own_pool(role: str, others: tuple[str, ...], size: str) -> None:
    name = f"qwen2.5-{size}"
    config = f"roles.{role}={{pool: scores, tensor: 4, model: {name}, max_cached_tokens: 1000}}"
    items = found_in(make_recipe("pools.scores={gpus_per_node: 4}", config, *others))[role, MemoryPhase.JUDGING]
    body = PUBLIC_MODELS[name]
    assert items["frozen KV cache"] == 1000 * 2 * body.num_layers * body.num_kv_heads // 4 * body.head_dim * 2
    assert items["frozen weights"] == pytest.approx(2 * num_parameters(body) / 4, rel=0.02)


def test_a_frozen_model_in_a_shared_pool_has_memory_only_in_its_turn() -> None:
    recipe = make_recipe(
        "roles.rollout.pool=train",
        "pools={train: {nodes: 1, gpus_per_node: 8}}",
        "roles.reward_model.helpful={pool: train, tensor: 2, model: qwen2.5-7b, max_cached_tokens: 1000}",
        "reward={kind: reward_model}",
    )
    deployment = deploy(recipe, SHAPES, H100)
    found = {item.phase: item for item in ledgers(deployment, recipe.algorithm)}
    assert {"frozen weights", "frozen KV cache", "engine weights", "optimizer"} <= names(found[MemoryPhase.JUDGING])
    assert "KV cache" not in names(found[MemoryPhase.JUDGING])
    for phase, ledger in found.items():
        assert phase is MemoryPhase.JUDGING or not names(ledger) & {"frozen weights", "frozen KV cache"}
    (host,) = host_ledgers(deployment, recipe.checkpoint)
    weights = {item.name: item.num_bytes for item in host.items}["frozen weights"]
    assert weights == 8 * deployment.frozen["reward_model.helpful"].weight_bytes


def test_a_teacher_is_counted_with_its_own_shape_in_its_pool() -> None:
    """Weights of a larger model without gradients or optimizer, and activations while it scores."""
    recipe = make_recipe(
        "pools.teacher={gpus_per_node: 8}",
        "roles.teacher.large={kind: ranks, pool: teacher, tensor: 8, model: qwen2.5-72b}",
        "algorithm={kind: distill}",
    )
    deployment = deploy(recipe, find_shapes(recipe.model, recipe.roles), H100)
    assert deployment.placement.num_gpus == 16 + 8 + 8
    (scoring,) = (item for item in ledgers(deployment, recipe.algorithm) if item.where == "teacher.large")
    assert scoring.phase is MemoryPhase.SCORING
    (weights,) = (item.num_bytes for item in scoring.items if item.name == "weights")
    assert weights == pytest.approx(2 * 72.7e9 / 8, rel=0.01)
    assert not {"gradients", "optimizer"} & names(scoring)
    assert not any("teacher" in ledger.where for ledger in host_ledgers(deployment, recipe.checkpoint))


def test_the_reward_model_of_prime_is_a_language_model_with_its_first_weights_in_host_memory() -> None:
    words = ("pools.critic={gpus_per_node: 8}", "roles.critic={pool: critic, tensor: 4}")
    recipe = make_recipe(*words, "algorithm={kind: prime}")
    shapes = find_shapes(recipe.model, recipe.roles, algorithm=recipe.algorithm)
    assert shapes.critic == shapes.policy
    deployment = deploy(recipe, shapes, H100)
    held = {
        ledger.where: {item.name for item in ledger.items} for ledger in host_ledgers(deployment, recipe.checkpoint)
    }
    assert "reference weights" in held["critic"]
    with_values = make_recipe(*words, "algorithm={kind: gae}")
    values = find_shapes(with_values.model, with_values.roles, algorithm=with_values.algorithm)
    assert values.critic.has_value_head
    for ledger in host_ledgers(deploy(with_values, values, H100), with_values.checkpoint):
        assert "reference weights" not in {item.name for item in ledger.items}


def test_engines_of_a_mixture_record_the_experts_of_their_cache_in_host_memory() -> None:
    mixture = replace(PUBLIC_MODELS["qwen3-30b-a3b"], num_layers=8)
    words = ("roles.actor.is_sequence_parallel=true", "checkpoint={save_every_steps: null, save_at_end: false}")
    recipe = make_recipe(*words)
    deployment = deploy(recipe, shapes_of(mixture), H100)
    assert deployment.engine is not None
    (host,) = host_ledgers(deployment, recipe.checkpoint)
    # SGLang has a number of four bytes for each layer and expert of a token, in every rank of a node.
    num_ranks = sum(rank.place.node == "rollout-0" for rank in deployment.placement.engine_ranks)
    assert host.items == (
        LedgerItem(
            name="recorded experts", num_bytes=num_ranks * deployment.engine.cached_tokens * 8 * 8 * 4, is_exact=True
        ),
    )
    live = make_recipe(*words, "train.routing=live")
    assert host_ledgers(deploy(live, shapes_of(mixture), H100), live.checkpoint) == ()


def test_merged_weights_are_held_from_the_first_publish_until_a_shared_pool_is_the_engines() -> None:
    mixture = replace(PUBLIC_MODELS["qwen3-30b-a3b"], num_layers=4)
    words = ("roles.actor.is_sequence_parallel=true", "roles.rollout.tensor=1")

    def weights(modules: str, phase: MemoryPhase) -> dict[str, int]:
        recipe = make_recipe(*words, f"model.lora={{rank: 8, modules: [{modules}]}}")
        found = ledgers(deploy(recipe, shapes_of(mixture), H100), recipe.algorithm)
        (of_trainer,) = [each for each in found if each.phase is phase and "gradients" in names(each)]
        return {item.name: item.num_bytes for item in of_trainer.items}

    beside = weights("q_proj, v_proj", MemoryPhase.TRAINING)
    merged = weights("q_proj, v_proj, experts", MemoryPhase.TRAINING)
    assert "merged weights" not in beside
    assert merged["merged weights"] == merged["weights"]
    # Two layers of a stage, of whose experts each of four ranks has a quarter; what of A and B is not cut is whole.
    of_expert = 8 * (2 * 2048 + 2 * 768 // 4 + 768 // 4 + 2048)
    assert merged["gradients"] - beside["gradients"] == 4 * 2 * 128 * of_expert
