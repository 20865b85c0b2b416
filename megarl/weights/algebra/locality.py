"""Where the holders of weights run, and the link between two of them. Equal words mean the same place. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

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
