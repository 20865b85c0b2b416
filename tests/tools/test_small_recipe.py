from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megarl.config.checks.recipe import check_without_files
from megarl.config.draft import ModelDraftConfig
from megarl.config.load import read_recipe
from megarl.config.recipe import Recipe
from megarl.config.roles import RolesConfig
from megarl.errors import ConfigError, MachineError
from megarl.families import PUBLIC_MODELS
from megarl.families.shape import ModelShape
from megarl.planner.deployment import find_shapes
from megarl.serving.specs import transfer_spec
from megarl.tools.small_recipe import (
    RehearsalFiles,
    SmallRecipe,
    describe_layout,
    single_copy,
    small_layouts,
    small_topology,
    tiny_for_layouts,
    tiny_shape,
)
from tests.planner.recipes import large_recipes, make_recipe
from tests.repository import ROOT

RECIPES = ROOT / "recipes"
WITH_PAIRS = {"quickstart_dpo", "quickstart_reward_model"}
LARGE = [name for name, recipe in large_recipes().items() if recipe.roles.rollout and not recipe.model.lora]


def read(name: str, *overrides: str) -> tuple[Recipe, ModelShape]:
    recipe = read_recipe(RECIPES / f"{name}.yaml", overrides).recipe
    return recipe, find_shapes(recipe.model, recipe.roles).policy


def small(name: str, *overrides: str, max_engines: int = 2) -> SmallRecipe:
    recipe, _ = read(name, *overrides)
    return small_layouts(recipe, folder=Path("run"), model_folder=Path("model"), max_engines=max_engines)


@pytest.mark.parametrize("name", LARGE)
def test_what_is_started_is_a_possible_layout_of_at_most_eight_ranks(name: str) -> None:
    started = small(name).recipe
    shape = tiny_shape(read(name)[1], started.roles.actor)
    rollout = started.roles.rollout
    assert rollout is not None
    plan = transfer_spec(started, rollout, shape, num_engines=started.num_engines).plan()
    assert len(plan.source.holdings) <= 8
    assert len(plan.target.holdings) <= 4
    assert sum(plan.traffic.received_bytes.values()) > 0


@pytest.mark.parametrize("name", LARGE)
def test_the_rehearsal_has_the_recipes_own_layouts(name: str) -> None:
    recipe, shape = read(name)
    roles, tiny = tiny_for_layouts(recipe.roles, shape)
    same = recipe.model_copy(update={"roles": roles})
    rollout = same.roles.rollout
    assert rollout is not None
    transfer = transfer_spec(same, rollout, tiny, num_engines=same.num_engines)
    assert describe_layout(same) == describe_layout(recipe)
    assert transfer.parallel.world_size == recipe.pools[recipe.roles.actor.pool].gpus
    assert len(transfer.engine_layout().holdings) == recipe.num_engines * rollout.tensor
    assert (tiny.num_heads, tiny.num_kv_heads) == (shape.num_heads, shape.num_kv_heads)


def test_an_adapter_is_merged_before_models_are_compared() -> None:
    recipe, _ = read("grpo_70b_lora")
    reason = "model.lora: whole models are compared here; `megarl export --merge`"
    with pytest.raises(ConfigError, match=reason):
        small("grpo_70b_lora")
    with pytest.raises(ConfigError, match=reason):
        single_copy(recipe, name="compared", num_devices=8)


def test_every_kind_of_split_is_kept() -> None:
    told = describe_layout(small("grpo_235b").recipe)
    assert told == "trainer TP2 PP2 EP2 ETP1 DP2 (8 ranks) -> 2 engine(s) of TP2 EP2, separate pools"
    uneven = small("grpo_235b").recipe.roles.actor
    assert (uneven.first_stage_layers, uneven.last_stage_layers) == (None, 1)
    assert tiny_shape(read("grpo_235b")[1], uneven).num_layers == 3


def test_a_shared_pool_stays_shared() -> None:
    told = describe_layout(small("dapo_32b").recipe)
    assert told == "trainer TP2 PP1 DP1 (2 ranks) -> 1 engine(s) of TP2, one pool"


def test_what_is_not_as_the_recipe_says_is_noted() -> None:
    notes = small("grpo_70b").notes
    assert notes[0].startswith("the recipe's own layout is trainer TP8 PP4 DP4 (128 ranks) -> 8 engine(s) of TP8")
    assert "in fp32" in notes[1]


def test_a_recipe_without_engines_or_with_engines_that_run_already_is_refused() -> None:
    recipe, _ = read("grpo_7b")
    without = recipe.model_copy(update={"roles": recipe.roles.model_copy(update={"rollout": None})})
    with pytest.raises(ConfigError, match="there is no engine to publish to"):
        small_layouts(without, folder=Path("run"), model_folder=Path("model"), max_engines=1)
    running = "roles.rollout={endpoints: [{url: 'http://10.0.0.7:30000'}], pool: null}"
    with pytest.raises(ConfigError, match="published to by files"):
        small("grpo_7b", running)


