"""Keys and tokens: hidden from `repr`, and masked in every text that this process shows.

A recipe holds none, only the names of files that do, so that a stored recipe can be shown to anyone.
"""

from __future__ import annotations

import logging

from megarl.system.terminal import as_entry

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


class MaskingFormatter(logging.Formatter):
    """Masks the secrets of this process in what it logs. A text from outside forges no line there."""

    def format(self, record: logging.LogRecord) -> str:
        return as_entry(masked(super().format(record)))
