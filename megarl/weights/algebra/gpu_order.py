"""Which GPU of a node runs which TP rank of an engine in a shared pool, so that few weights have to travel. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

from megarl.weights.algebra.bundles import bundles
from megarl.weights.algebra.locality import Gpu
from megarl.weights.algebra.slices import Layout


def nearest_order(source: Layout, engine: Layout, trainer_gpus: Sequence[Gpu], engine_gpus: Sequence[Gpu]) -> list[int]:
    """Return the order in which engine after engine takes `engine_gpus`, as positions in it.

    Each TP rank finds as many of its bytes as possible on its own GPU. The engines of a node are alike, so only the
    order of the node's GPUs is free: it is chosen exactly. `engine` is one engine's layout; `trainer_gpus` has the GPU
    of every source rank. An engine that does not fit on one node, or whose node has no trainer, keeps the given order.
    """
    tensor = len(engine.holdings)
    common_bytes = _common_bytes(source, engine)
    ranks_on: defaultdict[Gpu, list[int]] = defaultdict(list)
    for rank, gpu in enumerate(trainer_gpus):
        ranks_on[gpu].append(rank)

    def bytes_on(gpu: Gpu) -> tuple[int, ...]:
        """Return per TP rank the bytes that a trainer rank on `gpu` holds."""
        return tuple(max((common_bytes[rank][tp] for rank in ranks_on[gpu]), default=0) for tp in range(tensor))

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
        num_engines = len(places) // tensor
        tp_ranks = _best_tp_ranks(tuple(bytes_on(engine_gpus[place]) for place in places), num_engines)
        takers: list[list[int]] = [[] for _ in range(tensor)]
        for place, tp in zip(places, tp_ranks, strict=True):
            takers[tp].append(place)
        order += [takers[tp][index] for index in range(num_engines) for tp in range(tensor)]
    return order


def _common_bytes(source: Layout, engine: Layout) -> list[list[int]]:
    """Return [source rank, TP rank]: the bytes that both hold."""
    table = [[0] * len(engine.holdings) for _ in range(1 + max(holding.rank for holding in source.holdings))]
    for bundle in bundles(source, engine):
        for rank in bundle.sources:
            for tp in bundle.targets:
                table[rank][tp] += len(bundle.names) * bundle.box_bytes
    return table


@lru_cache(maxsize=64)
def _best_tp_ranks(values: tuple[tuple[int, ...], ...], num_engines: int) -> tuple[int, ...]:
    """Return a TP rank for every GPU, each `num_engines` times, so that the sum is largest; the first of equal ones."""
    num_ranks = len(values[0])
    best: dict[tuple[int, ...], tuple[int, tuple[int, ...]]] = {(0,) * num_ranks: (0, ())}
    for gpu in values:
        reached: dict[tuple[int, ...], tuple[int, tuple[int, ...]]] = {}
        for used, (total, chosen) in best.items():
            for tp in range(num_ranks):
                if used[tp] == num_engines:
                    continue
                after = (*used[:tp], used[tp] + 1, *used[tp + 1 :])
                candidate = total + gpu[tp], (*chosen, tp)
                known = reached.get(after)
                if known is None or (-candidate[0], candidate[1]) < (-known[0], known[1]):
                    reached[after] = candidate
        best = reached
    ((_, chosen),) = best.values()
    return chosen
