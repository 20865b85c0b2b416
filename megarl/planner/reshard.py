"""Traffic and time of one publish, from the run's own plan on its own layouts and placement.

Seconds are modelled from stated link rates: the transfers of the busiest GPU, one kind of link after the other, the
copies into and out of buckets of what crosses nodes, and a time per round. An engine rank reads the memory of trainer
ranks on its own node in place. The floor is the least time of any plan with these layouts and this placement, at the
full rate of the links.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from megarl.config.section import dtype_on
from megarl.planner.deployment import Deployment, GpuPlace, Placement, PublishWay
from megarl.planner.hardware import GLOO_GB_PER_S, LINK_EFFICIENCY, ROUND_S, GpuModel
from megarl.planner.memory import PUBLISH_COMMUNICATOR_BYTES
from megarl.weights.algebra.buckets import (
    DEFAULT_BUCKET_BYTES,
    PeerNumbers,
    buckets_forwarded_by,
    buckets_from,
    buckets_to,
    rounds,
    staging_bound,
)
from megarl.weights.algebra.plan import Plan, giver_location, plan
from megarl.weights.algebra.routing import forwarder, nearest_order
from megarl.weights.algebra.slices import Gpu as GpuNumber
from megarl.weights.algebra.slices import Layout, Link, on_gpus
from megarl.weights.layouts.canonical import canonical_tensors
from megarl.weights.layouts.fp8 import fp8_engine_layout, fp8_trainer_layout
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
    """Most bytes that one GPU sends or receives over each kind of link."""
    way: PublishWay
    """The way of the bytes that engine ranks do not read from the memory of trainer ranks."""
    staging_bytes: int
    """Upper bound on what one engine rank holds beside its weights: a bucket that arrives and one that leaves."""
    communicator_bytes: int
    """GPU memory of the communicator in each trainer and engine rank; 0 without one."""
    host_bytes: int
    """Pinned host memory of one rank; 0 unless `way` is host."""
    num_rounds: int
    """Rounds of the busiest rank: in each it sends at most one bucket and receives at most one."""
    num_messages: int
    num_hops: int
    """Hops of the longest route."""
    floor_bytes: Mapping[LinkClass, int]
    """Lower bound of `busiest_bytes`."""
    seconds: float
    floor_s: float
    gathered_bytes: int
    """Bytes that would move if every rank of a replica gathered the model and every engine rank received all of it."""
    hash: str

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_by_link.values())


def reshard(deployment: Deployment) -> Reshard:
    """Return the traffic of one version, from all trainer ranks to all engine ranks."""
    placement = deployment.placement
    whole = publish_plan(deployment)
    direct = _direct(deployment)
    load = _Load(whole, direct)
    received = whole.traffic.received_bytes
    neediest = max(received, key=lambda rank: (received[rank], -rank))
    sends = any(whole.traffic.received[link] for link in Link if link > direct)
    way = PublishWay.MEMORY if not sends else PublishWay.NCCL
    if sends and (deployment.device == "cpu" or placement.is_shared):
        way = PublishWay.HOST
    parallel = placement.parallel
    lanes_bytes = staging_bound(whole, neediest, bucket_bytes=DEFAULT_BUCKET_BYTES, direct=direct)
    return Reshard(
        bytes_by_link={_CLASSES[link]: whole.traffic.bytes_by_link.get(link, 0) for link in _CLASSES},
        busiest_bytes=load.busiest,
        way=way,
        staging_bytes=lanes_bytes,
        communicator_bytes=PUBLISH_COMMUNICATOR_BYTES if way is PublishWay.NCCL else 0,
        host_bytes=lanes_bytes if way is PublishWay.HOST else 0,
        num_rounds=load.num_rounds,
        num_messages=load.num_messages,
        num_hops=whole.num_hops,
        floor_bytes=load.floor,
        seconds=_seconds(load, deployment.gpu, way),
        floor_s=max(load.floor[link] / _rate(deployment.gpu, link) for link in LinkClass),
        gathered_bytes=_model_bytes(deployment)
        * (parallel.tensor * parallel.pipeline - 1 + len(placement.engine_ranks)),
        hash=whole.hash,
    )


def draft_reshard(deployment: Deployment) -> Reshard | None:
    """Return the traffic from the drafter's ranks to the drafts of all engines; None where no draft learns."""
    drafter, rollout = deployment.models.get("drafter"), deployment.roles.rollout
    if drafter is None or rollout is None:
        return None
    expert = rollout.expert if drafter.work.shape.experts is not None else 1
    roles = deployment.roles.model_copy(update={"rollout": rollout.model_copy(update={"expert": expert})})
    models = {**deployment.models, "actor": drafter}
    placement = replace(deployment.placement, models={**deployment.placement.models, "actor": drafter.placement})
    return reshard(replace(deployment, roles=roles, models=models, placement=placement))


def _direct(deployment: Deployment) -> Link:
    """Return the farthest link over which engine ranks read the memory of trainer ranks, as the run decides it."""
    if deployment.device != "cpu":
        return Link.NODE
    return Link.DEVICE if deployment.placement.is_shared else Link.PROCESS


def _seconds(load: _Load, gpu: GpuModel, way: PublishWay) -> float:
    network_s = load.busiest[LinkClass.NETWORK] / (_rate(gpu, LinkClass.NETWORK) * LINK_EFFICIENCY)
    if way is PublishWay.HOST:
        network_s = load.busiest[LinkClass.NETWORK] / (GLOO_GB_PER_S * 1e9)
    near_s = sum(
        load.busiest[link] / (_rate(gpu, link) * LINK_EFFICIENCY) for link in LinkClass if link is not LinkClass.NETWORK
    )
    copies_s = load.copied_bytes / (_rate(gpu, LinkClass.SAME_GPU) * LINK_EFFICIENCY)
    return near_s + network_s + copies_s + load.num_rounds * ROUND_S


