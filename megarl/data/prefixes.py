"""The tree of a step's rows: what each has in common with an earlier one, and need not be computed again.

Pure. A prefix is equal in everything that a forward pass reads: the tokens and, where they are replayed, their experts.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple


class Prefix(NamedTuple):
    """The beginning of a row that is that of an earlier row too."""

    row: int
    """Index of the earlier row; -1 where nothing is shared."""
    num_tokens: int


NOTHING = Prefix(-1, 0)


class Tree:
    """Some of a step's rows, to which further ones are added in ascending order."""

    def __init__(self, prefixes: Sequence[Prefix]) -> None:
        """`prefixes` are those of all rows: members may share with each other by way of rows that are no members."""
        self._prefixes = prefixes
        self._nearest: dict[int, Prefix] = {}
        """By members and the rows above them: the member that has most in common with each, by its place."""
        self._num_members = 0

    def add(self, row: int) -> Prefix:
        """Return the longest prefix that the row shares with a member, by its place among them; make it a member.

        Two rows have in common the least of what lies on the way between them in the tree.
        """
        best, common, way = NOTHING, sys.maxsize, list[tuple[int, int]]()
        while row >= 0 and common > best.num_tokens:
            way.append((row, common))
            place, shared = self._nearest.get(row, NOTHING)
            if min(common, shared) > best.num_tokens:
                best = Prefix(place, min(common, shared))
            row, above = self._prefixes[row]
            common = min(common, above)
        for each, shared in way:
            if self._nearest.get(each, NOTHING).num_tokens < shared:
                self._nearest[each] = Prefix(self._num_members, shared)
        self._num_members += 1
        return best
