"""Writes the data files with the options of Megatron and SGLang, for `megatron_fields` and `sglang_fields`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

from megarl.config.native import Library, NativeField, NativeLibrary


def write_library(library: Library, content: NativeLibrary) -> None:
    """Replace the data file; needs megarl's source folder."""
    path = Path(str(files("megarl.config") / "native_options" / f"{library}.json"))
    path.write_text(library_json(content), encoding="utf-8")


def library_json(content: NativeLibrary) -> str:
    """Return the data file: a line per field, so that the diff of a new release reads well."""
    lines = [f"  {json.dumps(name)}: {json.dumps(_to_json(content.fields[name]))}" for name in sorted(content.fields)]
    head = f'"name": {json.dumps(content.name)}, "version": {json.dumps(content.version)}'
    return f'{{{head}, "fields": {{\n' + ",\n".join(lines) + "\n}}\n"


def sorted_choices(values: Iterable[object]) -> tuple[str | int | float, ...]:
    """Return them in an order that does not depend on the process: some libraries keep them in sets."""
    return tuple(sorted((value for value in values if isinstance(value, str | int | float)), key=str))


def _to_json(field: NativeField) -> dict[str, object]:
    values: dict[str, object] = {"types": field.types}
    values |= {"choices": field.choices} if field.choices else {}
    values |= {"flag": field.flag} if field.flag else {}
    values |= {"negation": field.negation} if field.negation else {}
    return values