def publish_plan(deployment: Deployment) -> Plan:
    """Return the plan that the run carries out if its pools are placed as in the deployment."""
    rollout, placement = deployment.roles.rollout, deployment.placement
    assert rollout is not None, "no engine to publish to"
    shape, dtype = deployment.models["actor"].work.shape, dtype_on(deployment.device)
    source = megatron_layout(shape, placement.parallel, dtype=dtype)
    if rollout.fp8_keep is not None:
        source = fp8_trainer_layout(source, rollout.fp8_keep)

    def engines(count: int) -> Layout:
        layout = sglang_layout(
            shape,
            tensor=rollout.tensor,
            expert=rollout.expert,
            num_engines=count,
            dtype=dtype,
            is_cpu_engine=deployment.device == "cpu",
        )
        return layout if rollout.fp8_keep is None else fp8_engine_layout(layout, shape, rollout.fp8_keep)

    numbers = _node_numbers(placement)
    trainer_gpus = [_number(rank.place, numbers) for rank in placement.ranks]
    engine_gpus = [_number(rank.place, numbers) for rank in placement.engine_ranks]
    if placement.is_shared:
        order = nearest_order(source, engines(1), trainer_gpus, engine_gpus)
        engine_gpus = [engine_gpus[place] for place in order]
    locations = on_gpus(trainer_gpus, engine_gpus)
    return plan(source, engines(placement.num_engines), locations=locations, relays=rollout.relays_weights)


class _Load:
    """Bytes that GPUs and nodes send, receive and copy in one publish."""

    def __init__(self, whole: Plan, direct: Link) -> None:
        self._plan = whole
        locations, traffic = whole.locations, whole.traffic
        self.busiest = dict.fromkeys(LinkClass, 0)
        self.floor = dict.fromkeys(LinkClass, 0)
        self.copied_bytes = 0
        """Most bytes that one GPU packs into buckets, or writes from buckets into its weights."""
        self.num_messages = 0
        """Number of buckets; each sender fills its own for each engine rank."""
        self.num_rounds = 0
        num_on = Counter(location.node for location in locations.targets.values())
        for link, kind in _CLASSES.items():
            sent, received, into = Counter[str](), Counter[str](), Counter[str]()
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
        self._count_buckets(direct)

    def _count_buckets(self, direct: Link) -> None:
        """Count what travels in buckets: all that a target does not read from the memory of a source."""
        locations = self._plan.locations
        copied, from_source, at_target = Counter[str](), Counter[int](), Counter[int]()
        num_filled = 0
        for (sender, target), num_bytes in self._plan.traffic.between.items():
            location = giver_location(sender, locations)
            if sender >= 0 and location.link(locations.targets[target]) <= direct:
                continue
            num_buckets = -(-num_bytes // DEFAULT_BUCKET_BYTES)
            num_filled += num_buckets
            at_target[target] += num_buckets
            if sender >= 0:
                from_source[sender] += num_buckets
            else:
                at_target[forwarder(sender)] += num_buckets
            copied[location.device] += num_bytes
            copied[locations.targets[target].device] += num_bytes
        self.copied_bytes = max(copied.values(), default=0)
        if not num_filled:
            return
        # Boxes do not fill buckets to the brim. Those of all ranks take long to pack; those of the busiest tell.
        ((target, filled),) = at_target.most_common(1)
        self.num_rounds, packed = self._rounds_of_target(target, direct)
        for source, _ in from_source.most_common(1):
            self.num_rounds = max(self.num_rounds, self._num_sent_by(source, direct))
        self.num_messages = round(num_filled * packed / filled)

    def _rounds_of_target(self, target: int, direct: Link) -> tuple[int, int]:
        """Return the rounds of an engine rank, and the buckets that it receives and forwards."""
        whole, bucket_bytes = self._plan, DEFAULT_BUCKET_BYTES
        arriving = buckets_to(whole, target, bucket_bytes=bucket_bytes)
        received = [bucket for bucket in arriving if bucket.is_forwarded or bucket.link(whole) > direct]
        sent = buckets_forwarded_by(whole, target, bucket_bytes=bucket_bytes)
        num_sources = len(whole.source.holdings)
        peers = PeerNumbers(first_target=num_sources, num_peers=num_sources + len(whole.target.holdings))
        return len(rounds(sent, received, peers)), len(sent) + len(received)

    def _num_sent_by(self, source: int, direct: Link) -> int:
        leaving = buckets_from(self._plan, source, bucket_bytes=DEFAULT_BUCKET_BYTES)
        return sum(bucket.link(self._plan) > direct for bucket in leaving)


def _node_numbers(placement: Placement) -> dict[str, int]:
    return {node: number for number, node in enumerate(dict.fromkeys(place.node for place in placement.places))}


def _number(place: GpuPlace, numbers: Mapping[str, int]) -> GpuNumber:
    return numbers[place.node], place.gpu


def _model_bytes(deployment: Deployment) -> int:
    shape = replace(deployment.models["actor"].work.shape, dtype=dtype_on(deployment.device))
    return sum(spec.num_bytes for spec in canonical_tensors(shape).values())


def _rate(gpu: GpuModel, link: LinkClass) -> float:
    """Return the rate of a link in bytes per second."""
    rates = {
        LinkClass.SAME_GPU: gpu.memory_gb_per_s / 2,  # each byte is read and written
        LinkClass.SAME_NODE: gpu.node_gb_per_s,
        LinkClass.NETWORK: gpu.network_gb_per_s,
    }
    return rates[link] * 1e9
