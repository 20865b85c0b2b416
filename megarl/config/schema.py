"""Writes the schema of a recipe for editors (JSON Schema) and for people (a reference in Markdown)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TypeAlias, cast

from pydantic.json_schema import GenerateJsonSchema

from megarl.config.document import EXTENDS
from megarl.config.recipe import Recipe

Schema: TypeAlias = dict[str, object]

_EXTENDS_TEXT = (
    "Another recipe, relative to this file. Sections are merged key by key; a section of another `kind`, a list or a "
    "value replaces the inherited one."
)
_INTRODUCTION = f"""\
# Recipe reference

Every key of a recipe, from the schema itself: `megarl schema --docs` writes this page, `megarl schema` the JSON Schema
that editors use (`# yaml-language-server: $schema=...` in the first line of a recipe).

A key without a default must be given. Unknown keys are refused. Relative paths are relative to where megarl is started.
`--set a.b=VALUE` overrides one key; `megarl validate RECIPE --explain` shows where each value came from.

`{EXTENDS}: base.yaml` in the first level of a recipe: {_EXTENDS_TEXT[0].lower()}{_EXTENDS_TEXT[1:]}
"""


def json_schema() -> Schema:
    """Return the JSON Schema for editors. Only a recipe that does not extend another has to be complete."""
    schema = _plain_schema()
    complete = schema.pop("required")
    for section in _children(schema, "$defs").values():
        kept = [key for key in _strings(section, "required") if key == "kind"]
        section.pop("required", None)
        if kept:
            section["required"] = kept
    _children(schema, "properties")[EXTENDS] = {"type": "string", "title": "Extends", "description": _EXTENDS_TEXT}
    schema["if"] = {"not": {"required": [EXTENDS]}}
    schema["then"] = {"required": complete}
    return {"$schema": GenerateJsonSchema.schema_dialect, **schema}


def reference() -> str:
    """Return the reference in Markdown: one table per section."""
    schema = _plain_schema()
    return "\n".join([_INTRODUCTION, *_section(schema, schema, "", set())]).rstrip() + "\n"


def _plain_schema() -> Schema:
    schema = cast("Schema", Recipe.model_json_schema())
    for section in _children(schema, "$defs").values():
        kind = _children(section, "properties").get("kind", {})
        if "const" in kind or "enum" in kind:
            kind.setdefault("description", "Chooses this section.")
    return schema


def _section(root: Schema, section: Schema, path: str, written: set[str]) -> Iterator[str]:
    """Yield the table of the section's own keys, then the sections in it.

    `written` holds what is written already: the kinds of an algorithm share their losses.
    """
    properties = _children(section, "properties")
    required = _strings(section, "required")
    nested: list[str] = []
    rows: list[str] = []
    for name, field in properties.items():
        key = f"{path}{name}"
        sections = list(_sections_of(root, field))
        if "additionalProperties" in field and any(
            heading and child["title"] in written for heading, child in sections
        ):
            sections = []  # the kinds of one reward, by source: they have been described
        if not sections:
            default = "" if name in required else f"`{_as_yaml(field.get('default'))}`"
            rows.append(f"| `{key}` | {_type(field)} | {default} | {_cell(field)} |")
        for heading, child in sections:
            if f"{key}{heading}" in written:
                continue
            written |= {f"{key}{heading}", str(child["title"])}
            child_path = f"{key}.<name>." if "additionalProperties" in field else f"{key}."
            child_path = f"{key}.<number>." if field.get("type") == "array" else child_path
            inner = list(_section(root, child, child_path, written))
            about = list(_about(field, child, is_required=name in required))
            has_own_keys = bool(inner) and inner[0].startswith("|")
            nested += [*([f"## {key}{heading}", ""] if has_own_keys or about else []), *about, *inner]
    if rows:
        yield from ("| key | type | default | meaning |", "|---|---|---|---|", *rows, "")
    yield from nested


def _about(field: Schema, section: Schema, *, is_required: bool) -> Iterator[str]:
    texts = [str(text) for text in (field.get("description"), section.get("description")) if text]
    if not is_required and field.get("default") is None and "null" in _types(field):
        texts.append("May be left out.")
    if texts:
        yield from (" ".join(dict.fromkeys(texts)), "")


def _sections_of(root: Schema, field: Schema) -> Iterator[tuple[str, Schema]]:
    nested = [inner for choice in _list(field, "anyOf") for inner in _list(choice, "oneOf")]
    nested += _list(_mapping(field, "additionalProperties"), "oneOf")
    choices = field.get("oneOf") or nested
    for choice in _list(field, "oneOf") + _list(field, "anyOf") + nested + [field]:
        references = (choice, _mapping(choice, "additionalProperties"), _mapping(choice, "items"))
        reference = next((each["$ref"] for each in references if "$ref" in each), None)
        if isinstance(reference, str):
            section = _children(root, "$defs")[reference.rpartition("/")[2]]
            kind = _mapping(_mapping(section, "properties"), "kind")
            kinds = ", ".join(_strings(kind, "enum")) or kind.get("const")
            yield (f", kind: {kinds}" if choices and kinds else "", section)


def _types(field: Schema) -> list[str]:
    return [str(choice.get("type")) for choice in _list(field, "anyOf")]


def _type(field: Schema) -> str:
    choices = _list(field, "anyOf")
    if choices:
        return " or ".join(_type(choice) for choice in choices)
    if "const" in field:
        return f"`{_as_yaml(field['const'])}`"
    if "enum" in field:
        return " or ".join(f"`{_as_yaml(value)}`" for value in cast("list[object]", field["enum"]))
    if field.get("type") == "array":
        return f"list of {_type(_mapping(field, 'items'))}"
    name = "path" if field.get("format") == "path" else str(field.get("type", "anything"))
    bounds = [
        f"{sign} {field[word]}"
        for word, sign in (("exclusiveMinimum", ">"), ("minimum", "≥"), ("exclusiveMaximum", "<"), ("maximum", "≤"))
        if word in field
    ]
    return " ".join([name, ", ".join(bounds)]).strip()


def _cell(field: Schema) -> str:
    return str(field.get("description", "")).replace("\n", " ").replace("|", "\\|")


def _as_yaml(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _mapping(schema: Schema, name: str) -> Schema:
    value = schema.get(name)
    return cast("Schema", value) if isinstance(value, dict) else {}


def _children(schema: Schema, name: str) -> dict[str, Schema]:
    return cast("dict[str, Schema]", schema.get(name, {}))


def _list(schema: Schema, name: str) -> list[Schema]:
    return cast("list[Schema]", schema.get(name, []))


def _strings(schema: Schema, name: str) -> list[str]:
    return cast("list[str]", schema.get(name, []))
