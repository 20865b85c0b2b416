"""What one publish moves: bytes by link, busiest rank, staging, messages, and the floor they can be compared with.

The same planner that the run uses, on a model with one layer per stage and as few experts as it takes to tell ranks
apart: layers of a stage have the same holders, and so have experts of a set; their bytes are counted once and
multiplied. What a rank receives is exact; what one replica sends is, up to a box.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeAlias

from megarl.config.model import ModelShape
from megarl.config.recipe import Recipe
from megarl.planner.hardware import LINK_EFFICIENCY, Gpu
from megarl.planner.memory import repeats
from megarl.planner.placement import Place, Placement
from megarl.weights.buckets import DEFAULT_BUCKET_BYTES
from megarl.weights.canonical import ROUTER, canonical_tensors
from megarl.weights.megatron import ExpertPlace, megatron_layout
from megarl.weights.plan import Plan, plan
from megarl.weights.sglang import sglang_layout
from megarl.weights.slices import ITEM_BYTES


class LinkClass(StrEnum):
    SAME_GPU = "same GPU"
    SAME_NODE = "same node"
    NETWORK = "network"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reshard:
    bytes_by_link: Mapping[LinkClass, int]
    busiest_bytes: int
    """Most that one GPU sends or receives."""
    staging_bytes: int
    """Most that one engine rank holds beside its weights until the version is committed."""
    num_messages: int
    floor_bytes: int
    """What the busiest GPU cannot be below: the neediest engine rank, or an equal share for every trainer rank."""
    seconds: float
    """Of the busiest GPU, over the slowest link in use."""
    floor_s: float
    gathered_bytes: int
    """What would move if every rank of a replica gathered the whole model and every engine rank received all of it."""

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_by_link.values())


def reshard(recipe: Recipe, shape: ModelShape, placement: Placement, gpu: Gpu) -> Reshard:
    """Of one version, from all trainer ranks to all engine ranks."""
    rollout = recipe.roles.rollout
    assert rollout is not None, "nobody to publish to"
    dtype = "float32" if recipe.run.device == "cpu" else "bfloat16"
    parallel = replace(placement.parallel, virtual_pipeline=1, first_stage_layers=None, last_stage_layers=None)
    thin = replace(shape, num_layers=parallel.pipeline)
    experts_each = 1
    if shape.experts is not None:
        num_sets = math.lcm(parallel.expert, rollout.expert)
        experts_each = shape.experts.num // num_sets
        thin = replace(thin, experts=replace(shape.experts, num=num_sets))
    target = sglang_layout(
        thin,
        tensor=rollout.tensor,
        expert=rollout.expert,
        num_engines=placement.num_engines,
        dtype=dtype,
        is_cpu_engine=recipe.run.device == "cpu",
    )
    moves = plan(megatron_layout(thin, parallel, dtype=dtype), target)
    traffic = _Traffic(placement, num_layers=shape.num_layers, experts_each=experts_each)
    traffic.add(moves)
    by_link = traffic.by_link()
    received = max(traffic.received.values())
    floor = max(received, -(-sum(by_link.values()) // parallel.world_size))
    slowest = _rate(gpu, max((link for link, size in by_link.items() if size), key=list(LinkClass).index))
    model_bytes = sum(spec.num_bytes for spec in canonical_tensors(replace(shape, dtype=dtype)).values())
    model_parallel = parallel.tensor * parallel.pipeline
    return Reshard(
        bytes_by_link=by_link,
        busiest_bytes=traffic.busiest_bytes,
        staging_bytes=received,
        num_messages=traffic.num_messages,
        floor_bytes=floor,
        seconds=traffic.busiest_bytes / slowest,
        floor_s=floor / slowest,
        gathered_bytes=model_bytes * (model_parallel - 1 + len(placement.engine_ranks)),
    )


_Ranks: TypeAlias = tuple[int, ...]
"""Trainer ranks that hold the same, and share what is asked of them in equal parts, up to a box."""


class _Traffic:
    """Sums over the moves of a thin plan, with layers and experts counted as often as the whole model has them."""

    def __init__(self, placement: Placement, *, num_layers: int, experts_each: int) -> None:
        self._placement = placement
        parallel = placement.parallel
        self._layers = [
            sum(
                len(parallel.chunk_layers(num_layers, stage=stage, chunk=chunk))
                for chunk in range(parallel.virtual_pipeline)
            )
            for stage in range(parallel.pipeline)
        ]
        self._experts_each = experts_each
        self._dense, self._expert = _replicas(placement)
        self.received: defaultdict[int, int] = defaultdict(int)
        self._asked: defaultdict[_Ranks, int] = defaultdict(int)
        self._flows: defaultdict[tuple[_Ranks, int], _Flow] = defaultdict(_Flow)

    def add(self, moves: Plan) -> None:
        for move in moves.moves:
            name = move.slice.name
            is_expert = ".experts." in name
            source = self._placement.ranks[move.source_rank]
            times = repeats(name, self._layers[source.pipeline])
            # The router has a row per expert.
            times *= self._experts_each if is_expert or name.endswith(ROUTER) else 1
            num_bytes = times * move.slice.num_elements * ITEM_BYTES[moves.dtype_of(move)]
            self.received[move.target_rank] += num_bytes
            ranks = (self._expert if is_expert else self._dense)[move.source_rank]
            self._asked[ranks] += num_bytes
            flow = self._flows[ranks, move.target_rank]
            flow.num_bytes += num_bytes
            flow.num_boxes += times

    def by_link(self) -> dict[LinkClass, int]:
        totals = dict.fromkeys(LinkClass, 0)
        for (ranks, target), flow in self._flows.items():
            place = self._placement.engine_ranks[target].place
            for index, rank in enumerate(ranks):
                # The parts of a number that does not divide still add up to it.
                link = _link(self._placement.ranks[rank].place, place)
                totals[link] += (flow.num_bytes + index) // len(ranks)
        return totals

    @property
    def busiest_bytes(self) -> int:
        """Most that one GPU sends or receives."""
        sent: defaultdict[int, int] = defaultdict(int)
        for ranks, num_bytes in self._asked.items():
            for rank in ranks:
                sent[rank] += -(-num_bytes // len(ranks))
        return max(*sent.values(), *self.received.values())

    @property
    def num_messages(self) -> int:
        """Each sender fills buckets of its own for each engine rank."""
        owed: defaultdict[tuple[int, int], int] = defaultdict(int)
        for (ranks, target), flow in self._flows.items():
            senders = ranks[: flow.num_boxes]
            for rank in senders:
                owed[rank, target] += -(-flow.num_bytes // len(senders))
        return sum(-(-num_bytes // DEFAULT_BUCKET_BYTES) for num_bytes in owed.values())


def _replicas(placement: Placement) -> tuple[list[_Ranks], list[_Ranks]]:
    """Per trainer rank: who holds the same of what is not in experts, and who the same of its experts."""
    parallel = placement.parallel
    dense: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    expert: defaultdict[tuple[int, ExpertPlace], list[int]] = defaultdict(list)
    for rank in placement.ranks:
        dense[rank.pipeline, rank.tensor].append(rank.rank)
        expert[rank.pipeline, parallel.expert_place(tensor=rank.tensor, data=rank.data)].append(rank.rank)
    dense_ranks = {key: tuple(ranks) for key, ranks in dense.items()}
    expert_ranks = {key: tuple(ranks) for key, ranks in expert.items()}
    return (
        [dense_ranks[rank.pipeline, rank.tensor] for rank in placement.ranks],
        [
            expert_ranks[rank.pipeline, parallel.expert_place(tensor=rank.tensor, data=rank.data)]
            for rank in placement.ranks
        ],
    )


@dataclass(slots=True)
class _Flow:
    """From ranks that hold the same to one engine rank."""

    num_bytes: int = 0
    num_boxes: int = 0


def _link(source: Place, target: Place) -> LinkClass:
    if source == target:
        return LinkClass.SAME_GPU
    return LinkClass.SAME_NODE if source.node == target.node else LinkClass.NETWORK


def _rate(gpu: Gpu, link: LinkClass) -> float:
    """Bytes per second."""
    rates = {
        LinkClass.SAME_GPU: gpu.memory_gb_per_s / 2,  # each byte is read and written
        LinkClass.SAME_NODE: gpu.node_gb_per_s,
        LinkClass.NETWORK: gpu.network_gb_per_s,
    }
    return rates[link] * 1e9 * LINK_EFFICIENCY
