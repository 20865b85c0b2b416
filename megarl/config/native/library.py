"""What a library takes: one data file per pinned release, and how it is read and written. Judges no recipe."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Literal, TypeAlias

Library: TypeAlias = Literal["megatron", "megatron_optimizer", "megatron_ddp", "sglang"]

JSON = "json"
"""The type of an option that is a mapping or a list, handed over as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeField:
    types: tuple[str, ...]
    """bool, int, float, str, `list[...]` of one of them, json; empty where no value can be written in a recipe."""
    choices: tuple[str | int | float, ...] = ()
    """Of the value, or of each item of a list."""
    flag: str | None = None
    """Where it is not `--` and the name."""
    negation: str | None = None
    """The flag for false; without it false is what the library does by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeLibrary:
    name: str
    version: str
    fields: Mapping[str, NativeField]

    def to_json(self) -> str:
        """The data file: a line per field, so that a change of release reads well."""
        lines = [f"  {json.dumps(name)}: {json.dumps(_written(self.fields[name]))}" for name in sorted(self.fields)]
        head = f'"name": {json.dumps(self.name)}, "version": {json.dumps(self.version)}'
        return f'{{{head}, "fields": {{\n' + ",\n".join(lines) + "\n}}\n"


@cache
def read_library(library: Library) -> NativeLibrary:
    raw = json.loads((files("megarl.config.native") / f"{library}.json").read_text(encoding="utf-8"))
    return NativeLibrary(
        name=raw["name"],
        version=raw["version"],
        fields={name: _read(field) for name, field in raw["fields"].items()},
    )


def write_library(library: Library, found: NativeLibrary) -> None:
    """Where the package lies as source."""
    Path(__file__).with_name(f"{library}.json").write_text(found.to_json(), encoding="utf-8")


def sorted_choices(values: Iterable[object]) -> tuple[str | int | float, ...]:
    """In an order that does not depend on the process: some libraries keep them in sets."""
    return tuple(sorted((value for value in values if isinstance(value, str | int | float)), key=str))


def _written(field: NativeField) -> dict[str, object]:
    values: dict[str, object] = {"types": field.types}
    values |= {"choices": field.choices} if field.choices else {}
    values |= {"flag": field.flag} if field.flag else {}
    values |= {"negation": field.negation} if field.negation else {}
    return values


def _read(raw: Mapping[str, object]) -> NativeField:
    types, choices = raw["types"], raw.get("choices", [])
    flag, negation = raw.get("flag"), raw.get("negation")
    assert isinstance(types, list), raw
    assert isinstance(choices, list), raw
    assert isinstance(flag, str | None), raw
    assert isinstance(negation, str | None), raw
    return NativeField(types=tuple(types), choices=tuple(choices), flag=flag, negation=negation)
