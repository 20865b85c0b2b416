"""Which GPU of a node runs which TP rank of an engine, so that most of its weights are there already. Pure.

In a shared pool a trainer rank and an engine rank are on the same GPU, and what both hold need not travel. The engines
of a node are alike, so only the order of the node's GPUs is free: it is chosen exactly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from math import prod

from megarl.weights.algebra.bundles import bundles
from megarl.weights.algebra.locality import Gpu
from megarl.weights.algebra.slices import ITEM_BYTES, Layout


def nearest_order(source: Layout, engine: Layout, trainer_gpus: Sequence[Gpu], engine_gpus: Sequence[Gpu]) -> list[int]:
    """The order in which engine after engine should take `engine_gpus`, as positions in it.

    `engine` is one engine's layout; `trainer_gpus` has the GPU of every source rank. An engine that does not fit on one
    node, or whose node has no trainer, takes its GPUs as they come.
    """
    tensor = len(engine.holdings)
    shared = _shared_bytes(source, engine)
    ranks_on: defaultdict[Gpu, list[int]] = defaultdict(list)
    for rank, gpu in enumerate(trainer_gpus):
        ranks_on[gpu].append(rank)

    def value(gpu: Gpu) -> tuple[int, ...]:
        """By TP rank: the bytes that are there for it."""
        return tuple(max((shared[rank][part] for rank in ranks_on[gpu]), default=0) for part in range(tensor))

    order: list[int] = []
    for first in range(0, len(engine_gpus), tensor):
        # Engines of one node are assigned together, when its first one is reached.
        node = engine_gpus[first][0]
        places = [place for place in range(first, len(engine_gpus)) if engine_gpus[place][0] == node]
        if len(order) > first:
            continue
        if len(places) % tensor or places != list(range(first, first + len(places))):
            order += range(first, min(first + tensor, len(engine_gpus)))
            continue
        parts = _best_parts(tuple(value(engine_gpus[place]) for place in places), len(places) // tensor)
        takers = {part: [place for place, got in zip(places, parts, strict=True) if got == part] for part in set(parts)}
        order += [takers[part][index] for index in range(len(places) // tensor) for part in range(tensor)]
    return order


def _shared_bytes(source: Layout, engine: Layout) -> list[list[int]]:
    """[source rank, TP rank]: bytes that both hold."""
    table = [[0] * len(engine.holdings) for _ in range(1 + max(holding.rank for holding in source.holdings))]
    for bundle in bundles(source, engine):
        num_bytes = len(bundle.names) * prod(bundle.shape) * ITEM_BYTES[bundle.dtype]
        for rank in bundle.sources:
            for part in bundle.targets:
                table[rank][part] += num_bytes
    return table


@lru_cache(maxsize=64)
def _best_parts(values: tuple[tuple[int, ...], ...], each: int) -> tuple[int, ...]:
    """A part for every GPU, each part `each` times, of the largest sum; of equal ones the first in order."""
    num_parts = len(values[0])
    best: dict[tuple[int, ...], tuple[int, tuple[int, ...]]] = {(0,) * num_parts: (0, ())}
    for gpu in values:
        reached: dict[tuple[int, ...], tuple[int, tuple[int, ...]]] = {}
        for used, (total, parts) in best.items():
            for part in range(num_parts):
                if used[part] == each:
                    continue
                after = (*used[:part], used[part] + 1, *used[part + 1 :])
                found = reached.get(after)
                if found is None or (-(total + gpu[part]), (*parts, part)) < (-found[0], found[1]):
                    reached[after] = (total + gpu[part], (*parts, part))
        best = reached
    ((_, parts),) = best.values()
    return parts
