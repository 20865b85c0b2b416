"""examples/kinds: every kind that a recipe may name is in a recipe or in an example, and every example is a recipe."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from megarl.config.checks.recipe import check_without_files
from megarl.config.document import EXTENDS
from megarl.config.load import read_recipe
from megarl.config.recipe import Recipe
from tests.repository import ROOT
from tests.weights.reference import make_shape

EXAMPLES = sorted((ROOT / "examples" / "kinds").glob("*.yaml"))
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


def entries() -> Iterator[tuple[Path, str, dict[str, object]]]:
    """Yield every example: its file, its name and what it adds to the recipe that its file extends."""
    for path in EXAMPLES:
        content = yaml.safe_load(path.read_text())
        base = path.parent / content.pop(EXTENDS)
        for name, sections in content.items():
            yield base, name, sections


def read_example(base: Path, name: str, sections: dict[str, object], folder: Path) -> Recipe:
    """Write the example as a recipe of its own, and read it."""
    path = folder / f"{name}.yaml"
    # JSON is YAML, and writes numbers as the strict reader takes them.
    path.write_text(json.dumps({EXTENDS: str(base), **sections}))
    return read_recipe(path).recipe


def kinds_in(value: object) -> Iterator[tuple[str, str]]:
    """Yield the class and the kind of every section of a recipe that has one."""
    if isinstance(value, BaseModel):
        if isinstance(kind := getattr(value, "kind", None), str):
            yield type(value).__name__, kind
        for _, child in value:
            yield from kinds_in(child)
    elif isinstance(value, Mapping):
        for child in value.values():
            yield from kinds_in(child)


def known_kinds() -> set[tuple[str, str]]:
    """Return every class of the schema that has a key `kind`, with each value of the key."""
    sections = Recipe.model_json_schema()["$defs"].items()
    found = ((name, each["properties"]["kind"]) for name, each in sections if "kind" in each.get("properties", {}))
    return {(name, kind) for name, each in found for kind in each.get("enum", [each.get("const")])}


@pytest.mark.parametrize(("base", "name", "sections"), [pytest.param(*each, id=each[1]) for each in entries()])
def test_an_example_makes_a_recipe_without_problems(
    base: Path, name: str, sections: dict[str, object], tmp_path: Path
) -> None:
    recipe = read_example(base, name, sections, tmp_path)
    shape = make_shape()
    assert check_without_files(recipe, shape, critic=shape) == []


@pytest.mark.patient
def test_every_kind_is_in_a_recipe_or_in_an_example(tmp_path: Path) -> None:
    recipes = [read_recipe(path).recipe for path in RECIPES]
    recipes += [read_example(*entry, tmp_path) for entry in entries()]
    shown = {kind for recipe in recipes for kind in kinds_in(recipe)}
    known = known_kinds()
    assert len(known) > 50
    assert known - shown == set()


def test_code_that_an_example_names_in_this_repository_is_there() -> None:
    for path in EXAMPLES:
        for file, name in re.findall(r"(examples/\w+\.py)(?::(\w+))?", path.read_text()):
            assert re.search(rf"^(class|def) {name or 'compute_score'}\b", (ROOT / file).read_text(), re.MULTILINE)
