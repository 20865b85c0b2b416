"""Where the holders of weights run, and what lies between two of them. Pure.

Equal words mean the same place. A plan needs no more to prefer near sources and to let each byte enter a node once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

from megarl.weights.algebra.slices import Layout


class Link(IntEnum):
    """What a move travels over, nearest first."""

    PROCESS = 0
    DEVICE = 1
    NODE = 2
    NETWORK = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """Of one rank. Words below `node` are unique over all nodes."""

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
    """By rank, of both sides."""

    sources: Mapping[int, Location]
    targets: Mapping[int, Location]


Gpu: TypeAlias = tuple[int, int]
"""Numbers of a node, and of a GPU in it."""


def apart(source: Layout, target: Layout) -> Locations:
    """Every rank is a process on a node of its own."""
    return Locations(
        sources={holding.rank: _lone(f"source {holding.rank}") for holding in source.holdings},
        targets={holding.rank: _lone(f"target {holding.rank}") for holding in target.holdings},
    )


def same_processes(source: Layout, target: Layout) -> Locations:
    """Source rank r and target rank r are one process; every other one is on another node."""
    return Locations(
        sources={holding.rank: _lone(f"rank {holding.rank}") for holding in source.holdings},
        targets={holding.rank: _lone(f"rank {holding.rank}") for holding in target.holdings},
    )


def on_gpus(sources: Sequence[Gpu], targets: Sequence[Gpu]) -> Locations:
    """Rank r of each side is a process of its own on the r-th of these GPUs."""
    return Locations(
        sources={rank: _on_gpu(gpu, f"source {rank}") for rank, gpu in enumerate(sources)},
        targets={rank: _on_gpu(gpu, f"target {rank}") for rank, gpu in enumerate(targets)},
    )


def _on_gpu(gpu: Gpu, process: str) -> Location:
    node, number = gpu
    return Location(node=f"node {node}", device=f"node {node} gpu {number}", process=process)


def _lone(word: str) -> Location:
    return Location(node=word, device=word, process=word)
