"""From a YAML file and `--set` overrides to a Recipe, or to every problem at once."""

from __future__ import annotations

import difflib
import re
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import TypeAlias, get_args

import yaml
from pydantic import BaseModel, ValidationError

from megarl.config.check import check_recipe
from megarl.config.recipe import Recipe
from megarl.errors import ConfigError, Problem

MAX_RECIPE_BYTES = 1 << 20

Tree: TypeAlias = "dict[str, Tree] | list[Tree] | str | int | float | bool | None"


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, override, validate and cross-check; raises ConfigError with all that is wrong."""
    tree = _read(path)
    for override in overrides:
        _apply(tree, override)
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(str(path), tuple(_problem(details) for details in error.errors())) from None
    problems = check_recipe(recipe)
    if problems:
        raise ConfigError(str(path), tuple(problems))
    return recipe


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML without its traps: duplicate keys are refused, `1e-6` is a number, aliases are not followed."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.value in seen:
                line = key_node.start_mark.line + 1
                raise yaml.constructor.ConstructorError(
                    problem=f"key {key_node.value} is given twice (again in line {line}); keep one"
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(problem="aliases are not supported; write the value out")
        return super().compose_node(parent, index)


_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def _read(path: Path) -> dict[str, Tree]:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise _error(path, "no such file") from None
    except OSError as error:
        raise _error(path, f"cannot be read: {error.strerror}") from None
    if len(raw) > MAX_RECIPE_BYTES:
        raise _error(path, f"{len(raw)} bytes; a recipe has at most {MAX_RECIPE_BYTES}")
    try:
        tree = _parse(raw.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise _error(path, "not UTF-8 text") from None
    except yaml.YAMLError as error:
        raise _error(path, f"not valid YAML: {_yaml_sentence(error)}") from None
    if not isinstance(tree, dict):
        raise _error(path, "not a mapping of sections (run:, model:, data: ...)")
    return tree


def _parse(text: str) -> Tree:
    tree: Tree = yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - a subclass of SafeLoader
    return tree


def _yaml_sentence(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark
        where = f"line {mark.line + 1}: " if mark else ""
        return f"{where}{error.problem or error.context}"
    return str(error).splitlines()[0]


def _apply(tree: dict[str, Tree], override: str) -> None:
    """`a.b=c` sets one key; `c` is YAML, so `--set pools.train={gpus_per_node: 4}` works too."""
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError("--set", (Problem(key=override, message="expected a.b=value"),))
    try:
        value = _parse(text)
    except yaml.YAMLError as error:
        raise ConfigError("--set", (Problem(key=key, message=f"not valid YAML: {_yaml_sentence(error)}"),)) from None
    *parents, last = key.split(".")
    section = tree
    for parent in parents:
        child = section.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError("--set", (Problem(key=key, message=f"{parent} is a value, not a section"),))
        section = child
    section[last] = value


def _problem(details: object) -> Problem:
    """One of pydantic's errors in the words of a recipe: the key, the value, the way out."""
    assert isinstance(details, dict)
    location = tuple(details["loc"])
    key = ".".join(str(part) for part in _without_tags(location))
    match details["type"]:
        case "extra_forbidden":
            near = difflib.get_close_matches(str(location[-1]), _siblings(location), n=1, cutoff=0.6)
            hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(sorted(_siblings(location)))}"
            return Problem(key=key, message=f"unknown key{hint}")
        case "missing":
            return Problem(key=key, message="missing; this key has no default")
        case "union_tag_not_found":
            return Problem(key=key, message=f"missing kind; one of {details['ctx']['discriminator']}")
        case "union_tag_invalid":
            expected = str(details["ctx"]["expected_tags"])
            return Problem(key=f"{key}.kind", message=f"unknown {details['ctx']['tag']!r}; one of {expected}")
        case _:
            message = str(details["msg"])
            sentence = message[0].lower() + message[1:]
            return Problem(key=key, message=f"{details['input']!r}: {sentence}")


def _without_tags(location: tuple[str | int, ...]) -> list[str | int]:
    """Pydantic puts the tag of a union into the path (`algorithm.grpo.clip_low`); a recipe does not."""
    fields = _walk(location)
    return [part for part, is_tag in fields if not is_tag]


def _walk(location: tuple[str | int, ...]) -> list[tuple[str | int, bool]]:
    steps: list[tuple[str | int, bool]] = []
    models: list[type[BaseModel]] = [Recipe]
    for part in location:
        tagged = [model for model in models if len(models) > 1 and part in _tags(model)]
        if tagged:
            steps.append((part, True))
            models = tagged
            continue
        steps.append((part, False))
        models = _children(models, part) or models
    return steps


def _siblings(location: tuple[str | int, ...]) -> list[str]:
    models: list[type[BaseModel]] = [Recipe]
    for part in location[:-1]:
        tagged = [model for model in models if len(models) > 1 and part in _tags(model)]
        models = tagged or _children(models, part) or models
    return sorted({name for model in models for name in model.model_fields})


def _tags(model: type[BaseModel]) -> tuple[object, ...]:
    kind = model.model_fields.get("kind")
    return get_args(kind.annotation) if kind else ()


def _children(models: list[type[BaseModel]], part: str | int) -> list[type[BaseModel]]:
    found: list[type[BaseModel]] = []
    for model in models:
        if part in model.model_fields:
            found += _models_in(model.model_fields[str(part)].annotation)
    return found


def _models_in(annotation: object) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]


def _error(path: Path, message: str) -> ConfigError:
    return ConfigError(str(path), (Problem(key="", message=message),))