def test_every_public_model_has_a_tiny_one() -> None:
    recipe, _ = read("grpo_7b", "roles.actor={pool: train, tensor: 2, pipeline: 2}")
    for shape in PUBLIC_MODELS.values():
        tiny = tiny_shape(shape, recipe.roles.actor)
        assert tiny.family is shape.family
        assert tiny.has_tied_embeddings is shape.has_tied_embeddings


def test_one_copy_of_the_policy_and_one_engine_with_the_layout_of_the_recipe() -> None:
    small = single_copy(make_recipe("run.device=cpu"), name="diagnose", num_devices=10)
    roles = small.recipe.roles
    assert small.notes == ()
    assert small.recipe.data_parallel == 1
    assert (roles.actor.tensor, roles.actor.pipeline) == (4, 2)
    assert roles.rollout is not None
    assert roles.rollout.pool is not None
    assert small.recipe.pools[roles.rollout.pool].gpus == roles.rollout.tensor == 2
    assert small.recipe.run_folder == Path("runs/test/diagnose")


def test_a_layout_that_does_not_fit_becomes_one_device_each_and_that_is_said() -> None:
    recipe = make_recipe("run.device=cpu", "roles.actor.is_sequence_parallel=true")
    small = single_copy(recipe, name="diagnose", num_devices=9)
    roles = small.recipe.roles
    assert roles.rollout is not None
    assert [pool.gpus for pool in small.recipe.pools.values()] == [1, 1]
    assert (roles.actor.model_parallel, roles.actor.is_sequence_parallel, roles.rollout.tensor) == (1, False, 1)
    assert small.notes == (
        "tensor 4 * pipeline 2 of the trainer and tensor 2 of the engine need more than the 9 devices here: "
        "compared with 1 each",
    )


def test_on_gpus_the_modules_run_one_by_one_and_that_is_said() -> None:
    small = single_copy(make_recipe("roles.rollout.sglang={log_requests: true}"), name="diagnose", num_devices=16)
    assert small.recipe.roles.rollout is not None
    assert small.recipe.roles.rollout.sglang == {
        "log_requests": True,
        "cuda_graph_backend_decode": "disabled",
        "cuda_graph_backend_prefill": "disabled",
    }
    assert small.notes == ("the engine runs without CUDA graphs",)


def test_a_single_device_is_not_enough() -> None:
    with pytest.raises(MachineError, match="a trainer and an engine need 2 devices, there is 1"):
        single_copy(make_recipe(), name="diagnose", num_devices=1)


def test_a_recipe_without_engines_has_nothing_to_compare() -> None:
    with pytest.raises(ConfigError, match=r"roles\.rollout: missing: there is no engine"):
        single_copy(make_recipe("roles.rollout=null"), name="diagnose", num_devices=8)


FILES = RehearsalFiles(model=Path("model"), data=Path("data.parquet"), reward=Path("reward.py"))


def topology(recipe: Recipe, *, max_nodes: int = 2) -> SmallRecipe:
    return small_topology(recipe, folder=Path("folder"), files=FILES, max_nodes=max_nodes)


@pytest.mark.parametrize("name", sorted({path.stem for path in RECIPES.glob("*.yaml")} - WITH_PAIRS))
def test_a_rehearsal_has_the_pools_and_roles_of_the_recipe_in_a_size_that_can_run(name: str, tmp_path: Path) -> None:
    recipe = read_recipe(RECIPES / f"{name}.yaml").recipe
    shape = find_shapes(recipe.model, recipe.roles).policy if name in large_recipes() else PUBLIC_MODELS["qwen2.5-0.5b"]
    rehearsed = topology(recipe).recipe
    path = tmp_path / "rehearsed.yaml"
    path.write_text(yaml.safe_dump(rehearsed.model_dump(mode="json", exclude_defaults=True)))
    assert read_recipe(path).recipe == rehearsed
    tiny = tiny_shape(shape, rehearsed.roles.actor)
    assert check_without_files(rehearsed, tiny, critic=tiny.as_critic()) == []
    assert rehearsed.roles.used_pools == recipe.roles.used_pools
    assert (rehearsed.algorithm.kind, rehearsed.train.max_staleness) == (
        recipe.algorithm.kind,
        recipe.train.max_staleness,
    )
    assert sum(pool.gpus for pool in rehearsed.pools.values()) <= 12
    for pool, own in zip(rehearsed.pools.values(), recipe.pools.values(), strict=True):
        assert (pool.nodes > 1) == (own.nodes > 1)


