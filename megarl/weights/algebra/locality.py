"""Where the holders of weights run, and the link between two of them. Equal words mean the same place. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import TypeAlias

from megarl.weights.algebra.bundles import bundles
from megarl.weights.algebra.slices import Layout


class Link(IntEnum):
    """The link that a move travels over, nearest first."""

    PROCESS = 0
    DEVICE = 1
    NODE = 2
    NETWORK = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """The place of one rank. Names of devices and processes are unique over all nodes."""

    node: str
    device: str
    process: str

    def link(self, other: Location) -> Link:
        if self.process == other.process:
            return Link.PROCESS
        if self.device == other.device:
            return Link.DEVICE
        return Link.NODE if self.node == other.node else Link.NETWORK


@dataclass(frozen=True, kw_only=True)
class Locations:
    """The location of every rank of both sides."""

    sources: Mapping[int, Location]
    targets: Mapping[int, Location]


Gpu: TypeAlias = tuple[int, int]
"""Numbers of a node, and of a GPU in it."""


def apart(source: Layout, target: Layout) -> Locations:
    """Put every rank on a node of its own."""
    return _alone(source, target, "source", "target")


def same_processes(source: Layout, target: Layout) -> Locations:
    """Put source rank r and target rank r into one process, each pair on a node of its own."""
    return _alone(source, target, "rank", "rank")


def _alone(source: Layout, target: Layout, source_word: str, target_word: str) -> Locations:
    def location(name: str) -> Location:
        return Location(node=name, device=name, process=name)

    return Locations(
        sources={holding.rank: location(f"{source_word} {holding.rank}") for holding in source.holdings},
        targets={holding.rank: location(f"{target_word} {holding.rank}") for holding in target.holdings},
    )


def on_gpus(sources: Sequence[Gpu], targets: Sequence[Gpu]) -> Locations:
    """Put rank r of each side into a process of its own on the r-th of these GPUs."""

    def location(gpu: Gpu, process: str) -> Location:
        node, number = gpu
        return Location(node=f"node {node}", device=f"node {node} gpu {number}", process=process)

    return Locations(
        sources={rank: location(gpu, f"source {rank}") for rank, gpu in enumerate(sources)},
        targets={rank: location(gpu, f"target {rank}") for rank, gpu in enumerate(targets)},
    )


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
    """Return a TP rank for every GPU, each `num_engines` times, so that the sum of their values is largest.

    The assignment problem by shortest augmenting paths: exact, in integers, and cubic in the GPUs of a node.
    """
    size = len(values)
    prices, wins, holders = [0] * size, [0] * size, [-1] * size  # of slots, of GPUs, and the GPU of each slot
    for gpu in range(size):
        gaps: list[float] = [math.inf] * size
        before, seen, slot, taker = [-1] * size, [False] * size, -1, gpu
        while taker >= 0:
            for other in (other for other in range(size) if not seen[other]):
                gap = -values[taker][other // num_engines] - wins[taker] - prices[other]
                if gap < gaps[other]:
                    gaps[other], before[other] = gap, slot
            nearest = min((other for other in range(size) if not seen[other]), key=gaps.__getitem__)
            step = int(gaps[nearest])
            wins[gpu] += step
            for other in range(size):
                if seen[other]:
                    wins[holders[other]] += step
                    prices[other] -= step
                else:
                    gaps[other] -= step
            seen[nearest], slot, taker = True, nearest, holders[nearest]
        while slot >= 0:
            holders[slot] = holders[before[slot]] if before[slot] >= 0 else gpu
            slot = before[slot]
    return tuple(holders.index(gpu) // num_engines for gpu in range(size))
