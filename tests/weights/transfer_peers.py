"""The processes of the transfer tests: two trainer ranks and two or four engine ranks of a tiny model."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from megarl.errors import WeightSyncError
from megarl.weights.algebra.plan import Plan, plan
from megarl.weights.algebra.slices import Holding, Link, on_gpus
from megarl.weights.executors.group import Message, TransferGroup
from megarl.weights.executors.meeting import StoreAddress
from megarl.weights.executors.tensors import box_of, torch_dtype
from megarl.weights.executors.transfer import Receiver, Sender
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout
from megarl.weights.layouts.sglang import sglang_layout
from megarl.weights.layouts.stored import place_of
from tests.weights.reference import make_shape

NUM_TRAINERS = 2
NUM_PEERS = 4
"""PeerNumbers, unless the engines are on nodes of their own."""
BUCKET_BYTES = 1500
"""Small: a tensor takes several buckets, and a bucket several tensors."""
CORRUPTED_VERSION = 3
VERSIONS = (1, 2, CORRUPTED_VERSION)
TIMEOUT_S = 60.0

Tensors = dict[str, torch.Tensor]


Placed = Literal["on one node", "on shared devices", "opened each time", "on other nodes", "on other nodes, relayed"]
SHARED = ("on shared devices", "opened each time")


def num_engine_ranks(placed: Placed) -> int:
    return 4 if "other nodes" in placed else 2


def peers_of(placed: Placed) -> int:
    return NUM_TRAINERS + num_engine_ranks(placed)


def make_plan(*, tensor: int = 2, num_engines: int = 1, placed: Placed = "on one node") -> Plan:
    """Return a plan; other nodes have two ranks of two engines each, and ranks of one number hold the same."""
    shape = make_shape("qwen2", layers=2)
    trainer = megatron_layout(shape, MegatronParallel(tensor=2), dtype="float32")
    engines = sglang_layout(shape, tensor=tensor, num_engines=num_engines, dtype="bfloat16")
    first = 0 if placed in SHARED else NUM_TRAINERS
    gpus = [(0, first + rank) for rank in range(tensor * num_engines)]
    if "other nodes" in placed:
        engines = sglang_layout(shape, tensor=2, num_engines=2, dtype="bfloat16")
        gpus = [(1, 0), (2, 0), (1, 1), (2, 1)] if "relayed" not in placed else [(1, 0), (1, 1), (2, 0), (2, 1)]
    locations = on_gpus([(0, rank) for rank in range(NUM_TRAINERS)], gpus)
    return plan(trainer, engines, locations=locations, relays="relayed" in placed)


def values_of(version: int) -> Tensors:
    """Return the whole model of one version."""
    generator = torch.Generator().manual_seed(version)
    canonical = make_plan().source.canonical
    return {name: torch.randn(spec.shape, generator=generator) for name, spec in canonical.items()}


def tensors_of(holding: Holding, version: int | None) -> Tensors:
    """Return one holder's tensors at a version; zeros without a version."""
    if version is None:
        return {name: torch.zeros(spec.shape, dtype=torch_dtype(spec.dtype)) for name, spec in holding.tensors.items()}
    return cut(holding, values_of(version))


def cut(holding: Holding, model: Mapping[str, torch.Tensor], *, padding: float = 0.0) -> Tensors:
    """Return one holder's tensors, cut by hand out of the whole model, on its device."""
    device = next(iter(model.values())).device
    tensors = {
        name: torch.full(spec.shape, padding, dtype=torch_dtype(spec.dtype), device=device)
        for name, spec in holding.tensors.items()
    }
    for piece in holding.pieces:
        name, place = place_of(piece.slice.name)
        # Files have some experts as one stack of transposed matrices.
        whole = model[name] if name == piece.slice.name else model[name][place].movedim(-1, 0)
        box = box_of(whole, piece.slice.offsets, piece.slice.shape)
        box_of(tensors[piece.local_name], piece.local_offsets, piece.slice.shape).copy_(box)
    return tensors


