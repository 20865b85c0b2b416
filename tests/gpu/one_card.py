"""Processes that share one GPU and are hosts of their own to NCCL: a cluster's publish without a cluster."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Literal

import torch

from megarl.weights.algebra.buckets import buckets_to
from megarl.weights.algebra.plan import Plan, plan
from megarl.weights.algebra.slices import Gpu, Link, on_gpus
from megarl.weights.executors.digest import check_digests
from megarl.weights.executors.group import Message, TransferGroup
from megarl.weights.executors.meeting import StoreAddress, StoreServer
from megarl.weights.executors.transfer import Receiver, Sender
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout
from megarl.weights.layouts.sglang import sglang_layout
from tests.weights.reference import make_shape
from tests.weights.transfer_peers import cut

NUM_SOURCES = 4
BUCKET_BYTES = 3000
LATE_S = 4.0
"""Time in which NCCL notices a lost peer, so that the next call fails at once and not in a wait."""
Where = Literal["near", "far", "two nodes", "relay"]
Fault = Literal["killed", "stopped", "late", "corrupted"]


@dataclass(frozen=True, kw_only=True)
class PublishCase:
    """Four trainer ranks and up to four engine ranks."""

    family: str
    parallel: MegatronParallel
    tensor: int
    num_engines: int
    expert: int
    where: Where
    hidden: int = 0

    def plan(self) -> Plan:
        shape = make_shape(self.family, heads=8, kv_heads=2, ffn=64 << self.hidden)
        source = megatron_layout(shape, self.parallel, dtype="bfloat16")
        target = sglang_layout(
            shape, tensor=self.tensor, expert=self.expert, num_engines=self.num_engines, dtype="bfloat16"
        )
        gpus = [self._gpu(rank) for rank in range(self.tensor * self.num_engines)]
        locations = on_gpus([(0, rank) for rank in range(NUM_SOURCES)], gpus)
        return plan(source, target, locations=locations, relays=self.where == "relay")

    def _gpu(self, rank: int) -> Gpu:
        match self.where:
            case "near":
                return 0, NUM_SOURCES + rank
            case "far":
                return 1, rank
            case _:
                return 1 + rank // 2, rank % 2


def random_cases(number: int) -> list[PublishCase]:
    """Return layouts of dense models and mixtures in turn, near, far and relayed."""
    draw = random.Random(number)
    dense = [
        MegatronParallel(tensor=2, pipeline=2),
        MegatronParallel(tensor=4),
        MegatronParallel(pipeline=4),
        MegatronParallel(pipeline=2, virtual_pipeline=2, data=2),
        MegatronParallel(tensor=2, data=2),
        MegatronParallel(data=4),
    ]
    mixtures = [
        MegatronParallel(tensor=2, data=2, expert=2, expert_tensor=1),
        MegatronParallel(pipeline=2, data=2, expert=2),
        MegatronParallel(tensor=4, expert=4, expert_tensor=1),
        MegatronParallel(data=4, expert=4),
    ]
    wheres: tuple[Where, ...] = ("near", "far", "two nodes", "relay")
    cases = []
    for index in range(number):
        is_mixture = index % 2 == 1
        tensor = draw.choice([1, 2, 4])
        cases.append(
            PublishCase(
                family="qwen3_moe" if is_mixture else draw.choice(["qwen2", "qwen3", "llama"]),
                parallel=draw.choice(mixtures if is_mixture else dense),
                tensor=tensor,
                num_engines=4 // tensor,
                expert=draw.choice([1, 2][: tensor.bit_length()]) if is_mixture and tensor > 1 else 1,
                where=wheres[(index // 2) % 4],
            )
        )
    return cases


class CountingGroup(TransferGroup):
    """Counts bytes, and has an accident at one of its rounds if it is told to."""

    num_received = 0
    num_rounds = 0
    fault: tuple[Fault, int] | None = None

    def exchange(self, outgoing: Message | None, incoming: Message | None, *, tag: int, deadline: float) -> None:
        if self.fault is not None and self.fault[1] == self.num_rounds:
            match self.fault[0]:
                case "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "stopped":
                    os.kill(os.getpid(), signal.SIGSTOP)
                case "late":
                    time.sleep(LATE_S)
                case "corrupted":
                    assert outgoing is not None, "only senders corrupt"
                    outgoing.buffer[0] ^= 1
        self.num_rounds += 1
        super().exchange(outgoing, incoming, tag=tag, deadline=deadline)
        self.num_received += 0 if incoming is None else incoming.buffer.nbytes


@dataclass(frozen=True, kw_only=True)
class Log:
    """One peer's account of a publish."""

    sent: dict[int, dict[tuple[int, str], int]]
    """Digests by version, as those that arrived."""
    arrived: dict[int, dict[str, int]]
    num_received: int
    free_bytes: int
    """On the card while all communicators are open."""
    allocated_bytes: tuple[int, ...]
    """By the allocator after each version."""
    join_s: float
    publish_s: float


