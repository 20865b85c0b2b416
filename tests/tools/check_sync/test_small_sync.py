from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.catalogue import CATALOGUE
from megarl.config.load import read_recipe
from megarl.config.model import ModelShape
from megarl.config.recipe import Recipe
from megarl.errors import ConfigError
from megarl.planner.shapes import find_shapes
from megarl.runtime.engines.serving import transfer_spec
from megarl.tools.check_sync.small_sync import SmallSync, rehearsed, small_sync, told_layout
from tests.repository import ROOT

RECIPES = ROOT / "recipes"
LARGE = ("grpo_7b", "grpo_70b", "ppo_70b", "grpo_235b", "dapo_32b")


def read(name: str, *overrides: str) -> tuple[Recipe, ModelShape]:
    recipe = read_recipe(RECIPES / f"{name}.yaml", overrides).recipe
    return recipe, find_shapes(recipe).policy


def small(name: str, *overrides: str, max_engines: int = 2) -> SmallSync:
    recipe, shape = read(name, *overrides)
    return small_sync(recipe, shape, folder=Path("run"), model_folder=Path("model"), max_engines=max_engines)


@pytest.mark.parametrize("name", LARGE)
def test_what_is_started_is_a_possible_layout_of_at_most_eight_ranks(name: str) -> None:
    found = small(name)
    rollout = found.recipe.roles.rollout
    assert rollout is not None
    plan = transfer_spec(found.recipe, rollout, found.shape, num_engines=found.recipe.num_engines).plan()
    assert len(plan.source.holdings) <= 8
    assert len(plan.target.holdings) <= 4
    assert sum(plan.received_bytes.values()) > 0


@pytest.mark.parametrize("name", LARGE)
def test_the_rehearsal_has_the_recipes_own_layouts(name: str) -> None:
    recipe, shape = read(name)
    same, tiny = rehearsed(recipe, shape)
    rollout = same.roles.rollout
    assert rollout is not None
    transfer = transfer_spec(same, rollout, tiny, num_engines=same.num_engines)
    assert told_layout(same) == told_layout(recipe)
    assert transfer.parallel.world_size == recipe.pools[recipe.roles.actor.pool].gpus
    assert len(transfer.engine_layout().holdings) == recipe.num_engines * rollout.tensor
    assert (tiny.num_heads, tiny.num_kv_heads) == (shape.num_heads, shape.num_kv_heads)


def test_every_kind_of_split_is_kept() -> None:
    told = told_layout(small("grpo_235b").recipe)
    assert told == "trainer TP2 PP2 EP2 ETP1 DP2 (8 ranks) -> 2 engine(s) of TP2, separate pools"
    uneven = small("grpo_235b").recipe.roles.actor
    assert (uneven.first_stage_layers, uneven.last_stage_layers) == (None, 1)
    assert small("grpo_235b").shape.num_layers == 3


def test_a_shared_pool_stays_shared() -> None:
    told = told_layout(small("dapo_32b").recipe)
    assert told == "trainer TP2 PP1 DP1 (2 ranks) -> 1 engine(s) of TP2, one pool"


def test_what_is_not_as_the_recipe_says_is_noted() -> None:
    notes = small("grpo_70b").notes
    assert notes[0].startswith("the recipe's own layout is trainer TP8 PP4 DP4 (128 ranks) -> 8 engine(s) of TP8")
    assert "in fp32" in notes[1]


def test_a_recipe_without_engines_or_with_engines_that_run_already_is_refused() -> None:
    recipe, shape = read("grpo_7b")
    without = recipe.model_copy(update={"roles": recipe.roles.model_copy(update={"rollout": None})})
    with pytest.raises(ConfigError, match="there is no engine to publish to"):
        small_sync(without, shape, folder=Path("run"), model_folder=Path("model"), max_engines=1)
    running = "roles.rollout={endpoints: [{url: 'http://10.0.0.7:30000'}], pool: null}"
    with pytest.raises(ConfigError, match="published to by files"):
        small("grpo_7b", running)


def test_every_model_of_the_catalogue_has_a_tiny_one() -> None:
    recipe, _ = read("grpo_7b", "roles.actor={pool: train, tensor: 2, pipeline: 2}")
    for shape in CATALOGUE.values():
        found = small_sync(recipe, shape, folder=Path("run"), model_folder=Path("model"), max_engines=1)
        assert found.shape.family is shape.family
        assert found.shape.has_tied_embeddings is shape.has_tied_embeddings
