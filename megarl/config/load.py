"""From a YAML file and `--set` overrides to a Recipe, or to every problem at once; and where each value came from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ValidationError

from megarl.config.checks.recipe import check_recipe
from megarl.config.complaints import complaints, misplaced_truths
from megarl.config.document import Document, Key, ValueOrigin, override, read_document
from megarl.config.recipe import Recipe
from megarl.errors import ConfigError, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRecipe:
    """A recipe that obeys the schema, and the files it was read from."""

    recipe: Recipe
    document: Document


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """One value of a recipe; without an origin it is the default."""

    key: str
    value: str
    origin: ValueOrigin | None


def load_recipe(
    path: Path, overrides: Sequence[str] = (), *, checks: Sequence[Callable[[Recipe], list[Problem]]] = (check_recipe,)
) -> Recipe:
    """Read, override, validate and cross-check; raises ConfigError with all that is wrong."""
    recipe = read_recipe(path, overrides).recipe
    problems = [problem for check in checks for problem in check(recipe)]
    if problems:
        raise ConfigError(str(path), tuple(problems))
    return recipe


def read_recipe(path: Path, overrides: Sequence[str] = ()) -> ReadRecipe:
    """Read, override and validate: what needs neither the model's folder nor the data."""
    document = read_document(path)
    for assignment in overrides:
        document = override(document, assignment)
    problems = list(misplaced_truths(document.tree, Recipe))
    try:
        recipe = Recipe.model_validate(document.tree)
    except ValidationError as error:
        problems += complaints(error, Recipe)
    if problems:
        raise ConfigError(str(path), _first_per_key(problems))
    return ReadRecipe(recipe=recipe, document=document)


def _first_per_key(problems: Sequence[Problem]) -> tuple[Problem, ...]:
    by_key: dict[str, Problem] = {}
    for problem in problems:
        by_key.setdefault(problem.key, problem)
    return tuple(by_key.values())


def explain(read: ReadRecipe) -> list[Explained]:
    """Every value of the recipe, in the order of the schema."""
    return [
        Explained(key=".".join(key), value=value, origin=read.document.origin(key))
        for key, value in _values(read.recipe, ())
    ]


def _values(value: object, key: Key) -> Iterator[tuple[Key, str]]:
    if isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _values(getattr(value, name), (*key, name))
    elif isinstance(value, dict) and value:
        for name, child in value.items():
            yield from _values(child, (*key, str(name)))
    else:
        yield key, _as_yaml(value)


def _as_yaml(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple | list):
        return f"[{', '.join(_as_yaml(item) for item in value)}]"
    return str(value)
