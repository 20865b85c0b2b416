"""What one publish moves: bytes by link, busiest rank, staging, messages, and the floor they can be compared with.

The same planner that the run uses, on a model with one layer per stage: layers of a stage have the same holders, so
their bytes are counted once and multiplied. What a rank receives is exact; which replica sends it may differ by a box.
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
from megarl.weights.plan import Move, Plan, plan
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
    """Of the busiest GPU, over the slowest link that it uses."""
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
        num_engines=placement.num_engines,
        dtype=dtype,
        is_cpu_engine=recipe.run.device == "cpu",
    )
    moves = plan(megatron_layout(thin, parallel, dtype=dtype), target)
    traffic = _Traffic(placement, layers_per_stage=shape.num_layers // parallel.pipeline)
    traffic.add(moves)
    received = max(traffic.received.values())
    total = sum(traffic.by_link.values())
    floor = max(received, -(-total // parallel.world_size))
    busiest, link = traffic.busiest()
    model_bytes = sum(spec.num_bytes for spec in canonical_tensors(replace(shape, dtype=dtype)).values())
    model_parallel = parallel.tensor * parallel.pipeline
    return Reshard(
        bytes_by_link={name: traffic.by_link[name] for name in LinkClass},
        busiest_bytes=busiest,
        staging_bytes=received,
        num_messages=traffic.num_messages(data_parallel=parallel.data),
        floor_bytes=floor,
        seconds=busiest / _rate(gpu, link),
        floor_s=floor / _rate(gpu, link),
        gathered_bytes=model_bytes * (model_parallel - 1 + len(placement.engine_ranks)),
    )


class _Traffic:
    """Sums over the moves of a thin plan, with layers counted as often as the whole model has them."""

    def __init__(self, placement: Placement, *, layers_per_stage: int) -> None:
        self._placement = placement
        self._layers = layers_per_stage
        self.by_link: defaultdict[LinkClass, int] = defaultdict(int)
        self.received: defaultdict[int, int] = defaultdict(int)
        self._sent: defaultdict[int, int] = defaultdict(int)
        self._slowest: defaultdict[str, LinkClass] = defaultdict(lambda: LinkClass.SAME_GPU)
        self._pairs: defaultdict[tuple[int, int, int], list[int]] = defaultdict(lambda: [0, 0])

    def add(self, moves: Plan) -> None:
        for move in moves.moves:
            times = repeats(move.slice.name, self._layers)
            num_bytes = times * move.slice.num_elements * ITEM_BYTES[moves.dtype_of(move)]
            self._add(move, num_bytes, times)

    def _add(self, move: Move, num_bytes: int, times: int) -> None:
        source = self._placement.ranks[move.source_rank]
        link = _link(source.place, self._placement.engine_ranks[move.target_rank].place)
        self.by_link[link] += num_bytes
        self._sent[move.source_rank] += num_bytes
        self.received[move.target_rank] += num_bytes
        for end in (f"rank {move.source_rank}", f"engine rank {move.target_rank}"):
            self._slowest[end] = max(self._slowest[end], link, key=list(LinkClass).index)
        pair = self._pairs[source.tensor, source.pipeline, move.target_rank]
        pair[0] += num_bytes
        pair[1] += times

    def busiest(self) -> tuple[int, LinkClass]:
        """Bytes of the busiest end, and the slowest link at it."""
        ends = [(num_bytes, f"rank {rank}") for rank, num_bytes in self._sent.items()]
        ends += [(num_bytes, f"engine rank {rank}") for rank, num_bytes in self.received.items()]
        num_bytes, end = max(ends)
        return num_bytes, self._slowest[end]

    def num_messages(self, *, data_parallel: int) -> int:
        """Replicas share what a target needs of their slices; each fills buckets of its own."""
        count = 0
        for num_bytes, num_boxes in self._pairs.values():
            senders = min(data_parallel, num_boxes)
            count += senders * -(-num_bytes // (senders * BUCKET_BYTES))
        return count


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
