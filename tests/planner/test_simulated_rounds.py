"""The rounds of a publish, simulated for the recipes that cross nodes by NCCL, against the planner's figures."""

from __future__ import annotations

import pytest

from megarl.config.load import read_recipe
from megarl.planner.complete import complete
from megarl.planner.deployment import PublishWay, find_shapes
from megarl.planner.hardware import gpu_of
from megarl.planner.reshard import publish_plan, reshard
from megarl.weights.algebra.slices import Link
from tests.planner.simulated_rounds import Publish
from tests.repository import ROOT

WIDE = ("pools.train.nodes=64", "pools.rollout.nodes=32")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("grpo_70b", ()),
        ("dapo_70b_async", ()),
        ("grpo_32b_32k", ()),
        ("grpo_32b_128k", ()),
        ("grpo_235b", ()),
        ("grpo_70b", WIDE),
    ],
    ids=["grpo_70b", "dapo_70b_async", "grpo_32b_32k", "grpo_32b_128k", "grpo_235b", "512 and 256 peers"],
)
def test_a_publish_takes_as_long_as_its_busiest_rank_and_as_planned(name: str, changes: tuple[str, ...]) -> None:
    recipe = read_recipe(ROOT / "recipes" / f"{name}.yaml", changes).recipe
    gpu = gpu_of(recipe.cluster)
    _, deployment = complete(recipe, find_shapes(recipe.model, recipe.roles, algorithm=recipe.algorithm), gpu)
    planned = reshard(deployment)
    assert planned.way is PublishWay.NCCL
    publish = Publish.of(publish_plan(deployment), direct=Link.NODE)
    simulated_s = publish.seconds(gpu)
    # The most is 1.39, of grpo_32b_32k.
    assert simulated_s <= 1.4 * publish.busiest_s(gpu)
    assert planned.num_rounds == pytest.approx(max(map(len, publish.rounds.values())), rel=0.02)
    assert planned.num_messages == pytest.approx(publish.num_messages, rel=0.1)
    assert planned.seconds == pytest.approx(simulated_s, rel=0.3)
