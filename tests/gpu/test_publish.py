"""Publishes over NCCL and CUDA IPC between processes that stand for GPUs of several nodes, on one card."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from megarl.errors import WeightSyncError
from megarl.weights.layouts.megatron import MegatronParallel
from tests.gpu.one_card import (
    BUCKET_BYTES,
    NUM_SOURCES,
    Answer,
    Fault,
    Log,
    Peer,
    PublishCase,
    card,
    check_logs,
    publish,
    random_cases,
    use_gpu,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

logger = logging.getLogger(__name__)

NUM_CASES = 24
MAX_HELD_BYTES = 600 << 20
"""One communicator over sockets, with a margin."""
NUM_PEERS = 8
DEADLINE_S = 12.0
GRACE_S = 5.0
FAR = PublishCase(
    family="qwen2",
    parallel=MegatronParallel(tensor=2, pipeline=2),
    tensor=2,
    num_engines=2,
    expert=1,
    where="two nodes",
)


def logs_of(answers: list[Answer]) -> list[Log]:
    for number, answer in enumerate(answers):
        assert isinstance(answer.value, Log), f"peer {number} after {answer.seconds:.1f} s: {answer.value}"
    return [answer.value for answer in answers if isinstance(answer.value, Log)]


@pytest.mark.parametrize("connections", [1, 8, 32])
def test_random_layouts_arrive_bit_for_bit_whatever_the_number_of_hardware_queues(connections: int) -> None:
    with card(NUM_PEERS, connections=connections) as peers:
        for number, case in enumerate(random_cases(NUM_CASES)):
            logs = logs_of(publish(peers, case))
            check_logs(logs)
            logger.info(
                "case %d %s: join %.2f s, two versions %.2f s", number, case.where, logs[0].join_s, logs[0].publish_s
            )
            for log in logs[NUM_SOURCES:]:
                assert log.allocated_bytes[1] <= log.allocated_bytes[0], "the second publish allocates"


@pytest.fixture(scope="module")
def peers() -> Iterator[list[Peer]]:
    """The ranks of a trainer have one hardware queue."""
    with card(NUM_PEERS, connections=1) as processes:
        yield processes


@pytest.mark.parametrize("fault", ["killed", "stopped"])
@pytest.mark.parametrize(("lost", "at"), [(0, 0), (3, 2), (5, 0), (6, 1)])
def test_a_lost_peer_ends_the_publish_in_time_and_the_next_one_succeeds(
    peers: list[Peer], fault: Fault, lost: int, at: int
) -> None:
    check_loss(peers, lost, {lost: (fault, at)})


def test_a_loss_that_is_found_at_the_beginning_of_a_round_leaves_no_group_of_calls_open(peers: list[Peer]) -> None:
    late: dict[int, tuple[Fault, int]] = dict.fromkeys(range(NUM_PEERS), ("late", 2))
    check_loss(peers, 6, {**late, 6: ("killed", 2)})


def check_loss(peers: list[Peer], lost: int, faults: dict[int, tuple[Fault, int]]) -> None:
    answers = publish(peers, FAR, timeout_s=DEADLINE_S, faults=faults)
    for number, answer in enumerate(answers):
        if number != lost:
            assert isinstance(answer.value, str), f"peer {number}: {answer.value}"
            assert "peer" in answer.value
            assert answer.seconds < DEADLINE_S + GRACE_S, f"peer {number}: {answer.seconds:.1f} s, {answer.value}"
    logger.info("%s at round %d, peer %d: %.1f s", *faults[lost], lost, max(answer.seconds for answer in answers))
    peers[lost].kill()
    peers[lost].start()
    peers[lost].begin(use_gpu)
    assert isinstance(peers[lost].result(300), int)
    check_logs(logs_of(publish(peers, FAR)))


def test_a_corrupted_bucket_is_found(peers: list[Peer]) -> None:
    case = PublishCase(
        family="qwen2", parallel=MegatronParallel(tensor=4), tensor=4, num_engines=1, expert=1, where="far"
    )
    logs = logs_of(publish(peers, case, faults={1: ("corrupted", 0)}))
    with pytest.raises(WeightSyncError, match="has digest"):
        check_logs(logs, version=1)
    check_logs(logs, version=2)


def test_what_a_publish_holds_is_two_buckets_and_one_communicator() -> None:
    with card(NUM_PEERS, connections=8) as peers:
        free, _ = torch.cuda.mem_get_info()
        logs = logs_of(publish(peers, FAR))
    each = (free - min(log.free_bytes for log in logs)) / NUM_PEERS
    logger.info("a peer holds %.0f MiB during a publish, %d bytes of them lanes", each / 2**20, 2 * BUCKET_BYTES)
    assert each < MAX_HELD_BYTES
