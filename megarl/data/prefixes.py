"""The tree of a step's rows: what each has in common with an earlier one, and need not be computed again.

Pure. A prefix is equal in everything that a forward pass reads: the tokens and, where they are replayed, their experts.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megarl.tokens import RouteArray


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


def row_prefixes(
    prompt_ids: npt.NDArray[np.int32],
    token_ids: npt.NDArray[np.int32],
    starts: Sequence[int],
    routes: RouteArray | None = None,
) -> tuple[Prefix, ...]:
    """Return the longest prefix of each row of an episode that an earlier row of it has too.

    `starts` and `routes` are those of the response: rows begin at `starts`, and tokens before continue the prompt.
    """
    bounds = [0, *starts] if 0 not in starts else [*starts]
    num_prompt, prefixes, rows = len(prompt_ids), list[Prefix](), list[tuple[npt.NDArray[np.int32], int]]()
    for start, end in zip(bounds, [*bounds[1:], len(token_ids)], strict=True):
        continues = start == 0 and start not in starts
        tokens = np.concatenate([prompt_ids, token_ids[:end]]) if continues else token_ids[start:end]
        # The last token is no input.
        inputs, first = tokens[:-1], 0 if continues else num_prompt + start
        best = NOTHING
        for place, (earlier, before) in enumerate(rows):
            common = _num_equal(inputs, earlier)
            if routes is not None:
                common = _num_equal(routes[first : first + common], routes[before : before + common])
            if common > best.num_tokens:
                best = Prefix(place, common)
        prefixes.append(best)
        rows.append((inputs, first))
    return tuple(prefixes)


def _num_equal(left: npt.NDArray[np.integer], right: npt.NDArray[np.integer]) -> int:
    """Return how many elements at the beginning are equal."""
    size = min(len(left), len(right))
    differs = (left[:size] != right[:size]).reshape(size, -1).any(axis=1) if size else np.zeros(0, np.bool_)
    return int(differs.argmax()) if differs.any() else size
