"""Keys and tokens: kept so that they are not shown, and struck out wherever this process writes for people.

A recipe has none: it names the file that one is in. So what is stored of a recipe can be shown to anybody.
"""

from __future__ import annotations

_MASK = "***"
_MIN_CHARACTERS = 4
"""What is shorter is no secret, and would strike out half of a text."""
_known: set[str] = set()


class Secret:
    """A string that says what it is only when it is asked to."""

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
        # Another process that gets it strikes it out as well.
        return Secret, (self._value,)


def masked(text: str) -> str:
    """A text without any secret that this process knows."""
    for value in _known:
        text = text.replace(value, _MASK)
    return text
