"""Trainer ranks and engine ranks as peers of one group: a store for small messages, a channel for bytes. No layouts.

Every wait has a deadline. The group is separate from the default process group of its processes (SGLang has one). It
cannot lose a member: after any failure it is broken for good, and its peers join a new one under a new name. Messages
of two versions never meet: a version went through all its rounds, or it ended the group.

A channel carries one round at a time and posts nothing ahead. A round that does not end by its deadline, or whose group
another peer has given up, is aborted; the process goes on, and the channel is of no use afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Protocol, assert_never

import torch
from torch import distributed as dist
from torch.distributed import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store, Work

from megarl.errors import WeightSyncError
from megarl.system.network import LOOPBACK
from megarl.weights.executors.meeting import (
    ABANDONED,
    Backend,
    StoreAddress,
    await_keys,
    first_sentence,
    forget_meeting,
    meet,
)

WATCH_S = 0.2
"""Interval at which a waiting peer checks whether another has given up."""
_NUM_TAGS = 1 << 30


class TransferGroup:
    """PeerNumbers 0..num_peers-1: trainer ranks first, then engine ranks."""

    def __init__(
        self, store: Store, channel: Channel | None, *, name: str, peer: int, num_peers: int, timeout_s: float
    ) -> None:
        self.name = name
        self.peer = peer
        self.num_peers = num_peers
        self.timeout_s = timeout_s
        """Deadline of one whole transfer, and of other operations without a timeout of their own."""
        self._store = store
        self._channel = channel
        self._num_rounds = 0
        self._barrier: int | None = None
        """The number of the last barrier."""
        self._end = "no bytes were to be exchanged in it"

    @classmethod
    def join(
        cls,
        address: StoreAddress,
        *,
        name: str,
        peer: int,
        num_peers: int,
        timeout_s: float,
        join_timeout_s: float | None = None,
        backend: Backend | None = "gloo",
        host: str = LOOPBACK,
    ) -> TransferGroup:
        """Meet the other peers at the store, within `join_timeout_s` or else `timeout_s`.

        `host` is the address at which other peers reach this process. Without a `backend` the group has a store only.
        """
        what = f"peer {peer} of {num_peers} joining {name}"
        with _failing_as(what):
            join_s = timeout_s if join_timeout_s is None else join_timeout_s
            deadline = time.monotonic() + join_s
            client = TCPStore(address.host, address.port, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
            store = PrefixStore(name, client)
            meet(store, "peer", peer, num_peers, join_s, what, partial(_refuse_abandoned, store, what))
            channel = _connect(backend, store, peer=peer, num_peers=num_peers, deadline=deadline, host=host, what=what)
        return cls(store, channel, name=name, peer=peer, num_peers=num_peers, timeout_s=timeout_s)

    @property
    def wire_device(self) -> torch.device:
        """The device of buffers that travel."""
        return torch.device("cpu") if self._channel is None else self._channel.device

    def exchange(self, outgoing: Message | None, incoming: Message | None, *, tag: int, deadline: float) -> None:
        """Carry out one round of this peer: both messages have the same `tag`, and are over when this returns."""
        parts = [f"sending {outgoing.buffer.nbytes} bytes to peer {outgoing.peer}"] if outgoing else []
        parts += [f"receiving {incoming.buffer.nbytes} bytes from peer {incoming.peer}"] if incoming else []
        what = f"{self.name}: peer {self.peer} {' and '.join(parts)}"
        if self._channel is None:
            raise WeightSyncError(f"{what}: the group has ended, join a new group: {self._end}")
        with _failing_as(what):
            self._channel.exchange(
                outgoing, incoming, tag=tag, deadline=deadline, check=lambda: _refuse_abandoned(self._store, what)
            )

    @contextmanager
    def transfer(self) -> Iterator[float]:
        """Yield the deadline of one transfer. A failure ends the group for all peers: bytes may still be under way."""
        try:
            yield time.monotonic() + self.timeout_s
        except WeightSyncError as error:
            self.abandon(str(error))
            raise

    def report(self, key: str, payload: bytes) -> None:
        """Store a message for the peer that collects `key`."""
        with _failing_as(f"{self.name}: peer {self.peer} reporting {key}"):
            self._store.set(key, payload)  # type: ignore[arg-type]  # takes bytes as well

    def collect(self, keys: Sequence[str], timeout_s: float) -> dict[str, bytes]:
        """Wait for the messages under `keys` and return them; the error names missing ones."""
        what = f"{self.name}: peer {self.peer} collecting reports"
        with _failing_as(what):
            await_keys(self._store, keys, timeout_s, what, partial(_refuse_abandoned, self._store, what))
            return {key: self._store.get(key) for key in keys}

    def forget(self, keys: Sequence[str]) -> None:
        """Delete messages that were collected."""
        with _failing_as(f"{self.name}: peer {self.peer} forgetting reports"):
            for key in keys:
                self._store.delete_key(key)

    def next_round(self) -> int:
        """Return a number that is the same on all peers, provided that all call this equally often."""
        self._num_rounds += 1
        return self._num_rounds

    def barrier(self, is_moving: Callable[[], bool] | None = None) -> None:
        """Return once every peer has called this; there is as much time again while `is_moving` says so."""
        number = self.next_round()
        what = f"{self.name}: peer {self.peer} in barrier {number}"
        with _failing_as(what):
            check = partial(_refuse_abandoned, self._store, what)
            prefix = f"barrier {number} of peer"
            meet(self._store, prefix, self.peer, self.num_peers, self.timeout_s, what, check, is_moving)
            # Who is here has left the barrier before; its keys are of no use to anyone.
            if self._barrier is not None:
                forget_meeting(self._store, f"barrier {self._barrier} of peer", self.peer)
        self._barrier = number

    def abandon(self, reason: str) -> None:
        """Close the group, and end the waits of the other peers with this reason."""
        self.close(reason)
        with suppress(RuntimeError):
            self._store.set(ABANDONED, f"peer {self.peer} gave up: {reason}")

    def close(self, reason: str = "the group is closed") -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        self._end = reason


def _connect(
    backend: Backend | None, store: Store, *, peer: int, num_peers: int, deadline: float, host: str, what: str
) -> Channel | None:
    match backend:
        case None:
            return None
        case "gloo":
            timeout_s = max(WATCH_S, deadline - time.monotonic())
            return GlooChannel(store, peer=peer, num_peers=num_peers, timeout_s=timeout_s, host=host)
        case "nccl":
            from megarl.weights.executors.nccl import NcclChannel  # noqa: PLC0415 - NCCL is only on GPU machines

            check = partial(_refuse_abandoned, store, what)
            return NcclChannel(store, peer=peer, num_peers=num_peers, deadline=deadline, check=check)
        case _:
            assert_never(backend)


def _refuse_abandoned(store: Store, what: str) -> None:
    if store.check([ABANDONED]):
        raise WeightSyncError(f"{what}: {store.get(ABANDONED).decode()}")


@contextmanager
def _failing_as(what: str) -> Iterator[None]:
    try:
        yield
    except WeightSyncError as error:
        raise error if str(error).startswith(what) else WeightSyncError(f"{what}: {error}") from error
    except RuntimeError as error:
        raise WeightSyncError(f"{what} failed: {first_sentence(error)}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A contiguous buffer of bytes, on the channel's device, that goes to or comes from `peer`."""

    peer: int
    buffer: torch.Tensor


