"""The rounds of random plans on a wire that blocks as NCCL does."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings

from megarl.errors import WeightSyncError
from megarl.weights.algebra.buckets import buckets_to
from megarl.weights.algebra.slices import Holding
from megarl.weights.executors.digest import check_digests
from megarl.weights.executors.group import Message, StoreServer, TransferGroup
from megarl.weights.executors.transfer import Receiver, Sender
from tests.weights.reference import Arrays, fill_from_canonical, numbered
from tests.weights.rendezvous import Wire
from tests.weights.test_plan_properties import Case, cases

TIMEOUT_S = 60.0
MAX_PEERS = 24


def join_all(num_peers: int, wire: Wire) -> list[TransferGroup]:
    """Return one group per peer, connected by `wire`."""
    server = StoreServer()

    def join(peer: int) -> TransferGroup:
        group = TransferGroup.join(
            server.address, name="rounds", peer=peer, num_peers=num_peers, timeout_s=TIMEOUT_S, backend=None
        )
        group._channel = wire.channel(peer)
        group._server = server  # type: ignore[attr-defined]  # lives as long as the group
        return group

    with ThreadPoolExecutor(num_peers) as pool:
        return list(pool.map(join, range(num_peers)))


def tensors_of(holding: Holding, arrays: Arrays) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(arrays[name])).float() for name in holding.tensors}


@settings(
    deadline=None,
    max_examples=24,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
@given(case=cases())
def test_random_plans_arrive_whole_where_a_send_ends_only_with_its_receive(case: Case) -> None:
    plan, model = case.plan, numbered(case.shape)
    num_sources, num_targets = len(plan.source.holdings), len(plan.target.holdings)
    assume(num_sources + num_targets <= MAX_PEERS)
    wire = Wire()
    groups = join_all(num_sources + num_targets, wire)
    sources = [tensors_of(each, fill_from_canonical(each, model)) for each in plan.source.holdings]
    expected = [tensors_of(each, fill_from_canonical(each, model)) for each in plan.target.holdings]
    targets = [{name: torch.full_like(tensor, -1.0) for name, tensor in each.items()} for each in expected]
    with ThreadPoolExecutor(len(groups)) as pool:
        senders = [
            Sender(plan, rank, tensors, groups[rank], bucket_bytes=case.bucket_bytes)
            for rank, tensors in enumerate(sources)
        ]
        receivers = [
            Receiver(plan, rank, tensors, groups[num_sources + rank], bucket_bytes=case.bucket_bytes)
            for rank, tensors in enumerate(targets)
        ]
        sent = [pool.submit(sender.send, 1) for sender in senders]
        arrived = [pool.submit(receiver.receive, 1) for receiver in receivers]
        check_digests([each.result() for each in sent], {rank: each.result() for rank, each in enumerate(arrived)})
    for holding, tensors, whole in zip(plan.target.holdings, targets, expected, strict=True):
        for piece in holding.pieces:
            index = tuple(
                slice(start, start + size)
                for start, size in zip(piece.local_offsets[-len(piece.slice.shape) :], piece.slice.shape, strict=True)
            )
            lead = piece.local_offsets[: -len(piece.slice.shape)]
            assert torch.equal(tensors[piece.local_name][lead][index], whole[piece.local_name][lead][index])
    planned = [buckets_to(plan, rank, bucket_bytes=case.bucket_bytes) for rank in range(num_targets)]
    assert wire.num_bytes == sum(bucket.num_bytes for buckets in planned for bucket in buckets)


def test_the_wire_shows_a_receive_that_is_posted_ahead() -> None:
    """Two peers that each wait for the other before they send, as receives of a later hop once did."""
    groups = join_all(2, Wire())
    deadline = time.monotonic() + 1.0

    def wait_first(peer: int) -> None:
        buffers = [Message(peer=1 - peer, buffer=torch.zeros(8, dtype=torch.uint8)) for _ in range(2)]
        groups[peer].exchange(None, buffers[0], tag=0, deadline=deadline)
        groups[peer].exchange(buffers[1], None, tag=0, deadline=deadline)

    with ThreadPoolExecutor(2) as pool:
        errors = [pool.submit(wait_first, peer).exception for peer in range(2)]
        assert all("the deadline has passed" in str(error()) for error in errors)


def test_a_peer_that_gives_up_ends_the_rounds_of_the_others() -> None:
    groups = join_all(2, Wire())
    with ThreadPoolExecutor(1) as pool:
        message = Message(peer=1, buffer=torch.zeros(8, dtype=torch.uint8))
        waiting = pool.submit(groups[0].exchange, message, None, tag=0, deadline=time.monotonic() + TIMEOUT_S)
        groups[1].abandon("the disk is full")
        with pytest.raises(
            WeightSyncError, match=r"peer 0 sending 8 bytes to peer 1.*peer 1 gave up: the disk is full"
        ):
            waiting.result(timeout=TIMEOUT_S)
