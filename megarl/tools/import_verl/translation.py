"""The state of one translation: the keys read from a YAML file or a shell script, the recipe so far, and the report."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from megarl.config.document import Document, Tree, override, override_value, read_document
from megarl.errors import ConfigError, Problem
from megarl.tools.import_verl.rules import KeyRule, KeyVerdict, Treatment, nearest_known, rule_for

ACTOR = "actor_rollout_ref.actor."

_ASSIGNMENT = re.compile(r"^(?:\+{1,2})?([A-Za-z_]\w*(?:\.[\w-]+)+)=(.*)$", re.DOTALL)
_VARIABLE = re.compile(r"^(?:export\s+)?([A-Za-z_]\w*)=(.*)$")
_USE = re.compile(r"\$\{?([A-Za-z_]\w*)(?::-([^}]*))?\}?")
_HYDRA_SECTIONS = ("hydra", "defaults")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The verdict on one key."""

    key: str
    value: Tree
    verdict: KeyVerdict
    text: str
    """The recipe's key, or why there is none, or what to do instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    tree: dict[str, Tree]
    entries: tuple[Entry, ...]
    """One per key of the file, in its order."""
    notes: tuple[str, ...]
    """The assumptions of the recipe."""


class Translation:
    def __init__(self, given: Mapping[str, Tree], *, name: str) -> None:
        self.given = given
        self.name = name
        self.notes: list[str] = []
        self.has_critic = False
        self.is_sft = not any(key.startswith("actor_rollout_ref.") for key in given)
        self._document = Document(tree={}, origins={})
        self._entries: dict[str, Entry] = {}

    def take(self, key: str, target: str, *, default: Tree = None) -> Tree:
        """Return the given value or `default`, and report that the key became `target`."""
        value = self.given.get(key)
        if key in self.given:
            if is_interpolation(value):
                self.report(key, KeyVerdict.NOT_SUPPORTED, "an interpolation; write the value out")
                return default
            self.mapped(key, target)
        return default if value is None else value

    def number(self, key: str, default: int) -> int:
        value = self.given.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else default

    def put(self, key: str, value: Tree) -> None:
        self._document = override_value(self._document, tuple(key.split(".")), value)

    def mapped(self, key: str, target: str) -> None:
        self.report(key, KeyVerdict.MAPPED, target)

    def report(self, key: str, verdict: KeyVerdict, text: str) -> None:
        if key in self.given:
            self._entries[key] = Entry(key=key, value=self.given[key], verdict=verdict, text=text)

    def imported(self) -> Imported:
        """Return the recipe, with an entry for every given key, also for those that nothing was done with."""
        entries = tuple(self._entries.get(key) or _untouched_entry(key, value) for key, value in self.given.items())
        return Imported(tree=self._document.tree, entries=entries, notes=tuple(self.notes))


def is_interpolation(value: Tree) -> bool:
    return isinstance(value, str) and "${" in value


def _untouched_entry(key: str, value: Tree) -> Entry:
    """Return the entry of a key that no section used."""
    rule = rule_for(key)
    if rule is None:
        near = nearest_known(key)
        text = f"verl has no such key; did you mean {near}?" if near else "verl has no such key"
        return Entry(key=key, value=value, verdict=KeyVerdict.UNKNOWN, text=text)
    verdict, text = _rule_verdict(rule, key, value)
    return Entry(key=key, value=value, verdict=verdict, text=text)


def _rule_verdict(rule: KeyRule, key: str, value: Tree) -> tuple[KeyVerdict, str]:
    is_off = value in (None, False, 0, -1, "") or value in ([], {}) or (value == 1 and key.endswith("_size"))
    match rule.treatment:
        case Treatment.UNSUPPORTED if is_off:
            return KeyVerdict.NO_EFFECT, "off, as in megarl"
        case Treatment.UNSUPPORTED:
            return KeyVerdict.NOT_SUPPORTED, rule.text
        case Treatment.NONE:
            return KeyVerdict.NO_EFFECT, rule.text
        case Treatment.RENAME | Treatment.COMPUTE:
            return KeyVerdict.NO_EFFECT, "has no use with the other keys"


def read_verl(path: Path) -> dict[str, Tree]:
    """Return the values by dotted key, in the order of the file; a later one replaces an earlier one."""
    if path.suffix in (".yaml", ".yml"):
        tree = {name: value for name, value in read_document(path).tree.items() if name not in _HYDRA_SECTIONS}
        return dict(_flat(tree, ""))
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), (Problem(key="", message=f"cannot be read: {error}"),)) from None
    document = Document(tree={}, origins={})
    for assignment in _assignments(text, path):
        document = override(document, assignment)
    keys = dict(_flat(document.tree, ""))
    if not keys:
        message = "no key=value words as verl takes them; name a YAML file or a shell script"
        raise ConfigError(str(path), (Problem(key="", message=message),))
    return keys


def _assignments(text: str, path: Path) -> Iterator[str]:
    variables: dict[str, str] = {}
    for line in re.sub(r"\\\n", " ", text).splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            message = f"not a shell script: {error} in {line.strip()[:60]!r}"
            raise ConfigError(str(path), (Problem(key="", message=message),)) from None
        for word in words:
            assignment = _ASSIGNMENT.match(word)
            if assignment:
                yield f"{assignment[1]}={_expanded(assignment[2], variables)}"
                continue
            variable = _VARIABLE.match(word)
            if variable:
                variables[variable[1]] = _expanded(variable[2], variables)


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    """Insert the variables of the script; one that it does not set stays as written."""
    return _USE.sub(lambda use: variables.get(use[1], use[2] if use[2] is not None else use[0]), text)


def _flat(tree: dict[str, Tree], prefix: str) -> Iterator[tuple[str, Tree]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