class Channel(Protocol):
    """Connects all peers of a group."""

    @property
    def device(self) -> torch.device:
        """The device of buffers that travel."""
        ...

    def exchange(
        self,
        outgoing: Message | None,
        incoming: Message | None,
        *,
        tag: int,
        deadline: float,
        check: Callable[[], None],
    ) -> None:
        """Return once both buffers may be touched again.

        Raises a RuntimeError or WeightSyncError after `deadline` on the clock of time.monotonic, and whatever `check`
        raises, which is called now and then. Both ends use the same `tag` where the channel has tags.
        """
        ...

    def close(self) -> None:
        """End what is under way, here and soon at the other peers. Returns within seconds, whatever they do."""
        ...


class _PointToPoint(Protocol):
    """The methods of torch's process groups that their type stubs lack."""

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work: ...

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work: ...


class GlooChannel:
    """Through host memory and TCP."""

    device = torch.device("cpu")

    def __init__(self, store: Store, *, peer: int, num_peers: int, timeout_s: float, host: str) -> None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        # All pairs connect now, not at first use: then a dead peer is a closed connection, noticed at once.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host, lazy_init=False)]
        options._timeout = timedelta(seconds=timeout_s)
        self._group: _PointToPoint | None = dist.ProcessGroupGloo(store, peer, num_peers, options)  # type: ignore[assignment]

    def exchange(
        self,
        outgoing: Message | None,
        incoming: Message | None,
        *,
        tag: int,
        deadline: float,
        check: Callable[[], None],
    ) -> None:
        assert self._group is not None, "the channel is closed"
        works = []
        if incoming is not None:
            works.append(self._group.recv([incoming.buffer], incoming.peer, tag % _NUM_TAGS))
        if outgoing is not None:
            works.append(self._group.send([outgoing.buffer], outgoing.peer, tag % _NUM_TAGS))
        # In a thread: gloo sometimes leaves a send waiting whose receiver has closed the connection, and only a
        # timeout, which ends the whole group, gets it back.
        outcome: SimpleQueue[RuntimeError | None] = SimpleQueue()
        Thread(target=_wait_for, args=(works, deadline, outcome), daemon=True).start()
        while True:
            try:
                error = outcome.get(timeout=WATCH_S)
                break
            except Empty:
                check()
        if error is not None:
            raise error

    def close(self) -> None:
        # Dropping the process group closes its connections; gloo's `shutdown` leaves them open.
        self._group = None


def _wait_for(works: list[Work], deadline: float, outcome: SimpleQueue[RuntimeError | None]) -> None:
    try:
        for work in works:
            work.wait(timedelta(seconds=max(WATCH_S, deadline - time.monotonic())))
        outcome.put(None)
    except RuntimeError as error:
        outcome.put(error)
