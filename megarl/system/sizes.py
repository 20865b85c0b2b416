"""Units of memory, and counts as multiples."""

from __future__ import annotations

MIB = 1 << 20
GIB = 1 << 30


def round_up(count: int, multiple: int) -> int:
    """Return the smallest multiple that is at least `count`."""
    return -(-count // multiple) * multiple
