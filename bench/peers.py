"""Many peers of a publish on one GPU: memory of their NCCL communicator, the time to make it, and rounds over it.

Each peer is a process with a host id of its own: NCCL takes it for a node and uses sockets. So rates say nothing about
a network, and memory nothing about NVLink. Processes are forked from one that has imported torch and has no context.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Literal

import torch
from torch import distributed as dist

from bench.figures import Failure, Figure
from megarl.env import NCCL_MEMORY, NCCL_SWITCH, update_environment
from megarl.planner.memory import COMMUNICATOR_BYTES, NCCL_BYTES, PUBLISH_COMMUNICATOR_BYTES
from megarl.weights.executors.group import Message, TransferGroup
from megarl.weights.executors.meeting import StoreAddress, StoreServer

_NUM_CUMEM = 32
"""Processes with NCCL_CUMEM_ENABLE=1: half of the largest mixed group."""
_CONNECTED = (1, 2, 4, 8, 16, 32)
"""Numbers of peers that each has sent to, or received from, when memory is measured."""
_SMALL_BYTES = 64 << 10
_PHASE_TIMEOUT_S = 40.0
_START_TIMEOUT_S = 120.0
_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersOptions:
    device: Literal["cpu", "cuda"] = "cuda"
    """Peers on a CPU use gloo and hold no device memory."""
    sizes: tuple[int, ...] = (8, 16, 32, 64)
    reducing_sizes: tuple[int, ...] = (2, 8)
    """Ranks of an all-reduce by torch. Kernels that wait for each other take turns on one GPU: more take minutes."""
    bucket_bytes: int = 16 << 20
    budget_s: float = 185.0
    """Groups that would begin later are left out."""


Outcomes = Iterator[Figure | Failure]


def measure_peers(options: PeersOptions) -> Outcomes:
    """Yield the figures of groups with NCCL_CUMEM_ENABLE 0, 1 and mixed, small ones first."""
    began = time.monotonic()
    num_plain = max(options.sizes)
    num_cumem = min(_NUM_CUMEM, num_plain)
    with _started(["0"] * num_plain + ["1"] * num_cumem, options) as processes:
        seconds = time.monotonic() - began
        yield _figure("contexts", f"start of {len(processes)} processes with contexts", seconds, "s", "", 1.0)
        plain, cumem = processes[:num_plain], processes[num_plain:]
        mixed = [process for pair in zip(plain, cumem, strict=False) for process in pair]
        parts: list[tuple[str, Sequence[_Process], Callable[..., Outcomes]]] = [
            (f"{size} peers, cumem {setting}", members[:size], _measure_group)
            for size in options.sizes
            for setting, members in (("0", plain), ("mixed", mixed), ("1", cumem))
            if size <= len(members)
        ]
        parts += [(f"all-reduce of {size} ranks", plain[:size], _measure_reduce) for size in options.reducing_sizes]
        for part, members, measure in parts:
            if time.monotonic() - began > options.budget_s:
                yield Failure(part=part, reason=f"no time is left of {options.budget_s:.0f} s")
                continue
            try:
                yield from measure(part, members, options)
            except _PeerError as error:
                yield Failure(part=part, reason=str(error))
                with suppress(_PeerError):
                    _close(members)


def _measure_group(part: str, members: Sequence[_Process], options: PeersOptions) -> Outcomes:
    """Half of the peers send, the others receive, as trainers and engines do."""
    server = StoreServer()
    free = members[0].ask(_Peer.free_bytes)
    num_peers, half = len(members), len(members) // 2

    def held(name: str) -> Figure:
        each = (free - members[0].ask(_Peer.free_bytes)) / num_peers
        planned = NCCL_BYTES + PUBLISH_COMMUNICATOR_BYTES
        against = f"planned with kernels, {planned / _MIB:.0f} MiB"
        return _figure(f"{part}, {name}", name, each / _MIB, "MiB a peer", against, _ratio(planned, each))

    joined = _call(members, _Peer.join, server.address, part, num_peers)
    yield _figure(f"{part}, join", "made in", max(joined), "s", "deadline of a phase", _PHASE_TIMEOUT_S / max(joined))
    yield held("made")
    for first, last in zip((0, *_CONNECTED), _CONNECTED, strict=False):
        if last <= half:
            _call(members, _Peer.shift, first, last, _SMALL_BYTES)
            yield held(f"connected to {last}")
    pair_s = _call([members[0], members[half]], _Peer.shift, 0, 1, options.bucket_bytes)[1]
    pair = options.bucket_bytes / pair_s / 1e9
    for name, seconds, num_buckets in (
        (f"{half} senders to one receiver", _call(members, _Peer.gather, options.bucket_bytes)[half], half),
        (f"one sender to {half} receivers", _call(members, _Peer.scatter, options.bucket_bytes)[0], half),
        (f"{half} pairs at once", max(_call(members, _Peer.shift, 0, 1, options.bucket_bytes)), half),
    ):
        rate = num_buckets * options.bucket_bytes / seconds / 1e9
        yield _figure(f"{part}, {name}", name, rate, "GB/s", f"one pair alone, {pair:.2f} GB/s", rate / pair)
    _close(members)
    yield held("after its end")


def _measure_reduce(part: str, members: Sequence[_Process], options: PeersOptions) -> Outcomes:
    """The ring of a group of ranks, by torch; the second sum shows what a communicator adds to loaded kernels."""
    del options
    for number in ("first", "second"):
        server = StoreServer()
        free = members[0].ask(_Peer.free_bytes)
        _call(members, _Peer.reduce, server.address, len(members))
        each = (free - members[0].ask(_Peer.free_bytes)) / len(members)
        against = f"planned {COMMUNICATOR_BYTES / _MIB:.0f} MiB"
        name = f"{number} communicator"
        yield _figure(f"{part}, {name}", name, each / _MIB, "MiB a rank", against, _ratio(COMMUNICATOR_BYTES, each))
        _close(members)


def _figure(key: str, name: str, value: float, unit: str, against: str, ratio: float) -> Figure:
    part, _, _ = key.rpartition(", ")
    named = f"{part}: {name}" if part else name
    return Figure(key=f"peers, {key}", name=named, value=value, unit=unit, against=against, ratio=ratio)


def _ratio(planned: float, measured: float) -> float:
    return planned / measured if measured > 0 else 0.0


# --- processes ------------------------------------------------------------------------------------------------------


class _PeerError(Exception):
    """A peer failed, died or is late."""


class _Process:
    """One peer's process, as the parent has it."""

    def __init__(self, number: int, cumem: str, options: PeersOptions) -> None:
        # A server that has imported this module forks the processes: none of them imports torch again.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self.number = number
        self._num_calls = 0
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(number, cumem, options.device, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, method: Callable[..., object], *arguments: object) -> None:
        self._num_calls += 1
        try:
            self._pipe.send((self._num_calls, method.__name__, arguments))
        except OSError as error:
            raise _PeerError(f"process {self.number} has ended") from error

    def result(self, deadline: float) -> float:
        """Return the answer of the last call; those of calls that were late are passed over."""
        call, answer = 0, None
        try:
            while call != self._num_calls:
                if not self._pipe.poll(max(0.0, deadline - time.monotonic())):
                    raise _PeerError(f"process {self.number} does not answer in time")
                call, answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise _PeerError(f"process {self.number} has ended") from error
        if isinstance(answer, str):
            raise _PeerError(f"process {self.number}: {answer}")
        assert isinstance(answer, float)
        return answer

    def ask(self, method: Callable[..., float], *arguments: object) -> float:
        self.begin(method, *arguments)
        return self.result(time.monotonic() + _PHASE_TIMEOUT_S)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