class CorruptingGroup(TransferGroup):
    """On request, flips one bit of the next bucket, or offers one tensor in the place of another."""

    is_corrupting = False

    def report(self, key: str, payload: bytes) -> None:
        if self.is_corrupting and key.startswith("memory"):
            self.is_corrupting = False
            memory = json.loads(payload)
            first, second = (view for name, view in memory["views"].items() if "linear_fc1" in name)
            first["storage"] = second["storage"]
            payload = json.dumps(memory).encode()
        super().report(key, payload)

    def exchange(self, outgoing: Message | None, incoming: Message | None, *, tag: int, deadline: float) -> None:
        if self.is_corrupting and outgoing is not None:
            self.is_corrupting = False
            outgoing.buffer[len(outgoing.buffer) // 2] ^= 4
        super().exchange(outgoing, incoming, tag=tag, deadline=deadline)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLog:
    digests: dict[int, dict[str, int]]
    received: dict[int, Tensors]


SenderLog = dict[int, dict[tuple[int, str], int]]


def run_trainer(address: StoreAddress, rank: int, placed: Placed) -> SenderLog:
    """Send all versions; rank 1 corrupts the last one."""
    torch.set_num_threads(1)
    group = CorruptingGroup.join(address, name="publish", peer=rank, num_peers=peers_of(placed), timeout_s=TIMEOUT_S)
    moves = make_plan(placed=placed)
    tensors = tensors_of(moves.source.by_rank[rank], None)
    sender = Sender(
        moves,
        rank,
        tensors,
        group,
        bucket_bytes=BUCKET_BYTES,
        direct=Link.DEVICE if placed in SHARED else Link.PROCESS,
        keeps_open=placed != "opened each time",
    )
    log: SenderLog = {}
    for version in VERSIONS:
        for name, tensor in tensors_of(moves.source.by_rank[rank], version).items():
            tensors[name].copy_(tensor)
        if isinstance(group, CorruptingGroup):
            group.is_corrupting = rank == 1 and version == CORRUPTED_VERSION
        log[version] = sender.send(version)
        group.barrier()
    return log


def run_engine(address: StoreAddress, rank: int, placed: Placed) -> EngineLog:
    """Receive every version."""
    torch.set_num_threads(1)
    peer = NUM_TRAINERS + rank
    group = TransferGroup.join(address, name="publish", peer=peer, num_peers=peers_of(placed), timeout_s=TIMEOUT_S)
    moves = make_plan(placed=placed)
    tensors = tensors_of(moves.target.by_rank[rank], None)
    receiver = Receiver(
        moves,
        rank,
        tensors,
        group,
        bucket_bytes=BUCKET_BYTES,
        direct=Link.DEVICE if placed in SHARED else Link.PROCESS,
        keeps_open=placed != "opened each time",
    )
    digests: dict[int, dict[str, int]] = {}
    received: dict[int, Tensors] = {}
    for version in VERSIONS:
        digests[version] = receiver.receive(version)
        received[version] = {name: tensor.clone() for name, tensor in tensors.items()}
        # A trainer may change its weights only once they are read.
        group.barrier()
    return EngineLog(digests=digests, received=received)


def run_and_die(address: StoreAddress, rank: int) -> None:
    """Be a trainer rank that is gone when its bytes are due."""
    group = TransferGroup.join(address, name="doomed", peer=rank, num_peers=NUM_PEERS, timeout_s=TIMEOUT_S)
    group.barrier()
    os._exit(1)


def run_beside_the_dead(address: StoreAddress, peer: int) -> float:
    """Be a rank that waits for the dead one. Return the seconds until its wait ended."""
    group = TransferGroup.join(address, name="doomed", peer=peer, num_peers=NUM_PEERS, timeout_s=TIMEOUT_S)
    moves = make_plan(tensor=1, num_engines=2)
    group.barrier()
    start = time.monotonic()
    try:
        if peer < NUM_TRAINERS:
            Sender(moves, peer, tensors_of(moves.source.by_rank[peer], 1), group).send(1)
            # Its own bytes may have been taken before the others knew; then their giving up ends its next wait.
            group.barrier()
        else:
            rank = peer - NUM_TRAINERS
            Receiver(moves, rank, tensors_of(moves.target.by_rank[rank], None), group).receive(1)
    except WeightSyncError:
        return time.monotonic() - start
    raise AssertionError("the transfer succeeded without one of its peers")
