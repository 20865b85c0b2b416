"""What one publish moves: bytes by link, busiest rank, staging, messages, and the floor they can be compared with.

The same planner that the run uses, on a model with one layer per stage: layers of a stage have the same holders, so
their bytes are counted once and multiplied. What a rank receives is exact; what one replica sends is, up to a box.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from megarl.config.model import ModelShape
from megarl.config.recipe import Recipe
from megarl.planner.hardware import LINK_EFFICIENCY, Gpu
from megarl.planner.memory import repeats
from megarl.planner.placement import Place, Placement
from megarl.weights.canonical import canonical_tensors
from megarl.weights.megatron import megatron_layout
from megarl.weights.plan import Plan, plan
from megarl.weights.sglang import sglang_layout
from megarl.weights.slices import ITEM_BYTES

BUCKET_BYTES = 64 << 20


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
    parallel = replace(placement.parallel, virtual_pipeline=1)
    thin = replace(shape, num_layers=parallel.pipeline)
    target = sglang_layout(
        thin,
        tensor=rollout.tensor,
        expert=rollout.expert,
        num_engines=placement.num_engines,
        dtype=dtype,
        is_cpu_engine=recipe.run.device == "cpu",
    )
    moves = plan(megatron_layout(thin, parallel, dtype=dtype), target)
    traffic = _Traffic(placement, layers_per_stage=shape.num_layers // parallel.pipeline)
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


class _Traffic:
    """Sums over the moves of a thin plan, with layers counted as often as the whole model has them.

    Data-parallel replicas hold the same and share what is asked of them, in equal parts up to a box.
    """

    def __init__(self, placement: Placement, *, layers_per_stage: int) -> None:
        self._placement = placement
        self._layers = layers_per_stage
        self.received: defaultdict[int, int] = defaultdict(int)
        self._asked: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._flows: defaultdict[tuple[int, int, int], _Flow] = defaultdict(_Flow)

    def add(self, moves: Plan) -> None:
        for move in moves.moves:
            times = repeats(move.slice.name, self._layers)
            num_bytes = times * move.slice.num_elements * ITEM_BYTES[moves.dtype_of(move)]
            source = self._placement.ranks[move.source_rank]
            self.received[move.target_rank] += num_bytes
            self._asked[source.tensor, source.pipeline] += num_bytes
            flow = self._flows[source.tensor, source.pipeline, move.target_rank]
            flow.num_bytes += num_bytes
            flow.num_boxes += times

    def by_link(self) -> dict[LinkClass, int]:
        totals = dict.fromkeys(LinkClass, 0)
        for (tensor, pipeline, target), flow in self._flows.items():
            place = self._placement.engine_ranks[target].place
            links = [_link(source, place) for source in self._replicas(tensor, pipeline)]
            for index, link in enumerate(links):
                # The parts of a number that does not divide still add up to it.
                totals[link] += (flow.num_bytes + index) // len(links)
        return totals

    @property
    def busiest_bytes(self) -> int:
        """Most that one GPU sends or receives."""
        sent = -(-max(self._asked.values()) // self._placement.parallel.data)
        return max(sent, *self.received.values())

    @property
    def num_messages(self) -> int:
        """Each replica fills buckets of its own."""
        count = 0
        for flow in self._flows.values():
            senders = min(self._placement.parallel.data, flow.num_boxes)
            count += senders * -(-flow.num_bytes // (senders * BUCKET_BYTES))
        return count

    def _replicas(self, tensor: int, pipeline: int) -> list[Place]:
        parallel = self._placement.parallel
        ranks = (parallel.rank(tensor=tensor, data=data, pipeline=pipeline) for data in range(parallel.data))
        return [self._placement.ranks[rank].place for rank in ranks]


@dataclass(slots=True)
class _Flow:
    """From the replicas of one share of the model to one engine rank."""

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
