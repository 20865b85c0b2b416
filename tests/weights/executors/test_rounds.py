"""The rounds of random plans on a wire that blocks as NCCL does, and an exchange among equals."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings

from megarl.checkpoint.save import assign_tensors
from megarl.errors import WeightSyncError
from megarl.weights.algebra.buckets import buckets_to
from megarl.weights.algebra.plan import plan
from megarl.weights.algebra.slices import Link, on_gpus, same_processes
from megarl.weights.executors.digest import check_digests
from megarl.weights.executors.exchange import exchange
from megarl.weights.executors.group import Message
from megarl.weights.executors.tensors import box_of
from megarl.weights.executors.transfer import Receiver, Sender
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout
from megarl.weights.layouts.sglang import sglang_layout
from tests.weights.execution import Case, cases
from tests.weights.reference import fill_from_canonical, make_shape, numbered
from tests.weights.rendezvous import TIMEOUT_S, Wire, join_all, tensors_of

MAX_PEERS = 12


@pytest.mark.patient
@settings(
    max_examples=6,
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


@pytest.mark.parametrize("direct", [Link.PROCESS, Link.NODE], ids=["rounds", "read"])
def test_a_receiver_beside_another_has_tensors_of_its_own(direct: Link) -> None:
    shape = make_shape(layers=2)
    source = megatron_layout(shape, MegatronParallel(), dtype="float32")
    target = sglang_layout(shape, tensor=1, dtype="float32")
    moves, model = plan(source, target, locations=on_gpus([(0, 0)], [(0, 1)])), numbered(shape)
    sent = tensors_of(source.holdings[0], fill_from_canonical(source.holdings[0], model))
    expected = tensors_of(target.holdings[0], fill_from_canonical(target.holdings[0], model))
    slots = [{name: torch.zeros_like(tensor) for name, tensor in expected.items()} for _ in range(2)]
    groups = join_all(2, Wire())
    sender = Sender(moves, 0, sent, groups[0], bucket_bytes=4096, direct=direct)
    first = Receiver(moves, 0, slots[0], groups[1], bucket_bytes=4096, direct=direct)
    receivers = [first, first.beside(slots[1])]
    with ThreadPoolExecutor(1) as pool:
        for version in (1, 2, 3):
            sending = pool.submit(sender.send, version)
            arrived = receivers[version % 2].receive(version)
            check_digests([sending.result()], {0: arrived})
            for tensor in sent.values():
                tensor += 1
    for slot, added in zip(slots, (1, 2), strict=True):
        for piece in target.holdings[0].pieces:
            found, first_values = (
                box_of(tensors[piece.local_name], piece.local_offsets, piece.slice.shape)
                for tensors in (slot, expected)
            )
            assert torch.equal(found, first_values + added), piece


def test_the_wire_shows_a_receive_that_is_posted_ahead() -> None:
    """Two peers that each wait for the other before they send, as receives of a later hop once did."""
    groups = join_all(2, Wire())
    deadline = time.monotonic() + 0.3

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


def test_a_tensor_is_told_when_all_of_it_is_there_and_before_the_last_one_is() -> None:
    shape, num_ranks = make_shape(layers=4), 2
    layout = megatron_layout(shape, MegatronParallel(tensor=num_ranks), dtype="float32")
    target, model = assign_tensors(layout), numbered(shape)
    moves = plan(layout, target, locations=same_processes(layout, target))
    sources = [tensors_of(each, fill_from_canonical(each, model)) for each in layout.holdings]
    expected = [tensors_of(each, fill_from_canonical(each, model)) for each in target.holdings]
    targets = [{name: torch.full_like(tensor, -1.0) for name, tensor in each.items()} for each in expected]
    groups = join_all(num_ranks, Wire())
    told: list[list[str]] = [[] for _ in groups]
    num_waiting: list[list[int]] = [[] for _ in groups]

    def run(rank: int) -> None:
        def filled(name: str) -> None:
            assert torch.equal(targets[rank][name], expected[rank][name])
            told[rank].append(name)
            num_waiting[rank].append(sum(bool((tensor == -1.0).any()) for tensor in targets[rank].values()))

        exchange(moves, sources[rank], targets[rank], groups[rank], bucket_bytes=4096, filled=filled)

    with ThreadPoolExecutor(num_ranks) as pool:
        list(pool.map(run, range(num_ranks)))
    for rank, names in enumerate(told):
        assert sorted(names) == sorted(target.by_rank[rank].tensors), "each is told once"
        split = [count for count in num_waiting[rank] if count]
        assert len(split) > len(names) // 2, "most are told while others are on their way"
