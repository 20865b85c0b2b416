"""Trainer rank processes of the publish benchmark; each holds its share of known random weights in a Megatron layout.

A rank can send by the plan, as in a run, and by the two schemes of the comparison: every rank gathers every full tensor
and rank 0 broadcasts to the engines, or rank 0 has everything already and broadcasts.
"""

from __future__ import annotations

import multiprocessing
import traceback
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

import torch
from torch import distributed as dist
from torch.distributed import TCPStore
from torch.distributed.distributed_c10d import PrefixStore

from megarl.engine.commands import Rendezvous
from megarl.errors import WeightSyncError
from megarl.system.network import LOOPBACK
from megarl.weights.algebra.slices import Holding, Layout, Slice
from megarl.weights.executors.digest import fastest_digest
from megarl.weights.executors.group import Message, TransferGroup
from megarl.weights.executors.meeting import StoreAddress
from megarl.weights.executors.tensors import box_of, torch_dtype
from megarl.weights.executors.transfer import Sender
from megarl.weights.layouts.transfer_spec import TransferSpec

_STD = 0.02
SGLANG_GROUP = "flattened"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A Megatron parameter of one pipeline stage; gathered, it consists of a few whole canonical tensors."""

    stage: int
    name: str
    num_bytes: int
    """Size of the whole tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    digests: Mapping[tuple[int, str], int]
    num_bytes: int
    """Bytes that this rank sent through the transfer group."""


class _CountingGroup(TransferGroup):
    num_bytes = 0

    def exchange(self, outgoing: Message | None, incoming: Message | None, *, tag: int, deadline: float) -> None:
        self.num_bytes += 0 if outgoing is None else outgoing.buffer.nbytes
        super().exchange(outgoing, incoming, tag=tag, deadline=deadline)


class BenchRank:
    """One trainer rank, in its process; `transfer` has tensor and pipeline parallelism only."""

    def __init__(self, transfer: TransferSpec, rank: int, address: StoreAddress, timeout_s: float) -> None:
        torch.set_num_threads(1)
        self._transfer = transfer
        self._rank = rank
        self._plan = transfer.plan()
        self._layout = self._plan.source
        self._timeout_s = timeout_s
        self._tensors = _fill(self._layout.by_rank[rank], self._layout)
        self._group: _CountingGroup | None = None
        self._sender: Sender | None = None
        self._everything: dict[str, torch.Tensor] = {}
        self._engines: dist.ProcessGroup | None = None
        self._meet(address)

    def join(self, rendezvous: Rendezvous) -> None:
        group = _CountingGroup.join(
            rendezvous.address,
            name=rendezvous.name,
            peer=self._rank,
            num_peers=self._transfer.num_peers,
            timeout_s=rendezvous.timeout_s,
            backend=rendezvous.backend,
        )
        assert isinstance(group, _CountingGroup)
        self._group = group
        self._sender = Sender(
            self._plan,
            self._rank,
            self._tensors,
            group,
            bucket_bytes=rendezvous.bucket_bytes,
            digest=fastest_digest(is_on_host=self._transfer.is_cpu_engine),
        )

    def send(self, version: int) -> Sent:
        """Send as a rank of a run does."""
        assert self._sender is not None, "join comes first"
        assert self._group is not None, "join comes first"
        before = self._group.num_bytes
        digests = self._sender.send(version)
        return Sent(digests=digests, num_bytes=self._group.num_bytes - before)

    def negate(self) -> None:
        for tensor in (*self._tensors.values(), *self._everything.values()):
            tensor.neg_()

    def connect(self, port: int) -> None:
        """Join, as rank 0, the process group in which SGLang's ranks receive broadcasts."""
        if self._rank:
            return
        from sglang.srt.utils.common import init_custom_process_group

        self._everything = {
            name: _values(Slice(name=name, offsets=(0,) * len(spec.shape), shape=spec.shape), self._layout)
            for name, spec in self._layout.canonical.items()
        }
        self._engines = init_custom_process_group(
            backend="gloo",
            init_method=f"tcp://{LOOPBACK}:{port}",
            world_size=1 + self._transfer.num_engines * self._transfer.tensor,
            rank=0,
            group_name=SGLANG_GROUP,
            timeout=timedelta(seconds=self._timeout_s),
        )

    def gather(self, bucket: Sequence[Parameter]) -> None:
        """Gather every full tensor of the bucket on every rank; rank 0 broadcasts it to the engines."""
        tensors: dict[str, torch.Tensor] = {}
        for parameter in bucket:
            tensors |= self._gathered(parameter)
        if self._rank == 0:
            self._broadcast(tensors)

    def feed(self, bucket: Sequence[Parameter]) -> None:
        """Broadcast the full tensors of the bucket, which rank 0 has, to the engines."""
        if self._rank == 0:
            names = [name for parameter in bucket for name in canonical_names(self._layout, self._transfer, parameter)]
            self._broadcast({name: self._everything[name] for name in names})

    def _meet(self, address: StoreAddress) -> None:
        parallel = self._transfer.parallel
        store = TCPStore(address.host, address.port, timeout=timedelta(seconds=self._timeout_s))
        dist.init_process_group(
            "gloo", store=PrefixStore("gather", store), rank=self._rank, world_size=parallel.world_size
        )
        stages, parts = range(parallel.pipeline), range(parallel.tensor)
        for stage in stages:
            ranks = [parallel.rank(tensor=part, data=0, pipeline=stage) for part in parts]
            group = dist.new_group(ranks)
            if self._rank in ranks:
                self._of_stage = group
        for part in parts:
            ranks = [parallel.rank(tensor=part, data=0, pipeline=stage) for stage in stages]
            group = dist.new_group(ranks)
            if self._rank in ranks:
                self._of_part, self._part = group, part

    def _gathered(self, parameter: Parameter) -> dict[str, torch.Tensor]:
        parallel = self._transfer.parallel
        owner = parallel.rank(tensor=self._part, data=0, pipeline=parameter.stage)
        spec = self._layout.by_rank[owner].tensors[parameter.name]
        shard = self._tensors[parameter.name] if owner == self._rank else _empty(spec.shape, spec.dtype)
        dist.broadcast(shard, src=owner, group=self._of_part)
        shards = [_empty(spec.shape, spec.dtype) for _ in range(parallel.tensor)]
        dist.all_gather(shards, shard, group=self._of_stage)
        whole: dict[str, torch.Tensor] = {}
        for part, values in enumerate(shards):
            holding = self._layout.by_rank[parallel.rank(tensor=part, data=0, pipeline=parameter.stage)]
            for piece in holding.pieces:
                if piece.local_name == parameter.name:
                    name = piece.slice.name
                    if name not in whole:
                        whole[name] = _empty(self._layout.canonical[name].shape, spec.dtype)
                    box = box_of(values, piece.local_offsets, piece.slice.shape)
                    box_of(whole[name], piece.slice.offsets, piece.slice.shape).copy_(box)
        return whole

    def _broadcast(self, tensors: Mapping[str, torch.Tensor]) -> None:
        assert self._engines is not None, "connect comes first"
        flat = torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors.values()])
        dist.broadcast(flat, src=0, group=self._engines)


