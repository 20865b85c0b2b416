"""A publish simulated round by round: a round begins when both ends are in it; pack, exchange and unpack in turn."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megarl.planner.hardware import LINK_EFFICIENCY, ROUND_S, GpuModel
from megarl.weights.algebra.buckets import (
    DEFAULT_BUCKET_BYTES,
    Bucket,
    PeerNumbers,
    Round,
    buckets_forwarded_by,
    buckets_from,
    rounds,
)
from megarl.weights.algebra.plan import Plan
from megarl.weights.algebra.slices import Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    rounds: Mapping[int, Sequence[Round]]
    """By peer: trainer ranks first, then engine ranks."""
    peers: PeerNumbers
    nodes: Sequence[str]

    @classmethod
    def of(cls, plan: Plan, *, direct: Link) -> Publish:
        num_sources, num_targets = len(plan.source.holdings), len(plan.target.holdings)
        peers = PeerNumbers(first_target=num_sources, num_peers=num_sources + num_targets)
        sent, received = defaultdict[int, list[Bucket]](list), defaultdict[int, list[Bucket]](list)
        for bucket in _travelling(plan, num_sources, num_targets, direct):
            sent[peers.sender(bucket)].append(bucket)
            received[peers.receiver(bucket)].append(bucket)
        places = [*plan.locations.sources.values(), *plan.locations.targets.values()]
        return cls(
            rounds={peer: rounds(sent[peer], received[peer], peers) for peer in range(peers.num_peers)},
            peers=peers,
            nodes=[place.node for place in places],
        )

    @property
    def num_messages(self) -> int:
        return sum(each.sent is not None for of_peer in self.rounds.values() for each in of_peer)

    def seconds(self, gpu: GpuModel) -> float:
        """Return when the last peer is done; fail where peers wait for each other."""
        return _Simulation(self, gpu).run()

    def busiest_s(self, gpu: GpuModel) -> float:
        """Return the time of the peer with most to do, if it never waited."""
        times = _Simulation(self, gpu)
        return max(sum(times.alone_s(each) for each in of_peer) for of_peer in self.rounds.values())


def _travelling(plan: Plan, num_sources: int, num_targets: int, direct: Link) -> Iterator[Bucket]:
    for source in range(num_sources):
        for bucket in buckets_from(plan, source, bucket_bytes=DEFAULT_BUCKET_BYTES):
            if bucket.link(plan) > direct:
                yield bucket
    for target in range(num_targets):
        yield from buckets_forwarded_by(plan, target, bucket_bytes=DEFAULT_BUCKET_BYTES)


class _Simulation:
    def __init__(self, publish: Publish, gpu: GpuModel) -> None:
        self._publish = publish
        self._copy_rate = gpu.memory_gb_per_s / 2 * 1e9 * LINK_EFFICIENCY
        self._network_rate = gpu.network_gb_per_s * 1e9 * LINK_EFFICIENCY
        self._node_rate = gpu.node_gb_per_s * 1e9 * LINK_EFFICIENCY
        self._place = dict.fromkeys(publish.rounds, 0)
        self._left: dict[int, int] = {}
        self._posted: dict[tuple[int, int, int, int], float] = {}
        self._events: list[tuple[float, int, int]] = []
        self._done = 0.0

    def run(self) -> float:
        for peer in self._publish.rounds:
            self._enter(peer, 0.0)
        while self._events:
            now, *pair = heapq.heappop(self._events)
            for peer in pair:
                self._left[peer] -= 1
                if not self._left[peer]:
                    current = self._publish.rounds[peer][self._place[peer]]
                    self._place[peer] += 1
                    self._enter(peer, now + self._copied_s(current.received))
        waiting = [peer for peer, of_peer in self._publish.rounds.items() if self._place[peer] < len(of_peer)]
        assert waiting == [], f"peers wait for each other: {waiting[:8]}"
        return self._done

    def alone_s(self, current: Round) -> float:
        exchanged = max((self._exchange_s(each) for each in (current.sent, current.received) if each), default=0.0)
        return self._copied_s(current.sent) + exchanged + self._copied_s(current.received)

    def _enter(self, peer: int, now: float) -> None:
        self._done = max(self._done, now)
        if self._place[peer] == len(self._publish.rounds[peer]):
            return
        current = self._publish.rounds[peer][self._place[peer]]
        buckets = [each for each in (current.sent, current.received) if each is not None]
        self._left[peer] = len(buckets)
        for bucket in buckets:
            self._post(bucket, now + self._copied_s(current.sent))

    def _post(self, bucket: Bucket, now: float) -> None:
        sender, receiver = self._publish.peers.sender(bucket), self._publish.peers.receiver(bucket)
        key = sender, receiver, bucket.hop, bucket.index
        other = self._posted.pop(key, None)
        if other is None:
            self._posted[key] = now
        else:
            heapq.heappush(self._events, (max(now, other) + self._exchange_s(bucket), sender, receiver))

    def _exchange_s(self, bucket: Bucket) -> float:
        nodes = self._publish.nodes
        sender, receiver = self._publish.peers.sender(bucket), self._publish.peers.receiver(bucket)
        rate = self._node_rate if nodes[sender] == nodes[receiver] else self._network_rate
        return ROUND_S + bucket.num_bytes / rate

    def _copied_s(self, bucket: Bucket | None) -> float:
        return 0.0 if bucket is None else bucket.num_bytes / self._copy_rate