@contextmanager
def _started(settings: Sequence[str], options: PeersOptions) -> Iterator[list[_Process]]:
    processes: list[_Process] = []
    try:
        for number, cumem in enumerate(settings):
            processes.append(_Process(number, cumem, options))
            processes[-1].begin(_Peer.warm_up, options.bucket_bytes)
        deadline = time.monotonic() + _START_TIMEOUT_S
        for process in processes:
            process.result(deadline)
        yield processes
    finally:
        for process in processes:
            process.kill()


def _call(members: Sequence[_Process], method: Callable[..., float], *arguments: object) -> list[float]:
    """Call a method of all members at once; every answer is read, so that none is left for the next call."""
    for member in members:
        member.begin(method, *((members.index(member), *arguments) if method in _NUMBERED else arguments))
    deadline = time.monotonic() + _PHASE_TIMEOUT_S + 5.0
    answers: list[float] = []
    failure: _PeerError | None = None
    for member in members:
        try:
            answers.append(member.result(deadline))
        except _PeerError as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return answers


def _close(members: Sequence[_Process]) -> None:
    _call(members, _Peer.close)


class _Peer:
    """The process's own side. Methods return seconds, or bytes."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._group: TransferGroup | None = None

    def warm_up(self, bucket_bytes: int) -> float:
        """Take all memory besides that of communicators: the buffer, loaded kernels, the allocator's cache."""
        self._buffer = torch.zeros(bucket_bytes, dtype=torch.uint8, device=self._device)
        self._buffer.fill_(1)
        assert bool((self._buffer == 1).all())
        torch.full((_MIB // 4,), 1.0, device=self._device)[-1].item()
        return 0.0

    def free_bytes(self) -> float:
        return float(torch.cuda.mem_get_info()[0]) if self._device == "cuda" else 0.0

    def join(self, peer: int, address: StoreAddress, name: str, num_peers: int) -> float:
        began = time.monotonic()
        self._group = TransferGroup.join(
            address,
            name=name,
            peer=peer,
            num_peers=num_peers,
            timeout_s=_PHASE_TIMEOUT_S,
            backend="nccl" if self._device == "cuda" else "gloo",
        )
        return time.monotonic() - began

    def shift(self, first: int, last: int, num_bytes: int) -> float:
        """In round r, sender i sends to receiver i + r."""
        group, half = self._group_and_half()
        rounds = []
        for distance in range(first, last):
            if group.peer < half:
                rounds.append(half + (group.peer + distance) % half)
            else:
                rounds.append((group.peer - half - distance) % half)
        return self._exchange(rounds, num_bytes)

    def gather(self, num_bytes: int) -> float:
        """The first receiver receives from every sender in turn."""
        group, half = self._group_and_half()
        others = list(range(half)) if group.peer == half else [half] if group.peer < half else []
        return self._exchange(others, num_bytes)

    def scatter(self, num_bytes: int) -> float:
        """The first sender sends to every receiver in turn."""
        group, half = self._group_and_half()
        others = list(range(half, 2 * half)) if group.peer == 0 else [0] if group.peer >= half else []
        return self._exchange(others, num_bytes)

    def _group_and_half(self) -> tuple[TransferGroup, int]:
        assert self._group is not None
        return self._group, self._group.num_peers // 2

    def _exchange(self, others: Sequence[int], num_bytes: int) -> float:
        """Exchange with the others in turn; what arrives has the sender's number in every byte."""
        group, half = self._group_and_half()
        buffer = self._buffer[:num_bytes]
        began = time.monotonic()
        with group.transfer() as deadline:
            for other in others:
                message = Message(peer=other, buffer=buffer)
                if group.peer < half:
                    buffer.fill_(group.peer)
                    group.exchange(message, None, tag=0, deadline=deadline)
                else:
                    group.exchange(None, message, tag=0, deadline=deadline)
                    assert bool((buffer == other).all()), f"wrong bytes from peer {other}"
        return time.monotonic() - began

    def reduce(self, rank: int, address: StoreAddress, num_ranks: int) -> float:
        store = dist.TCPStore(address.host, address.port, wait_for_workers=False)
        timeout = timedelta(seconds=_PHASE_TIMEOUT_S)
        backend = "nccl" if self._device == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=timeout)
        began = time.monotonic()
        values = torch.full((_MIB // 4,), float(rank), device=self._device)
        dist.all_reduce(values)
        expected = num_ranks * (num_ranks - 1) / 2
        assert values[-1].item() == expected, f"{values[-1].item()} is not {expected}"
        return time.monotonic() - began

    def close(self) -> float:
        if self._group is not None:
            self._group.close()
            self._group = None
        if dist.is_initialized():
            dist.destroy_process_group()
        return 0.0


_NUMBERED = (_Peer.join, _Peer.reduce)
"""Methods whose first argument is the peer's number in its group."""


def _serve(number: int, cumem: str, device: str, pipe: Connection) -> None:
    update_environment(
        {
            "NCCL_HOSTID": f"host {number}",
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_IB_DISABLE": "1",
            NCCL_MEMORY.name: cumem,
            NCCL_SWITCH.name: "0",
            # As trainers have it: receives of several processes wait on the device at once.
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        }
    )
    torch.set_num_threads(1)
    peer = _Peer(device)
    while True:
        try:
            call, method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer: float | str = float(getattr(peer, method)(*arguments))
        except Exception as error:  # noqa: BLE001 - goes to the parent
            answer = f"{type(error).__name__}: {error}"
        pipe.send((call, answer))
