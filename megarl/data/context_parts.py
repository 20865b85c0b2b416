"""The part of a micro-batch that each context-parallel rank has.

Every rank computes equally many positions, with about the same work under a causal mask: of whole sequences the same
of each, of rows that share prefixes the same of all that is computed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megarl.data.packing import runs
from megarl.types import MicroBatch, SharedPositions


def zigzag(starts: npt.NDArray[np.integer], context: int) -> npt.NDArray[np.int64]:
    """Return the positions of a pack that each context-parallel rank has, in its order. [context, N / context]

    Every sequence is cut into 2 * context equal chunks; rank r has chunks r and 2 * context - 1 - r of each, so that
    all ranks have the same tokens and the same work under a causal mask.
    """
    lengths = np.diff(starts)
    assert not (lengths % (2 * context)).any(), f"a sequence is not a multiple of {2 * context} tokens"
    chunk = lengths // (2 * context)
    firsts = (starts[:-1, None] + chunk[:, None] * [r, 2 * context - 1 - r] for r in range(context))
    return np.stack([runs(first.ravel(), np.repeat(chunk, 2)) for first in firsts])


def computed_parts(shared: SharedPositions, context: int) -> npt.NDArray[np.int64]:
    """Return which of the computed positions each rank computes. [context, M / context]"""
    return zigzag(np.array([0, len(shared.computed)]), context)


def scored_parts(micro_batch: MicroBatch, context: int) -> list[npt.NDArray[np.int64]]:
    """Return the positions whose hidden states each rank has: those that it computes, and those that equal one."""
    if micro_batch.shared is None:
        return [*zigzag(micro_batch.sequence_starts, context)]
    parts = computed_parts(micro_batch.shared, context)
    rank_of = np.empty(parts.size, np.int32)
    for rank, part in enumerate(parts):
        rank_of[part] = rank
    scored_by = rank_of[micro_batch.shared.places]
    return [np.flatnonzero(scored_by == rank) for rank in range(context)]
