"""The schema for editors and the reference for people say what the sections say, and the files of both are current."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import jsonschema  # type: ignore[import-untyped]
import pytest

from megarl.cli.main import run
from megarl.config import schema
from megarl.config.document import read_document
from megarl.config.recipe import Recipe
from tests.repository import ROOT

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
WRITE = "write it with"

json_schema, reference = cache(schema.json_schema), cache(schema.reference)


def test_the_shipped_json_schema_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schema"]) == 0
    path = ROOT / "recipes" / "schema.json"
    assert path.read_text() == capsys.readouterr().out, f"{WRITE} megarl schema > {path}"


def test_the_reference_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schema", "--docs"]) == 0
    path = ROOT / "docs" / "recipe.md"
    assert path.read_text() == capsys.readouterr().out, f"{WRITE} megarl schema --docs > {path}"


@pytest.mark.patient
def test_every_key_is_in_the_reference() -> None:
    text = reference()
    for section in json_schema()["$defs"].values():  # type: ignore[attr-defined]
        for key in section["properties"]:
            assert re.search(rf"[`.]{key}[`.]|## (\w+\.)*{key}\b", text), key


def test_every_key_has_a_meaning() -> None:
    """A key's sentence is the docstring under its field."""
    rows = [line for line in reference().splitlines() if line.startswith("| `")]
    assert len(rows) > 300
    assert [row for row in rows if not row.split("|")[-2].strip()] == []


@pytest.mark.parametrize("recipe", RECIPES, ids=[recipe.stem for recipe in RECIPES])
def test_editors_find_the_schema_of_every_recipe(recipe: Path) -> None:
    first_line = recipe.read_text().splitlines()[0]
    found = re.fullmatch(r"# yaml-language-server: \$schema=(\S+)", first_line)
    assert found is not None, first_line
    assert (recipe.parent / found[1]).is_file()


@pytest.mark.parametrize("path", RECIPES, ids=[recipe.stem for recipe in RECIPES])
def test_recipes_of_several_nodes_listen_where_the_other_nodes_are(path: Path) -> None:
    recipe = Recipe.model_validate(read_document(path).tree)
    if any(pool.nodes > 1 for pool in recipe.pools.values()):
        assert recipe.network.bind == "private"


def test_a_recipe_that_extends_another_may_be_incomplete() -> None:
    properties = json_schema()["properties"]
    assert isinstance(properties, dict)
    assert set(properties) == {*Recipe.model_fields, "extends"}
    assert json_schema()["if"] == {"not": {"required": ["extends"]}}
    for name, section in json_schema()["$defs"].items():  # type: ignore[attr-defined]
        assert set(section.get("required", [])) <= {"kind"}, name


def test_editors_accept_every_recipe_and_refuse_an_unknown_key() -> None:
    validator = jsonschema.validators.validator_for(json_schema())(json_schema())
    for recipe in RECIPES:
        assert [f"{recipe.name}: {error.message}" for error in validator.iter_errors(read_document(recipe).tree)] == []
    with pytest.raises(jsonschema.ValidationError, match="stepss"):
        validator.validate({"extends": "a.yaml", "run": {"stepss": 1}})


def test_a_key_that_sections_share_is_described_once() -> None:
    rows = [line.split("|", 2) for line in reference().splitlines() if line.startswith("| `")]
    described = [(key.rpartition(".")[2], text) for _, key, text in rows if not key.endswith(".kind` ")]
    assert [row for row in described if described.count(row) > 1] == []
    assert re.search(r"As in \[roles\.actor\]\(#rolesactor\): `tensor`, `pipeline`", reference())