def test_a_rehearsal_states_what_it_scales_down() -> None:
    notes = topology(read("ppo_70b")[0]).notes
    assert "pools.critic: 16 node(s) of 8 -> 2 of 2" in notes
    assert "roles.critic: TP8 PP4 -> TP2 PP2" in notes
    assert any(note.startswith("engines: 8 of TP8 -> 2 of TP2") for note in notes)


def test_an_engine_over_several_nodes_is_rehearsed_over_several_nodes() -> None:
    recipe, _ = read("grpo_70b")
    rollout = recipe.roles.rollout
    assert rollout is not None
    roles = recipe.roles.model_copy(update={"rollout": rollout.model_copy(update={"tensor": 16})})
    rehearsed = topology(recipe.model_copy(update={"roles": roles})).recipe
    pool, engine = rehearsed.pools[rollout.pool or ""], rehearsed.roles.rollout
    assert engine is not None
    assert (pool.nodes, pool.gpus_per_node, engine.tensor) == (2, 1, 2)


def test_a_draft_that_learns_is_rehearsed_with_the_tiny_model_and_another_draft_is_not() -> None:
    draft, drafter = (
        "roles.rollout.draft={kind: model, path: qwen2.5-0.5b}",
        "roles.drafter={pool: spare, tensor: 8, epochs: 4}",
    )
    rehearsed = topology(read("grpo_70b", draft, drafter, "pools.spare={gpus_per_node: 8}")[0]).recipe
    assert rehearsed.roles.drafter is not None
    assert (rehearsed.roles.drafter.tensor, rehearsed.roles.drafter.epochs) == (2, 1)
    assert rehearsed.roles.rollout is not None
    assert rehearsed.roles.rollout.draft == ModelDraftConfig(kind="model", path=FILES.model, num_tokens=1)
    tiny = tiny_shape(read("grpo_70b")[1], rehearsed.roles.actor)
    assert check_without_files(rehearsed, tiny, critic=tiny.as_critic()) == []
    alone = topology(read("grpo_70b", draft)[0]).recipe.roles.rollout
    assert alone is not None
    assert alone.draft is None


def test_a_teacher_on_engines_is_rehearsed_with_the_tiny_model_and_one_that_runs_already_is_not() -> None:
    teacher = (
        "roles.teacher.large={{kind: engines, {}, tensor: 8, model: qwen2.5-72b, sglang: {{attention_backend: fa3}}}}"
    )
    words = ("algorithm={kind: distill}", "pools.teacher={gpus_per_node: 8}")
    recipe, _ = read("grpo_70b", *words, teacher.format("pool: teacher"))
    rehearsed = topology(recipe).recipe
    (config,) = rehearsed.roles.teacher.values()
    assert (config.kind, config.model, config.tensor) == ("engines", FILES.model, 2)
    assert rehearsed.roles.frozen["teacher.large"].sglang == {}
    assert rehearsed.pools["teacher"].gpus == 2
    given, _ = read("grpo_70b", *words, teacher.format("endpoints: [{url: 'http://10.0.0.7:30000'}]"))
    with pytest.raises(ConfigError, match=r"roles\.teacher\.large\.endpoints: engines that run already"):
        topology(given)


def test_engines_that_run_already_cannot_be_rehearsed() -> None:
    recipe, _ = read("grpo_7b")
    rollout = {"pool": None, "endpoints": [{"url": "http://10.0.0.7:30000"}]}
    roles = RolesConfig.model_validate({"actor": recipe.roles.actor, "rollout": rollout})
    with pytest.raises(ConfigError, match="engines that run already cannot be rehearsed"):
        topology(recipe.model_copy(update={"roles": roles}))


@pytest.mark.parametrize("name", sorted(WITH_PAIRS))
def test_pairs_are_not_rehearsed(name: str) -> None:
    recipe = read_recipe(RECIPES / f"{name}.yaml").recipe
    with pytest.raises(ConfigError, match=r"trains on pairs, which a rehearsal does not have"):
        topology(recipe)


def test_engines_in_fp8_are_rehearsed_in_bf16_and_not_diagnosed() -> None:
    recipe, shape = read("grpo_235b", "roles.rollout.precision=fp8")
    roles, tiny = tiny_for_layouts(recipe.roles, shape)
    for started in (small("grpo_235b", "roles.rollout.precision=fp8").recipe.roles, roles):
        assert started.rollout is not None
        assert started.rollout.fp8_keep is None
    with pytest.raises(ConfigError, match="fp8 engines have other weights than the trainer; set it to bf16"):
        single_copy(recipe, name="compared", num_devices=8)
    assert tiny.hidden == 8