def take_part(
    peer: int,
    address: StoreAddress,
    name: str,
    case: PublishCase,
    timeout_s: float,
    fault: tuple[Fault, int] | None,
) -> Log:
    """Be one peer of two publishes; check every byte of the second."""
    moves = case.plan()
    num_peers = NUM_SOURCES + len(moves.target.holdings)
    started = time.monotonic()
    has_rounds = any(moves.traffic.received[link] for link in Link if link > Link.NODE)
    group = CountingGroup.join(
        address, name=name, peer=peer, num_peers=num_peers, timeout_s=timeout_s, backend="nccl" if has_rounds else None
    )
    assert isinstance(group, CountingGroup)
    group.fault = fault
    joined = time.monotonic()
    sent: dict[int, dict[tuple[int, str], int]] = {}
    arrived: dict[int, dict[str, int]] = {}
    allocated = []
    try:
        if peer < NUM_SOURCES:
            sources = cut(moves.source.by_rank[peer], weights(moves, 1))
            sender = Sender(moves, peer, sources, group, bucket_bytes=BUCKET_BYTES, direct=Link.NODE)
            for version in (1, 2):
                for tensor_name, tensor in cut(moves.source.by_rank[peer], weights(moves, version)).items():
                    sources[tensor_name].copy_(tensor)
                sent[version] = sender.send(version)
                allocated.append(torch.cuda.memory_allocated())
                group.barrier()
        else:
            rank = peer - NUM_SOURCES
            targets = {
                tensor_name: torch.zeros_like(tensor)
                for tensor_name, tensor in cut(moves.target.by_rank[rank], weights(moves, 1)).items()
            }
            receiver = Receiver(moves, rank, targets, group, bucket_bytes=BUCKET_BYTES, direct=Link.NODE)
            for version in (1, 2):
                arrived[version] = receiver.receive(version)
                allocated.append(torch.cuda.memory_allocated())
                group.barrier()
            for tensor_name, tensor in cut(moves.target.by_rank[rank], weights(moves, 2)).items():
                assert torch.equal(targets[tensor_name], tensor), tensor_name
            expected = sum(
                bucket.num_bytes
                for bucket in buckets_to(moves, rank, bucket_bytes=BUCKET_BYTES)
                if bucket.is_forwarded or bucket.link(moves) > Link.NODE
            )
            assert group.num_received == 2 * expected, f"{group.num_received} bytes, {2 * expected} planned"
        free_bytes, _ = torch.cuda.mem_get_info()
        group.barrier()
    finally:
        group.close()
    return Log(
        sent=sent,
        arrived=arrived,
        free_bytes=free_bytes,
        num_received=group.num_received,
        allocated_bytes=tuple(allocated),
        join_s=joined - started,
        publish_s=time.monotonic() - joined,
    )


def weights(moves: Plan, version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(version)
    return {
        name: torch.randn(spec.shape, generator=generator, device="cuda").bfloat16()
        for name, spec in moves.source.canonical.items()
    }


def use_gpu() -> int:
    """Make this process's CUDA context; return its id."""
    torch.zeros(1, device="cuda")
    return os.getpid()


def check_logs(logs: Sequence[Log], version: int = 2) -> None:
    """Compare the digests of a version."""
    arrived = {rank: log.arrived[version] for rank, log in enumerate(logs[NUM_SOURCES:])}
    check_digests([log.sent[version] for log in logs[:NUM_SOURCES]], arrived)


class Peer:
    """One process on the card."""

    def __init__(self, number: int, connections: int) -> None:
        self._number = number
        self._connections = connections
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(self._number, self._connections, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, function: Callable[..., object], *arguments: object) -> None:
        self._pipe.send((function, arguments))

    def result(self, timeout_s: float) -> object:
        """Return what the call returned, or its error as a string; None if the process died or is silent."""
        try:
            return self._pipe.recv() if self._pipe.poll(timeout_s) else None
        except EOFError:
            return None

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def _serve(number: int, connections: int, pipe: Connection) -> None:
    os.environ.update(
        NCCL_HOSTID=f"host {number}",
        NCCL_SOCKET_IFNAME="lo",
        NCCL_IB_DISABLE="1",
        CUDA_DEVICE_MAX_CONNECTIONS=str(connections),
    )
    torch.cuda.set_device(0)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(function(*arguments))
        except Exception as error:  # noqa: BLE001 - goes to the test
            pipe.send(f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-3)}")


@contextmanager
def card(num_peers: int, *, connections: int) -> Iterator[list[Peer]]:
    """Yield processes that have their CUDA contexts."""
    peers = [Peer(number, connections) for number in range(num_peers)]
    try:
        for peer in peers:
            peer.begin(use_gpu)
        assert all(isinstance(peer.result(300), int) for peer in peers)
        yield peers
    finally:
        for peer in peers:
            peer.kill()


@dataclass(frozen=True, kw_only=True)
class Answer:
    value: object
    seconds: float
    """From the start of the publish."""


def publish(
    peers: Sequence[Peer],
    case: PublishCase,
    *,
    timeout_s: float = 60.0,
    faults: dict[int, tuple[Fault, int]] | None = None,
) -> list[Answer]:
    """Run two publishes; return what each process answered, in the order of the peers."""
    server, name = StoreServer(), "publish"
    num_peers = NUM_SOURCES + case.tensor * case.num_engines
    started = time.monotonic()
    for number, peer in enumerate(peers[:num_peers]):
        peer.begin(take_part, number, server.address, name, case, timeout_s, (faults or {}).get(number))
    answers: list[Answer] = []
    for number, peer in enumerate(peers[:num_peers]):
        is_lost = (faults or {}).get(number, ("late", 0))[0] in ("killed", "stopped")
        value = None if is_lost else peer.result(timeout_s + 30)
        answers.append(Answer(value=value, seconds=time.monotonic() - started))
    return answers
