"""Meetings of peers at a store, what each of them costs, and how a group ends."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Lock
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, Store

from megarl.errors import WeightSyncError
from megarl.weights.executors.group import Message, TransferGroup
from megarl.weights.executors.meeting import StoreAddress, StoreServer, abandon_group


class CountingStore(Store):
    """A store that counts what one peer asks of it, and how many keys each question names."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self.calls: Counter[str] = Counter()
        self.most_keys = 0

    def set(self, key: str, value: Any) -> None:
        self.calls["write"] += 1
        self._store.set(key, value)

    def add(self, key: str, amount: int) -> int:
        self.calls["write"] += 1
        return self._store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        self.most_keys = max(self.most_keys, len(keys))
        return self._store.check(keys)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def delete_key(self, key: str) -> bool:
        self.calls["delete"] += 1
        return self._store.delete_key(key)


def meet(num_peers: int, num_barriers: int) -> tuple[list[CountingStore], int]:
    """Let peers meet in barriers; return the store as each of them saw it, and how many keys are left."""
    shared = HashStore()
    stores = [CountingStore(shared) for _ in range(num_peers)]
    order: list[tuple[int, int]] = []
    lock = Lock()

    def join(peer: int) -> None:
        group = TransferGroup(stores[peer], None, name="group", peer=peer, num_peers=num_peers, timeout_s=60)
        for number in range(num_barriers):
            with lock:
                order.append((number, peer))
            group.barrier()

    with ThreadPoolExecutor(num_peers) as pool:
        list(pool.map(join, range(num_peers)))
    assert [number for number, _ in order] == sorted(number for number, _ in order), "a peer left before all had come"
    return stores, shared.num_keys()


@pytest.mark.parametrize("num_peers", [2, 64])
def test_a_barrier_costs_a_peer_the_same_whatever_their_number(num_peers: int) -> None:
    stores, num_keys = meet(num_peers, num_barriers=5)
    # A key of its own, the count, and for the last one the word to the others.
    assert all(2 * 5 <= store.calls["write"] <= 3 * 5 for store in stores)
    assert max(store.most_keys for store in stores) == 1
    assert num_keys <= num_peers + 2, "keys of barriers that are over"


def test_a_peer_that_does_not_come_is_named() -> None:
    shared = HashStore()
    start = Barrier(3)

    def join(peer: int) -> None:
        group = TransferGroup(shared, None, name="group", peer=peer, num_peers=4, timeout_s=0.5)
        start.wait()
        group.barrier()

    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(join, peer) for peer in (0, 1, 3)]
        for answer in answers:
            with pytest.raises(WeightSyncError, match=r"after 0\.5 s still no barrier 1 of peer 2"):
                answer.result()


@pytest.fixture
def server() -> StoreServer:
    return StoreServer()


@pytest.fixture
def group(server: StoreServer) -> TransferGroup:
    return TransferGroup.join(server.address, name="one", peer=0, num_peers=1, timeout_s=60)


def test_a_peer_that_never_joins_is_named(server: StoreServer) -> None:
    with pytest.raises(WeightSyncError, match=r"peer 0 of 2 joining alone: after 0.2 s still no peer 1"):
        TransferGroup.join(server.address, name="alone", peer=0, num_peers=2, timeout_s=0.2)


def test_a_store_that_is_gone_is_an_error() -> None:
    with pytest.raises(WeightSyncError, match="peer 0 of 1 joining nowhere failed"):
        TransferGroup.join(StoreAddress(host="127.0.0.1", port=9), name="nowhere", peer=0, num_peers=1, timeout_s=0.5)


def test_reports_are_collected_and_missing_ones_named(group: TransferGroup) -> None:
    group.report("digests of engine 0", b"\x00\xff")
    assert group.collect(["digests of engine 0"], 1) == {"digests of engine 0": b"\x00\xff"}
    with pytest.raises(WeightSyncError, match="still no digests of engine 1"):
        group.collect(["digests of engine 0", "digests of engine 1"], 0.1)
    group.forget(["digests of engine 0"])
    with pytest.raises(WeightSyncError, match="still no digests of engine 0"):
        group.collect(["digests of engine 0"], 0.1)


def test_a_wait_ends_when_another_peer_gives_up(group: TransferGroup) -> None:
    group.abandon("the disk is full")
    with pytest.raises(WeightSyncError, match="peer 0 gave up: the disk is full"):
        group.collect(["never"], 10)
    with pytest.raises(WeightSyncError, match="join a new group: the disk is full"):
        group.exchange(Message(peer=0, buffer=torch.zeros(1, dtype=torch.uint8)), None, tag=0, deadline=0.0)


def test_a_group_can_be_ended_from_outside(server: StoreServer, group: TransferGroup) -> None:
    abandon_group(server.address, name="one", reason="engine 1 is dead")
    with pytest.raises(WeightSyncError, match="engine 1 is dead"):
        group.collect(["never"], 10)
