"""examples/families.yaml: every family is in a recipe or in an example, and every example fits its GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from megarl.config.checks.recipe import check_without_files
from megarl.config.document import EXTENDS
from megarl.config.load import read_recipe
from megarl.families import FAMILIES, PUBLIC_MODELS, family_of
from megarl.planner.complete import complete
from megarl.planner.deployment import StepWorkload
from megarl.planner.fit import size
from megarl.planner.hardware import gpu_of
from tests.planner.recipes import shapes_of
from tests.repository import ROOT

FILE = ROOT / "examples" / "families.yaml"
EXAMPLES = yaml.safe_load(FILE.read_text())
BASE = FILE.parent / EXAMPLES.pop(EXTENDS)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_fits_its_gpus(name: str, tmp_path: Path) -> None:
    path = tmp_path / "example.yaml"
    # JSON is YAML, and writes numbers as the strict reader takes them.
    path.write_text(json.dumps({EXTENDS: str(BASE), **EXAMPLES[name]}))
    recipe, shape = read_recipe(path).recipe, PUBLIC_MODELS[name]
    assert check_without_files(recipe, shape, critic=shape) == []
    completed, deployment = complete(recipe, shapes_of(shape), gpu_of(recipe.cluster))
    assert size(completed, deployment, StepWorkload.half(recipe.data, recipe.sampling), publish_s=0).fits


def test_every_family_is_in_a_recipe_or_in_an_example() -> None:
    recipes = "".join(path.read_text().lower() for path in (ROOT / "recipes").glob("*.yaml"))
    shown = {family_of(PUBLIC_MODELS[name]).name for name in EXAMPLES}
    shown |= {family_of(shape).name for name, shape in PUBLIC_MODELS.items() if f"models/{name}" in recipes}
    assert {family.name for family in FAMILIES if family.models} - shown == set()
