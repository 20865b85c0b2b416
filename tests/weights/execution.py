"""Random plans, and the reference for executors: rounds in numpy in which a send ends only with its receive."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from hypothesis import strategies as st

from megarl.families.shape import ModelShape
from megarl.weights.algebra.buckets import (
    Bucket,
    PeerNumbers,
    Round,
    buckets_forwarded_by,
    buckets_from,
    buckets_to,
    rounds,
)
from megarl.weights.algebra.plan import Plan, plan
from megarl.weights.algebra.slices import Gpu, Layout, on_gpus
from megarl.weights.layouts.megatron import megatron_layout
from megarl.weights.layouts.sglang import sglang_layout
from tests.weights.reference import PADDING, Arrays, box, parallels, shapes


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """The buckets of all ranks of a plan."""

    sent: Mapping[int, Sequence[Bucket]]
    received: Mapping[int, Sequence[Bucket]]
    forwarded: Mapping[int, Sequence[Bucket]]

    @property
    def peers(self) -> PeerNumbers:
        return PeerNumbers(first_target=len(self.sent), num_peers=len(self.sent) + len(self.received))

    def rounds(self) -> dict[int, deque[Round]]:
        """Return the rounds of every peer."""
        peers = self.peers
        sources = {rank: rounds(sent, (), peers) for rank, sent in self.sent.items()}
        targets = {
            peers.first_target + rank: rounds(self.forwarded[rank], received, peers)
            for rank, received in self.received.items()
        }
        return {peer: deque(each) for peer, each in {**sources, **targets}.items()}


def buckets_of(moves: Plan, *, bucket_bytes: int) -> Buckets:
    sources, targets = ([holding.rank for holding in layout.holdings] for layout in (moves.source, moves.target))
    return Buckets(
        sent={rank: buckets_from(moves, rank, bucket_bytes=bucket_bytes) for rank in sources},
        received={rank: buckets_to(moves, rank, bucket_bytes=bucket_bytes) for rank in targets},
        forwarded={rank: buckets_forwarded_by(moves, rank, bucket_bytes=bucket_bytes) for rank in targets},
    )


def execute(buckets: Buckets, sources: Mapping[int, Arrays], targets: Mapping[int, Arrays]) -> None:
    """Fill `targets`; fail where peers wait in a cycle, or where an element is written twice.

    A peer leaves a round only when both its buckets were taken over: nothing is buffered, and nothing posted ahead.
    """
    peers, waiting = buckets.peers, buckets.rounds()
    done: set[tuple[int, bool]] = set()
    """(peer, is sending) of the halves of current rounds that are over."""
    is_moving = True
    while is_moving:
        is_moving = False
        for sender, steps in waiting.items():
            sent = steps[0].sent if steps else None
            if sent is not None and (sender, True) not in done:
                receiver = peers.receiver(sent)
                if waiting[receiver] and waiting[receiver][0].received == sent:
                    _copy(sent, targets if sent.is_forwarded else sources, targets)
                    done |= {(sender, True), (receiver, False)}
        for peer, steps in waiting.items():
            if steps and all(
                bucket is None or (peer, is_sending) in done
                for bucket, is_sending in ((steps[0].sent, True), (steps[0].received, False))
            ):
                steps.popleft()
                done -= {(peer, True), (peer, False)}
                is_moving = True
    assert not any(waiting.values()), "peers wait for each other"


def _copy(bucket: Bucket, givers: Mapping[int, Arrays], targets: Mapping[int, Arrays]) -> None:
    for move in bucket.moves:
        values = box(givers[move.source_rank][move.source_name], move.source_offsets, move.slice.shape)
        assert (values != PADDING).all(), f"{move} sends what its holder lacks"
        target = box(targets[move.target_rank][move.target_name], move.target_offsets, move.slice.shape)
        assert target.shape == move.slice.shape, f"{move} leaves its target"
        assert (target == PADDING).all(), f"{move} writes an element twice"
        target[...] = values


@dataclass(frozen=True, kw_only=True, repr=False)
class Case:
    shape: ModelShape
    source: Layout
    target: Layout
    tensor: int | None
    """TP ranks of an engine; None where the target is another split of the trainer."""
    expert: int
    is_cpu_engine: bool
    plan: Plan
    bucket_bytes: int

    @cached_property
    def buckets(self) -> Buckets:
        return buckets_of(self.plan, bucket_bytes=self.bucket_bytes)

    def __repr__(self) -> str:
        """Short: a plan in full fills pages."""
        locations = self.plan.locations
        return f"{self.shape}, {self.tensor}, {self.bucket_bytes}, {locations.sources}, {locations.targets}"


@st.composite
def gpus(draw: st.DrawFn, num_sources: int, num_targets: int) -> tuple[list[Gpu], list[Gpu]]:
    """Draw GPUs in pools of their own, in one pool, on one machine, or anywhere."""
    per_node = draw(st.sampled_from([1, 2, 4, 8]))
    sources = [(rank // per_node, rank % per_node) for rank in range(num_sources)]
    match draw(st.sampled_from(["separate", "shared", "one machine", "anywhere"])):
        case "separate":
            targets = [(1000 + rank // per_node, rank % per_node) for rank in range(num_targets)]
        case "shared":
            order = draw(st.permutations(range(max(num_sources, num_targets))))
            targets = [(order[rank] // per_node, order[rank] % per_node) for rank in range(num_targets)]
        case "one machine":
            sources = [(0, rank) for rank in range(num_sources)]
            targets = [(0, num_sources + rank) for rank in range(num_targets)]
        case _:
            nodes = st.integers(0, 4)
            sources = [(draw(nodes), rank) for rank in range(num_sources)]
            targets = [(draw(nodes), 1000 + rank) for rank in range(num_targets)]
    return sources, targets


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shape = draw(shapes())
    tensor: int | None = draw(st.sampled_from([1, 2, 4, 8, None]))
    if tensor is None and draw(st.booleans()):
        shape = shape.as_critic()
    source = megatron_layout(shape, draw(parallels()), dtype="float32")
    expert, is_cpu_engine = 1, False
    if tensor is None:
        target = megatron_layout(shape, draw(parallels()), dtype="float32")
    else:
        expert = draw(st.sampled_from([1, 2, 4][: tensor.bit_length()])) if shape.experts else 1
        is_cpu_engine = draw(st.booleans())
        target = sglang_layout(
            shape,
            tensor=tensor,
            expert=expert,
            num_engines=draw(st.integers(1, 4)),
            dtype="float32",
            is_cpu_engine=is_cpu_engine,
        )
    locations = draw(gpus(len(source.holdings), len(target.holdings)))
    return Case(
        shape=shape,
        source=source,
        target=target,
        tensor=tensor,
        expert=expert,
        is_cpu_engine=is_cpu_engine,
        plan=plan(source, target, locations=on_gpus(*locations), relays=draw(st.booleans())),
        bucket_bytes=draw(st.sampled_from([400, 4000, 1 << 20])),
    )
