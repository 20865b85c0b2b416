"""Writes the schema of a recipe for editors (JSON Schema) and for people (a reference in Markdown)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
        kinds = [key for key in _strings(section, "required") if key == "kind"]
        section.pop("required", None)
        if kinds:
            section["required"] = kinds
    _children(schema, "properties")[EXTENDS] = {"type": "string", "title": "Extends", "description": _EXTENDS_TEXT}
    schema["if"] = {"not": {"required": [EXTENDS]}}
    schema["then"] = {"required": complete}
    return {"$schema": GenerateJsonSchema.schema_dialect, **schema}


def reference() -> str:
    """Return the reference in Markdown: a table per section. A section or a row that occurs again is a link."""
    schema = _plain_schema()
    tables = _unique_tables(schema)
    first_of_title: dict[str, _Table] = {}
    first_of_row: dict[tuple[str, ...], _Table] = {}
    for table in sorted(tables, key=lambda each: each.depth):
        if first_of_title.setdefault(table.title, table) is table:
            for row in table.rows:
                first_of_row.setdefault(row.text, table)
    lines = [_INTRODUCTION]
    for table in tables:
        if first_of_title[table.title] is table:
            lines += _written(table, first_of_row, first_of_title)
    for name, field in _children(schema, "properties").items():
        if not any(_sections_of(schema, field)):
            lines += [f"## {name}", "", " ".join(str(field["description"]).split()), ""]
    return "\n".join(lines).rstrip() + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    name: str
    text: tuple[str, ...]
    """Name, type, default and meaning: equal in sections that share the key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """One section of the reference."""

    heading: str
    path: str
    """Before the names of its keys."""
    title: str
    """The name of the section in the schema; sections at several keys share it."""
    about: str
    rows: tuple[_Row, ...]
    inner: tuple[tuple[str, tuple[_Table, ...]], ...]
    """The tables of each key that holds sections."""

    @property
    def depth(self) -> int:
        return self.path.count(".")

    @property
    def link(self) -> str:
        anchor = re.sub(r"[^\w\- ]", "", self.heading.lower()).replace(" ", "-")
        return f"[{self.heading}](#{anchor})"


def _unique_tables(root: Schema) -> list[_Table]:
    """Return all tables in the order of the recipe; kinds of an algorithm share the tables of their losses."""
    tables: dict[str, _Table] = {}

    def add(table: _Table) -> None:
        if tables.setdefault(table.heading, table) is table or table.title != tables[table.heading].title:
            for _, children in table.inner:
                for child in children:
                    add(child)

    for name, field in _children(root, "properties").items():
        is_required = name in _strings(root, "required")
        for heading, section in _sections_of(root, field):
            add(_table(root, section, field, key=name, heading=f"{name}{heading}", is_required=is_required))
    return list(tables.values())


def _table(root: Schema, section: Schema, field: Schema, *, key: str, heading: str, is_required: bool) -> _Table:
    path = f"{key}.<name>." if "additionalProperties" in field else f"{key}."
    path = f"{key}.<number>." if field.get("type") == "array" else path
    rows: list[_Row] = []
    inner: list[tuple[str, tuple[_Table, ...]]] = []
    for name, child in _children(section, "properties").items():
        is_child_required = name in _strings(section, "required")
        sections = list(_sections_of(root, child))
        if sections:
            tables = (
                _table(
                    root,
                    each,
                    child,
                    key=f"{path}{name}",
                    heading=f"{path}{name}{kind}",
                    is_required=is_child_required,
                )
                for kind, each in sections
            )
            inner.append((name, tuple(tables)))
        else:
            default = "" if is_child_required else f"`{_as_yaml(child.get('default'))}`"
            rows.append(_Row(name=name, text=(name, _type(child), default, _cell(child))))
    return _Table(
        heading=heading,
        path=path,
        title=str(section["title"]),
        about=_about(field, section, is_required=is_required),
        rows=tuple(rows),
        inner=tuple(inner),
    )


def _written(
    table: _Table,
    first_of_row: Mapping[tuple[str, ...], _Table],
    first_of_title: Mapping[str, _Table],
) -> Iterator[str]:
    """Yield heading, sentences and table of one section, and where the keys are that it shares with others."""
    own = [
        f"| `{table.path}{row.name}` | {' | '.join(row.text[1:])} |"
        for row in table.rows
        if row.name == "kind" or first_of_row[row.text] is table
    ]
    shared: dict[str, list[str]] = {}
    for row in table.rows:
        if row.name != "kind" and (first := first_of_row[row.text]) is not table:
            shared.setdefault(first.link, []).append(f"`{row.name}`")
    repeated = [(name, children) for name, children in table.inner if _is_elsewhere(children[0], first_of_title)]
    for name, children in repeated if table.rows else ():
        link = first_of_title[children[0].title].link
        shared.setdefault(link, []).append(f"`{name}`" + " of any such kind" * (len(children) > 1))
    if own or shared or table.about:
        yield from (f"## {table.heading}", "")
    if table.about:
        yield from (table.about, "")
    if own:
        yield from ("| key | type | default | meaning |", "|---|---|---|---|", *own, "")
    for link, names in shared.items():
        yield from (f"As in {link}: {', '.join(names)}.", "")
    for _, (child, *_others) in () if table.rows else repeated:
        yield from (f"## {child.heading}", "", child.about, "", f"Keys: {first_of_title[child.title].link}.", "")


def _is_elsewhere(table: _Table, first_of_title: Mapping[str, _Table]) -> bool:
    return first_of_title[table.title].heading != table.heading


def _plain_schema() -> Schema:
    schema = cast("Schema", Recipe.model_json_schema())
    for section in _children(schema, "$defs").values():
        kind = _children(section, "properties").get("kind", {})
        if "const" in kind or "enum" in kind:
            kind.setdefault("description", "Chooses this section.")
    return schema


def _about(field: Schema, section: Schema, *, is_required: bool) -> str:
    texts = [str(text) for text in (field.get("description"), section.get("description")) if text]
    if not is_required and field.get("default") is None and "null" in _types(field):
        texts.append("May be left out.")
    return " ".join(dict.fromkeys(texts))


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
