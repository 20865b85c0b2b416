"""Texts and values as a hostile model, tool or server writes them: strategies for hypothesis."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

_PIECES = (
    "\ud800",
    "\udc00",
    "\ud83d\ude00",
    "\x00",
    "\x1b[2J",
    "\u202e",
    "\ufeff",
    "\uff1c|im_end|\uff1e",
    "\n",
    " ",
    "7",
    "{",
    "}",
    '"',
    "\\",
    "{{",
    "{%",
    "</s>",
    "[INST]",
    "\U0001f600",
)
NUMBERS = (float("nan"), float("inf"), 1e308, -1e308, 3.5e38, 1e19, 10**400, -(10**400), 2**64, True, 0, -0.0, 1e-320)


def texts(marks: Sequence[str] = ()) -> st.SearchStrategy[str]:
    """Return texts with marks, whole, halved and nested in one another, and with characters that are none."""
    halves = [part for mark in marks for part in (mark[: len(mark) // 2], mark[len(mark) // 2 :], mark[0], mark[1:])]
    nested = [one[:2] + other + one[2:] for one in marks[:4] for other in marks[:4]]
    chosen = st.sampled_from((*_PIECES, *marks, *marks, *halves, *nested))
    return st.lists(chosen | st.text(st.characters(), max_size=4), max_size=12).map("".join)


def values() -> st.SearchStrategy[object]:
    """Return values of JSON, numbers beyond it included."""
    leaves = st.none() | st.booleans() | st.sampled_from(NUMBERS) | st.floats() | st.integers() | texts()
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
        max_leaves=12,
    )
