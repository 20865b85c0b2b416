"""Reads YAML files and `--set` overrides into one tree of values, each with its origin. Does not know the schema.

YAML without its traps: only `true` and `false` are booleans, `1e-6` is a number, `12:30` and `010` are not read in base
60 or 8, duplicate keys, aliases, tags and files that cannot be a recipe are refused.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import yaml

from megarl.errors import ConfigError, Problem, first_line

MAX_DOCUMENT_BYTES = 1 << 20
_MAX_DEPTH = 32
_MAX_DIGITS = 100
EXTENDS = "extends"
OVERRIDE = "--set"

Tree: TypeAlias = "dict[str, Tree] | list[Tree] | str | int | float | bool | None"
Key: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueOrigin:
    """Where a value was written."""

    source: str
    """A file, or `--set`."""
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """Values as written. Lists and empty sections count as one value."""

    tree: dict[str, Tree]
    origins: Mapping[Key, ValueOrigin]

    def origin(self, key: Key) -> ValueOrigin | None:
        """Return the origin of a value, or of the list or section that holds it; None for a default."""
        for length in range(len(key), 0, -1):
            if key[:length] in self.origins:
                return self.origins[key[:length]]
        return None


def read_document(path: Path) -> Document:
    """Read the file and merge it into the one it `extends`; raise ConfigError if that fails."""
    return _read_family(path, ())


def override(document: Document, assignment: str) -> Document:
    """Set one key by `a.b=c`; `c` is YAML, so `--set pools.train={gpus_per_node: 4}` works too."""
    name, equals, text = assignment.partition("=")
    key = tuple(name.split("."))
    if not equals or not all(key):
        raise _override_error(assignment, "expected a.b=value")
    try:
        value = _parse(text).value
    except yaml.YAMLError as error:
        raise _override_error(name, f"not valid YAML: {_yaml_sentence(error)}") from None
    return override_value(document, key, value)


def override_value(document: Document, key: Key, value: Tree) -> Document:
    """Set one key to a value that is parsed already."""
    for length in range(1, len(key)):
        if not isinstance(_at(document.tree, key[:length]), dict | None):
            raise _override_error(".".join(key), f"{key[length - 1]} is a value, not a section")
    others = {leaf: origin for leaf, origin in document.origins.items() if leaf[: len(key)] != key}
    origins = {leaf: ValueOrigin(source=OVERRIDE) for leaf, _ in leaves(value, key)}
    return Document(tree=_with(document.tree, key, value), origins={**others, **origins})


class _StrictLoader(yaml.SafeLoader):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag != "tag:yaml.org,2002:str":
                problem = f"line {line}: key {key_node.value} is not a word; quote it"
                raise yaml.constructor.ConstructorError(problem=problem)
            if key_node.value in seen:
                problem = f"key {key_node.value} is given twice (again in line {line}); keep one"
                raise yaml.constructor.ConstructorError(problem=problem)
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        # Python refuses to read a long one with an error that names no line.
        if len(node.value) > _MAX_DIGITS:
            problem = f"a number of {len(node.value)} digits; a recipe's have at most {_MAX_DIGITS}"
            raise yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark)
        value: int = super().construct_yaml_int(node)
        return value

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(problem="aliases are not supported; write the value out")
        event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]
        if (tag := getattr(event, "tag", None)) is not None:
            problem = f"the tag {tag} is not supported; write the value alone"
            line = getattr(event.start_mark, "line", 0) + 1
            raise yaml.composer.ComposerError(problem=f"line {line}: {problem}")
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise yaml.composer.ComposerError(problem=f"nested more than {_MAX_DEPTH} levels deep")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


_StrictLoader.add_constructor("tag:yaml.org,2002:int", _StrictLoader.construct_yaml_int)

# The core schema of YAML 1.2, and exponents without a point.
_StrictLoader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^[-+]?(?:0|[1-9][0-9_]*)$", list("-+0123456789")),
    (
        "float",
        r"^(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        list("-+0123456789."),
    ),
):
    _StrictLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parsed:
    value: Tree
    lines: Mapping[Key, int]


def _parse(text: str) -> _Parsed:
    loader = _StrictLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return _Parsed(value=None, lines={})
        value: Tree = loader.construct_document(node)
        return _Parsed(value=value, lines=dict(_lines(node, ())))
    finally:
        loader.dispose()


def _lines(node: yaml.Node, key: Key) -> Iterator[tuple[Key, int]]:
    if isinstance(node, yaml.MappingNode) and node.value:
        for key_node, value_node in node.value:
            yield from _lines(value_node, (*key, key_node.value))
    else:
        yield key, node.start_mark.line + 1


def leaves(value: object, key: Key = ()) -> Iterator[tuple[Key, object]]:
    """Yield every value of a tree that is no section, or an empty one, with its key."""
    if isinstance(value, Mapping) and value:
        for name, child in value.items():
            yield from leaves(child, (*key, name))
    else:
        yield key, value


def _read_family(path: Path, heirs: tuple[Path, ...]) -> Document:
    if path.resolve() in [heir.resolve() for heir in heirs]:
        circle = " -> ".join(str(heir) for heir in (*heirs, path))
        raise _error(heirs[-1], f"forms a circle: {circle}", key=EXTENDS)
    own = _read(path)
    tree = dict(own.tree)
    base = tree.pop(EXTENDS, None)
    origins = {key: origin for key, origin in own.origins.items() if key != (EXTENDS,)}
    if base is None:
        return Document(tree=tree, origins=origins)
    if not isinstance(base, str):
        raise _error(path, f"{base!r}: name one file, relative to this one", key=EXTENDS)
    if not _is_file(path.parent / base):
        raise _error(path, f"{path.parent / base} does not exist", key=EXTENDS)
    inherited = _read_family(path.parent / base, (*heirs, path))
    return _lay_over(inherited, Document(tree=tree, origins=origins))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False  # a name that no disk takes


def _lay_over(base: Document, own: Document) -> Document:
    replaced = set(_replaced(base.tree, own.tree, ()))
    inherited = {
        key: origin
        for key, origin in base.origins.items()
        if not any(key[:length] in replaced for length in range(len(key) + 1))
    }
    return Document(tree=merged(base.tree, own.tree), origins={**inherited, **own.origins})


def merged(base: dict[str, Tree], own: dict[str, Tree]) -> dict[str, Tree]:
    """Merge sections key by key; a section of another `kind`, a list or a value replaces the inherited one."""
    tree = dict(base)
    for name, value in own.items():
        before = tree.get(name)
        tree[name] = merged(before, value) if _is_merged(before, value) else value  # type: ignore[arg-type]
    return tree


def _replaced(base: dict[str, Tree], own: dict[str, Tree], key: Key) -> Iterator[Key]:
    for name, value in own.items():
        before = base.get(name)
        if isinstance(before, dict) and isinstance(value, dict) and _is_merged(before, value):
            yield from _replaced(before, value, (*key, name))
        else:
            yield (*key, name)


def _is_merged(before: Tree, value: Tree) -> bool:
    if not isinstance(before, dict) or not isinstance(value, dict):
        return False
    return "kind" not in value or value["kind"] == before.get("kind")


def _read(path: Path) -> Document:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise _error(path, "no such file") from None
    except OSError as error:
        raise _error(path, f"cannot be read: {error.strerror}") from None
    if len(raw) > MAX_DOCUMENT_BYTES:
        raise _error(path, f"{len(raw)} bytes; a recipe has at most {MAX_DOCUMENT_BYTES}")
    try:
        parsed = _parse(raw.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise _error(path, "not UTF-8 text") from None
    except yaml.YAMLError as error:
        raise _error(path, f"not valid YAML: {_yaml_sentence(error)}") from None
    if not isinstance(parsed.value, dict):
        raise _error(path, "not a mapping of sections (run:, model:, data: ...)")
    origins = {key: ValueOrigin(source=str(path), line=line) for key, line in parsed.lines.items()}
    return Document(tree=parsed.value, origins=origins)


def _yaml_sentence(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark
        where = f"line {mark.line + 1}: " if mark else ""
        return where + ", ".join(words for words in (error.context, error.problem) if words)
    if isinstance(error, yaml.reader.ReaderError):
        return f"character #x{error.character:02x} is not allowed"
    return first_line(error)


def _at(tree: dict[str, Tree], key: Key) -> Tree:
    value: Tree = tree
    for name in key:
        if not isinstance(value, dict):
            return value
        value = value.get(name)
    return value


def _with(tree: dict[str, Tree], key: Key, value: Tree) -> dict[str, Tree]:
    name, *rest = key
    if not rest:
        return {**tree, name: value}
    child = tree.get(name)
    return {**tree, name: _with(child if isinstance(child, dict) else {}, tuple(rest), value)}


def _error(path: Path, message: str, *, key: str = "") -> ConfigError:
    return ConfigError(str(path), (Problem(key=key, message=message),))


def _override_error(key: str, message: str) -> ConfigError:
    return ConfigError(OVERRIDE, (Problem(key=key, message=message),))
