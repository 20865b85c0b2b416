"""What one publish moves and how long that takes: the run's own plan, on the run's own layouts and placement.

Seconds are a model from stated link rates: what the busiest GPU does over one kind of link after the other, though a
run does much of it at the same time, and the copies into and out of buckets. The floor is what no plan can be below
with these layouts and this placement, at the full rate of the links.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from megarl.config.model import ModelShape
from megarl.config.recipe import Recipe
from megarl.planner.hardware import LINK_EFFICIENCY, GpuModel
from megarl.planner.placement import Placement, PlannedPlace
from megarl.weights.algebra.buckets import DEFAULT_BUCKET_BYTES, staging_bound
from megarl.weights.algebra.locality import Gpu as GpuNumber
from megarl.weights.algebra.locality import Link, nearest_order, on_gpus
from megarl.weights.algebra.plan import Plan, plan
from megarl.weights.algebra.routing import giver_location
from megarl.weights.algebra.slices import Layout
from megarl.weights.layouts.canonical import canonical_tensors
from megarl.weights.layouts.megatron import megatron_layout
from megarl.weights.layouts.sglang import sglang_layout


class LinkClass(StrEnum):
    SAME_GPU = "same GPU"
    SAME_NODE = "same node"
    NETWORK = "network"


_CLASSES: Mapping[Link, LinkClass] = {
    Link.DEVICE: LinkClass.SAME_GPU,
    Link.NODE: LinkClass.SAME_NODE,
    Link.NETWORK: LinkClass.NETWORK,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reshard:
    bytes_by_link: Mapping[LinkClass, int]
    busiest_bytes: Mapping[LinkClass, int]
    """Most that one GPU sends or receives over each kind of link."""
    staging_bytes: int
    """A bound on what one engine rank holds beside its weights until the version is committed."""
    num_messages: int
    num_hops: int
    """The longest way of a byte."""
    floor_bytes: Mapping[LinkClass, int]
    """What `busiest_bytes` cannot be below."""
    seconds: float
    floor_s: float
    gathered_bytes: int
    """What would move if every rank of a replica gathered the whole model and every engine rank received all of it."""
    hash: str

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_by_link.values())


def reshard(recipe: Recipe, shape: ModelShape, placement: Placement, gpu: GpuModel) -> Reshard:
    """Of one version, from all trainer ranks to all engine ranks."""
    whole = publish_plan(recipe, shape, placement)
    load = _Load(whole, placement)
    received = whole.traffic.received_bytes
    neediest = max(received, key=lambda rank: (received[rank], -rank))
    bytes_by_link = {_CLASSES[link]: whole.traffic.bytes_by_link.get(link, 0) for link in _CLASSES}
    parallel = placement.parallel
    return Reshard(
        bytes_by_link=bytes_by_link,
        busiest_bytes=load.busiest,
        staging_bytes=staging_bound(
            whole, neediest, bucket_bytes=DEFAULT_BUCKET_BYTES, shares_device=placement.is_shared
        ),
        num_messages=load.num_messages,
        num_hops=whole.num_hops,
        floor_bytes=load.floor,
        seconds=sum(load.busiest[link] / (_rate(gpu, link) * LINK_EFFICIENCY) for link in LinkClass)
        + load.copied_bytes / (_rate(gpu, LinkClass.SAME_GPU) * LINK_EFFICIENCY),
        floor_s=max(load.floor[link] / _rate(gpu, link) for link in LinkClass),
        gathered_bytes=_model_bytes(recipe, shape)
        * (parallel.tensor * parallel.pipeline - 1 + len(placement.engine_ranks)),
        hash=whole.hash,
    )


def publish_plan(recipe: Recipe, shape: ModelShape, placement: Placement) -> Plan:
    """The plan that the run would carry out if its pools are placed as `placement` says."""
    rollout = recipe.roles.rollout
    assert rollout is not None, "nobody to publish to"
    source = megatron_layout(shape, placement.parallel, dtype=recipe.run.dtype)

    def engines(count: int) -> Layout:
        return sglang_layout(
            shape,
            tensor=rollout.tensor,
            expert=rollout.expert,
            num_engines=count,
            dtype=recipe.run.dtype,
            is_cpu_engine=recipe.run.device == "cpu",
        )

    numbers = _node_numbers(placement)
    trainer_gpus = [_number(rank.place, numbers) for rank in placement.ranks]
    engine_gpus = [_number(rank.place, numbers) for rank in placement.engine_ranks]
    if placement.is_shared:
        order = nearest_order(source, engines(1), trainer_gpus, engine_gpus)
        engine_gpus = [engine_gpus[place] for place in order]
    locations = on_gpus(trainer_gpus, engine_gpus)
    return plan(source, engines(placement.num_engines), locations=locations, relays=rollout.relays_weights)


class _Load:
    """What GPUs and nodes do in one publish."""

    def __init__(self, whole: Plan, placement: Placement) -> None:
        self._plan = whole
        self._is_shared = placement.is_shared
        locations, traffic = whole.locations, whole.traffic
        self.busiest = dict.fromkeys(LinkClass, 0)
        self.floor = dict.fromkeys(LinkClass, 0)
        self.copied_bytes = 0
        """Most that one GPU packs, or writes from its staging into its weights."""
        copied: defaultdict[str, int] = defaultdict(int)
        num_on = _counted(location.node for location in locations.targets.values())
        for link, kind in _CLASSES.items():
            sent: defaultdict[str, int] = defaultdict(int)
            received: defaultdict[str, int] = defaultdict(int)
            into: defaultdict[str, int] = defaultdict(int)
            for rank, num_bytes in traffic.sent[link].items():
                sent[locations.sources[rank].device] += num_bytes
            for rank, num_bytes in traffic.forwarded[link].items():
                sent[locations.targets[rank].device] += num_bytes
            for rank, num_bytes in traffic.received[link].items():
                received[locations.targets[rank].device] += num_bytes
                into[locations.targets[rank].node] += num_bytes
            self.busiest[kind] = max((*sent.values(), *received.values()), default=0)
            shares = [-(-num_bytes // num_on[node]) for node, num_bytes in into.items()]
            if link is Link.NETWORK:
                shares.append(-(-sum(traffic.sent[link].values()) // len(locations.sources)))
            self.floor[kind] = max(shares, default=0)
            if link is not Link.DEVICE:
                for table in (sent, received):
                    for device, num_bytes in table.items():
                        copied[device] += num_bytes
        self.copied_bytes = max(copied.values(), default=0)

    @property
    def num_messages(self) -> int:
        """Each giver fills buckets of its own for each engine rank."""
        locations = self._plan.locations
        num_messages = 0
        for (giver, target), num_bytes in self._plan.traffic.between.items():
            link = giver_location(giver, locations).link(locations.targets[target])
            if not (self._is_shared and link is Link.DEVICE):
                num_messages += -(-num_bytes // DEFAULT_BUCKET_BYTES)
        return num_messages


def _counted(words: Iterable[str]) -> dict[str, int]:
    counts: defaultdict[str, int] = defaultdict(int)
    for word in words:
        counts[word] += 1
    return counts


def _node_numbers(placement: Placement) -> dict[str, int]:
    return {node: number for number, node in enumerate(dict.fromkeys(place.node for place in placement.places))}


def _number(place: PlannedPlace, numbers: Mapping[str, int]) -> GpuNumber:
    return numbers[place.node], place.gpu


def _model_bytes(recipe: Recipe, shape: ModelShape) -> int:
    return sum(spec.num_bytes for spec in canonical_tensors(replace(shape, dtype=recipe.run.dtype)).values())


def _rate(gpu: GpuModel, link: LinkClass) -> float:
    """Bytes per second."""
    rates = {
        LinkClass.SAME_GPU: gpu.memory_gb_per_s / 2,  # each byte is read and written
        LinkClass.SAME_NODE: gpu.node_gb_per_s,
        LinkClass.NETWORK: gpu.network_gb_per_s,
    }
    return rates[link] * 1e9
