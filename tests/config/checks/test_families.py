"""Features that were not tried with a family are refused with its reason; the config.json that it writes is read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoConfig

from megarl.config.checks.recipe import check_without_files
from megarl.config.model import read_model_shape
from megarl.families import FAMILIES, PUBLIC_MODELS, family_of
from megarl.families.interface import Family, Feature
from megarl.families.shape import ModelShape
from tests.planner.recipes import PPO, make_recipe

USES: dict[Feature, tuple[str, ...]] = {
    "critic": PPO,
    "fp8": ("roles.rollout.precision=fp8",),
    "lora": ("model.lora={modules: [q_proj, v_proj]}",),
}


def shapes_of_family(family: Family) -> Sequence[ModelShape]:
    """Return its public models; where it has none, those of the family that is released around its text."""
    around = [shape for shape in PUBLIC_MODELS.values() if type(family) in type(family_of(shape)).__bases__]
    return [*family.models.values()] or [replace(shape, family=family.name) for shape in around]


@pytest.mark.parametrize(
    ("family", "feature"),
    [pytest.param(family, feature, id=f"{family.name}-{feature}") for family in FAMILIES for feature in USES],
)
def test_a_feature_is_refused_if_and_only_if_the_family_says_so(family: Family, feature: Feature) -> None:
    shape = max(shapes_of_family(family), key=lambda shape: shape.hidden)
    recipe = make_recipe(*USES[feature], "roles.actor={pool: train}", "cluster.gpu=h200")
    problems = [problem.message for problem in check_without_files(recipe, shape, critic=shape)]
    assert [reason for reason in family.refuses.values() if reason in problems] == (
        [family.refuses[feature]] if feature in family.refuses else []
    )


@pytest.mark.parametrize("name", PUBLIC_MODELS)
def test_a_config_that_a_family_writes_is_read_by_transformers_and_as_the_same_shape(name: str, tmp_path: Path) -> None:
    shape = PUBLIC_MODELS[name]
    (tmp_path / "config.json").write_text(json.dumps(family_of(shape).config_json(shape)))
    config = AutoConfig.from_pretrained(tmp_path).get_text_config()
    assert (config.hidden_size, config.num_hidden_layers) == (shape.hidden, shape.num_layers)
    assert read_model_shape(tmp_path) == shape
