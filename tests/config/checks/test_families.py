"""Features that were not tried with a family are refused with its reason."""

from __future__ import annotations

import pytest

from megarl.config.checks.recipe import check_without_files
from megarl.families import FAMILIES
from megarl.families.interface import Family, Feature
from tests.planner.recipes import PPO, make_recipe

USES: dict[Feature, tuple[str, ...]] = {
    "critic": PPO,
    "fp8": ("roles.rollout.precision=fp8",),
    "lora": ("model.lora={modules: [q_proj, v_proj]}",),
}


@pytest.mark.parametrize(
    ("family", "feature"),
    [pytest.param(family, feature, id=f"{family.name}-{feature}") for family in FAMILIES for feature in USES],
)
def test_a_feature_is_refused_if_and_only_if_the_family_says_so(family: Family, feature: Feature) -> None:
    shape = max(family.models.values(), key=lambda shape: shape.hidden)
    recipe = make_recipe(*USES[feature], "roles.actor={pool: train}", "cluster.gpu=h200")
    problems = [problem.message for problem in check_without_files(recipe, shape, critic=shape)]
    assert [reason for reason in family.refuses.values() if reason in problems] == (
        [family.refuses[feature]] if feature in family.refuses else []
    )
