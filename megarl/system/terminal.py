"""Texts of servers, models and files on their way to a terminal or a log: a control character is shown, not obeyed."""

from __future__ import annotations

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2028\u2029\u2066-\u2069\ud800-\udfff]")
"""All but tabs and ends of lines: escape sequences, marks that reverse the order of letters, halves of characters."""


def printable(text: str) -> str:
    r"""Return the text with control characters as people write them, such as `\x1b` for the one of escape sequences."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def as_entry(text: str) -> str:
    """Return a message as one entry of a list: its further lines are indented, so that they pass for no other entry."""
    return printable(text).rstrip("\n").replace("\n", "\n  ")