def parameters_of(layout: Layout, transfer: TransferSpec) -> list[Parameter]:
    """Return the parameters of all stages, in the order in which they are gathered."""
    parameters = []
    for stage in range(transfer.parallel.pipeline):
        holding = layout.by_rank[transfer.parallel.rank(tensor=0, data=0, pipeline=stage)]
        for name in holding.tensors:
            parameter = Parameter(stage=stage, name=name, num_bytes=0)
            names = canonical_names(layout, transfer, parameter)
            size = sum(layout.canonical[each].num_bytes for each in names)
            parameters.append(Parameter(stage=stage, name=name, num_bytes=size))
    return parameters


def canonical_names(layout: Layout, transfer: TransferSpec, parameter: Parameter) -> list[str]:
    """Return the canonical tensors that a parameter has a share of."""
    parallel = transfer.parallel
    ranks = [parallel.rank(tensor=part, data=0, pipeline=parameter.stage) for part in range(parallel.tensor)]
    pieces = [piece for rank in ranks for piece in layout.by_rank[rank].pieces]
    return list(dict.fromkeys(piece.slice.name for piece in pieces if piece.local_name == parameter.name))


class BenchRanks:
    """All rank processes of a transfer. A call is made on every one of them at once; the first error is raised."""

    def __init__(self, transfer: TransferSpec, address: StoreAddress, *, timeout_s: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._timeout_s = timeout_s
        self._pipes: list[Connection] = []
        self._processes: list[SpawnProcess] = []
        for rank in range(transfer.parallel.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, transfer, rank, address, timeout_s), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def wait_ready(self) -> None:
        self._answers("start")

    def call(self, method: str, *arguments: object) -> list[object]:
        for pipe in self._pipes:
            pipe.send((method, arguments))
        return self._answers(method)

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def _answers(self, method: str) -> list[object]:
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(self._timeout_s):
                raise WeightSyncError(f"rank {rank}: {method}: no answer within {self._timeout_s:g} s")
            try:
                answer, error = pipe.recv()
            except EOFError:
                raise WeightSyncError(f"rank {rank}: {method}: the process is gone") from None
            if error is not None:
                raise WeightSyncError(f"rank {rank}: {method}: {error}")
            answers.append(answer)
        return answers


def _serve(pipe: Connection, transfer: TransferSpec, rank: int, address: StoreAddress, timeout_s: float) -> None:
    served: BenchRank | None = None

    def start() -> None:
        nonlocal served
        served = BenchRank(transfer, rank, address, timeout_s)

    call: Callable[..., object] = start
    arguments: tuple[object, ...] = ()
    while True:
        try:
            pipe.send((call(*arguments), None))
        except Exception as error:  # noqa: BLE001 - any failure is sent to the parent, which raises it
            traceback.print_exc()
            pipe.send((None, f"{type(error).__name__}: {error}"))
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        call = getattr(served, method)


def _fill(holding: Holding, layout: Layout) -> dict[str, torch.Tensor]:
    tensors = {name: torch.zeros(spec.shape, dtype=torch_dtype(spec.dtype)) for name, spec in holding.tensors.items()}
    for piece in holding.pieces:
        target = box_of(tensors[piece.local_name], piece.local_offsets, piece.slice.shape)
        target.copy_(_values(piece.slice, layout))
    return tensors


def _values(box: Slice, layout: Layout) -> torch.Tensor:
    """Return the values of a box of a canonical tensor; every process makes the same."""
    generator = torch.Generator().manual_seed(zlib.crc32(box.name.encode()))
    whole = torch.empty(layout.canonical[box.name].shape).uniform_(-_STD, _STD, generator=generator)
    return box_of(whole, box.offsets, box.shape)


def _empty(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    return torch.empty(shape, dtype=torch_dtype(dtype))
