"""What the schema refuses, in the words of a recipe: the key, the value, the way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import TypeAlias, get_args, get_origin

from pydantic import BaseModel, ValidationError

from megarl.config.document import Key, Tree
from megarl.errors import Problem

_Location: TypeAlias = tuple[str | int, ...]


def complaints(error: ValidationError, root: type[BaseModel]) -> tuple[Problem, ...]:
    """One problem per refused value of a `root`."""
    return tuple(_problem(details, root) for details in error.errors())


def misplaced_truths(tree: dict[str, Tree], root: type[BaseModel]) -> Iterator[Problem]:
    """`true` and `false` where a number belongs: the schema would read `metrics_port: false` as port 0."""
    for key, value in _values(tree, ()):
        fields = [model.model_fields.get(key[-1]) for model in _models_at(key[:-1], root)]
        is_number = any(field is not None and not _takes_bool(field.annotation) for field in fields)
        if isinstance(value, bool) and is_number:
            yield Problem(key=".".join(key), message=f"{_written(value)}: not a truth value; write the value itself")


def _values(value: Tree, key: Key) -> Iterator[tuple[Key, Tree]]:
    if isinstance(value, dict):
        for name, child in value.items():
            yield from _values(child, (*key, name))
    else:
        yield key, value


def _takes_bool(annotation: object) -> bool:
    return annotation is bool or any(_takes_bool(argument) for argument in get_args(annotation))


def _problem(details: object, root: type[BaseModel]) -> Problem:
    assert isinstance(details, dict)
    location = tuple(details["loc"])
    key = ".".join(str(part) for part in _without_tags(location, root))
    match details["type"]:
        case "extra_forbidden":
            known = _siblings(location, root)
            near = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.6)
            hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known)}"
            return Problem(key=key, message=f"unknown key{hint}")
        case "missing":
            return Problem(key=key, message="missing; this key has no default")
        case "union_tag_not_found":
            kinds = ", ".join(_kinds(location, root))
            return Problem(key=f"{key}.kind", message=f"missing; one of {kinds}")
        case "union_tag_invalid":
            expected = str(details["ctx"]["expected_tags"])
            return Problem(key=f"{key}.kind", message=f"unknown {details['ctx']['tag']!r}; one of {expected}")
        case "model_type" | "model_attributes_type" | "dict_type":
            return Problem(key=key, message=f"{_written(details['input'])}: a section belongs here; write its keys")
        case "tuple_type" | "list_type":
            return Problem(key=key, message=f"{_written(details['input'])}: a list belongs here; write [a, b]")
        case "too_short":
            return Problem(key=key, message="empty; at least one is needed")
        case _:
            message = str(details["msg"])
            sentence = message[0].lower() + message[1:]
            return Problem(key=key, message=f"{_written(details['input'])}: {sentence}")


def _written(value: object) -> str:
    """As it stands in YAML, not in Python."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value)


def _without_tags(location: _Location, root: type[BaseModel]) -> list[str | int]:
    """Pydantic puts the tag of a union into the path (`algorithm.grpo.clip_low`); a recipe does not."""
    kept: list[str | int] = []
    models = [root]
    is_name = False
    for part in location:
        tagged = [] if is_name else _tagged(models, part)
        if not tagged:
            kept.append(part)
        is_name = not is_name and _is_mapping(models, part)
        models = tagged or _children(models, part) or models
    return kept


def _is_mapping(models: list[type[BaseModel]], part: str | int) -> bool:
    """Whether a name that people choose comes next; it may be that of a kind."""
    fields = (model.model_fields.get(str(part)) for model in models)
    return any(field is not None and get_origin(field.annotation) is dict for field in fields)


def _siblings(location: _Location, root: type[BaseModel]) -> list[str]:
    return sorted({name for model in _models_at(location[:-1], root) for name in model.model_fields})


def _kinds(location: _Location, root: type[BaseModel]) -> list[str]:
    return [str(tag) for model in _models_at(location, root) for tag in _tags(model)]


def _models_at(location: _Location, root: type[BaseModel]) -> list[type[BaseModel]]:
    models = [root]
    is_name = False
    for part in location:
        tagged = [] if is_name else _tagged(models, part)
        is_name = not is_name and _is_mapping(models, part)
        models = tagged or _children(models, part) or models
    return models


def _tagged(models: list[type[BaseModel]], part: str | int) -> list[type[BaseModel]]:
    return [model for model in models if len(models) > 1 and part in _tags(model)]


def _tags(model: type[BaseModel]) -> tuple[object, ...]:
    kind = model.model_fields.get("kind")
    return get_args(kind.annotation) if kind else ()


def _children(models: Iterable[type[BaseModel]], part: str | int) -> list[type[BaseModel]]:
    found: list[type[BaseModel]] = []
    for model in models:
        if part in model.model_fields:
            found += sections_in(model.model_fields[str(part)].annotation)
    return found


def sections_in(annotation: object) -> list[type[BaseModel]]:
    """The sections a value of this type may be, or hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in sections_in(argument)]
