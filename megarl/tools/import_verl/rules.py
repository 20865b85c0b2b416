"""What becomes of each verl key: the table in rules.tsv, first match wins; known.txt has the names of verl 0.9.1."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files


class KeyVerdict(StrEnum):
    MAPPED = "mapped"
    NO_EFFECT = "no effect"
    NOT_SUPPORTED = "not supported"
    UNKNOWN = "unknown"


class Treatment(StrEnum):
    RENAME = "rename"
    """The value goes over as it is; the text is the recipe's key."""
    COMPUTE = "compute"
    """`translate` knows what to do."""
    NONE = "none"
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRule:
    pattern: str
    treatment: Treatment
    text: str


_LIKE_ACTOR = ("critic.", "actor_rollout_ref.ref.")


def rule_for(key: str) -> KeyRule | None:
    """None for a key that verl does not have. What is said of an actor's key is true of a critic's and a reference's,
    unless they have a rule of their own."""
    found = next((rule for rule in _rules() if fnmatchcase(key, rule.pattern)), None)
    prefix = next((prefix for prefix in _LIKE_ACTOR if key.startswith(prefix)), None)
    if found is not None or prefix is None:
        return found
    name = key.removeprefix(prefix)
    likely = (rule_for(f"actor_rollout_ref.{name}"), rule_for(f"actor_rollout_ref.actor.{name}"))
    return next((rule for rule in likely if rule and rule.treatment in (Treatment.NONE, Treatment.UNSUPPORTED)), None)


def nearest_known(key: str) -> str | None:
    found = difflib.get_close_matches(key, known_keys(), n=1, cutoff=0.8)
    return found[0] if found else None


@cache
def known_keys() -> tuple[str, ...]:
    return tuple(_data("known.txt").split())


@cache
def _rules() -> tuple[KeyRule, ...]:
    rows = [line.split("\t") for line in _data("rules.tsv").splitlines()]
    return tuple(KeyRule(pattern=pattern, treatment=Treatment(word), text=text) for pattern, word, text in rows)


def _data(name: str) -> str:
    return (files("megarl.tools.import_verl") / name).read_text(encoding="utf-8")
