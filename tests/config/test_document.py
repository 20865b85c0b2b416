"""Families of recipes: what is inherited, what is replaced, and where each value came from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megarl.config.document import ValueOrigin, override, read_document
from megarl.config.load import load_recipe
from megarl.errors import ConfigError

BASE = """\
run:
  name: base
  steps: 10
data: {train: [a, b]}
algorithm: {kind: grpo, clip_low: 0.1}
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.yaml"
    path.write_text(BASE)
    return path


def heir(base: Path, text: str) -> Path:
    path = base.with_name("heir.yaml")
    path.write_text(f"extends: {base.name}\n{text}")
    return path


@pytest.mark.parametrize(
    ("text", "section", "expected"),
    [
        # Sections are merged key by key, and a list replaces a list.
        ("run: {name: heir}", "run", {"name": "heir", "steps": 10}),
        ("sampling: {top_k: 5}", "sampling", {"top_k": 5}),
        ("data: {train: [c]}", "data", {"train": ["c"]}),
        # A section of another kind replaces the whole section.
        ("algorithm: {kind: sft}", "algorithm", {"kind": "sft"}),
        ("algorithm: {kind: grpo, clip_high: 0.3}", "algorithm", {"kind": "grpo", "clip_low": 0.1, "clip_high": 0.3}),
    ],
)
def test_an_heir_has_what_it_does_not_change(base: Path, text: str, section: str, expected: dict[str, object]) -> None:
    document, inherited = read_document(heir(base, text)), read_document(base)
    assert document.tree == {**inherited.tree, section: expected}
    assert (document.origin(("algorithm", "clip_low")) is None) == ("sft" in text)


def test_every_value_knows_its_file_and_line(base: Path) -> None:
    path = heir(base, "run:\n  name: heir\n")
    document = override(read_document(path), "run.seed=3")
    assert document.origin(("run", "name")) == ValueOrigin(source=str(path), line=3)
    assert document.origin(("run", "steps")) == ValueOrigin(source=str(base), line=3)
    assert document.origin(("run", "seed")) == ValueOrigin(source="--set")
    assert document.origin(("data", "train")) == ValueOrigin(source=str(base), line=4)
    assert document.origin(("run", "folder")) is None


def test_an_override_replaces_a_section_and_its_origins(base: Path) -> None:
    document = override(read_document(base), "algorithm={kind: sft}")
    assert document.tree["algorithm"] == {"kind": "sft"}
    assert document.origin(("algorithm", "kind")) == ValueOrigin(source="--set")
    assert document.origin(("algorithm", "clip_low")) is None


def test_an_override_leaves_the_document_it_was_given_alone(base: Path) -> None:
    document = read_document(base)
    override(document, "run.name=other")
    assert document.tree["run"] == {"name": "base", "steps": 10}


def test_an_override_may_create_a_section(base: Path) -> None:
    assert override(read_document(base), "a.b.c=1").tree["a"] == {"b": {"c": 1}}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("-2.5E3", -2500.0),
        (".5", 0.5),
        ("8_192", 8192),
        ("010", "010"),
        ("12:30", "12:30"),
        ("no", "no"),
        ("true", True),
        ("2024-01-01", "2024-01-01"),
        ("", None),
        ("~", None),
        ("nil", "nil"),
    ],
)
def test_scalars_are_what_they_look_like(base: Path, text: str, value: object) -> None:
    got = override(read_document(base), f"x={text}").tree["x"]
    assert (got, type(got)) == (value, type(value))


@pytest.mark.patient
def test_very_many_unknown_keys_are_counted_not_listed(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("".join(f"key{number}: 1\n" for number in range(1_000)))
    with pytest.raises(ConfigError) as raised:
        load_recipe(path)
    assert len(raised.value.problems) < 200
    assert re.match(r"and \d+ more; is this file a recipe\?", raised.value.problems[-1].message)


def test_a_circle_is_named(tmp_path: Path) -> None:
    for name, other in (("a", "b"), ("b", "c"), ("c", "a")):
        (tmp_path / f"{name}.yaml").write_text(f"extends: {other}.yaml\n")
    with pytest.raises(ConfigError) as caught:
        read_document(tmp_path / "a.yaml")
    names = " -> ".join(str(tmp_path / f"{name}.yaml") for name in "abca")
    assert str(caught.value.problems[0]) == f"extends: forms a circle: {names}"
