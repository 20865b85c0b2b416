"""Beginnings that the rows of an episode have in common with earlier ones of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megarl.data.prefixes import NOTHING, Prefix
from megarl.tokens import RouteArray


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
