"""Texts that this process shows: keys and tokens are masked, and a control character is shown, not obeyed.

A recipe holds no key, only the names of files that do, so that a stored recipe can be shown to anyone.
"""

from __future__ import annotations

import logging
import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2028\u2029\u2066-\u2069\ud800-\udfff]")
"""All but tabs and ends of lines: escape sequences, marks that reverse the order of letters, halves of characters."""
_MASK = "***"
_MIN_CHARACTERS = 4
"""Shorter values are not masked: they would mask half of a text."""
_known: set[str] = set()


class Secret:
    """A string that only `reveal` shows."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value
        if len(value) >= _MIN_CHARACTERS:
            _known.add(value)

    def reveal(self) -> str:
        return self._value

    def __repr__(self) -> str:
        return _MASK

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._value == self._value

    def __hash__(self) -> int:
        return hash(self._value)

    def __reduce__(self) -> tuple[type[Secret], tuple[str]]:
        # Built again by its constructor, so that the receiving process masks it as well.
        return Secret, (self._value,)


def masked(text: str) -> str:
    """Return the text with every secret of this process masked."""
    for value in _known:
        text = text.replace(value, _MASK)
    return text


def printable(text: str) -> str:
    r"""Return the text with control characters as people write them, such as `\x1b` for the one of escape sequences."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def as_entry(text: str) -> str:
    """Return a message as one entry of a list: its further lines are indented, so that they pass for no other entry."""
    return printable(text).rstrip("\n").replace("\n", "\n  ")


class MaskingFormatter(logging.Formatter):
    """Masks the secrets of this process in what it logs. A text from outside forges no line there."""

    def format(self, record: logging.LogRecord) -> str:
        return as_entry(masked(super().format(record)))
