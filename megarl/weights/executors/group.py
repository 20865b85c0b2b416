"""Trainer ranks and engine ranks as peers that exchange bytes; every wait has a deadline. No layouts, no engine.

The group is separate from the default process group of its processes (SGLang has one). It cannot lose a member: after
any failure it is broken for good, and its peers join a new one under a new name.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Literal, Protocol, TypeAlias, assert_never

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store, Work

from megarl.errors import WeightSyncError
from megarl.system.network import LOOPBACK

Backend: TypeAlias = Literal["gloo", "nccl"]

_POLL_S = 0.005
_WATCH_S = 0.2
"""Interval at which a waiting peer checks whether another has abandoned the group."""
_NUM_TAGS = 1 << 30
_ABANDONED = "abandoned"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    host: str
    port: int


class StoreServer:
    """A key-value store that this process serves while this object lives."""

    def __init__(self, host: str = LOOPBACK) -> None:
        # The store would listen on every interface; it takes over a listener that is bound to one.
        listener = socket.create_server((host, 0), backlog=1024)
        self.address = StoreAddress(host=host, port=listener.getsockname()[1])
        self._store = TCPStore(
            host,
            self.address.port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


class _PointToPoint(Protocol):
    """The methods of torch's process groups that their type stubs lack."""

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work: ...

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work: ...


class Pending(Protocol):
    """A send or receive under way. Its buffer must not be touched before `wait` returns."""

    def wait(self, deadline: float) -> None:
        """Wait until `deadline` on the clock of time.monotonic, or until another peer abandons the group."""
        ...


@dataclass(frozen=True, slots=True)
class _GlooPending:
    work: Work
    what: str
    store: Store

    def wait(self, deadline: float) -> None:
        # In a thread: gloo sometimes leaves a send waiting whose receiver has closed the connection, and only a
        # timeout, which ends the whole group, gets it back.
        outcome: SimpleQueue[RuntimeError | None] = SimpleQueue()
        seconds = max(_WATCH_S, deadline - time.monotonic())
        Thread(target=self._wait, args=(seconds, outcome), daemon=True).start()
        while True:
            with suppress(Empty):
                error = outcome.get(timeout=_WATCH_S)
                break
            _refuse_abandoned(self.store, self.what)
        if error is not None:
            raise WeightSyncError(f"{self.what} failed: {_reason(error)}") from error

    def _wait(self, seconds: float, outcome: SimpleQueue[RuntimeError | None]) -> None:
        try:
            self.work.wait(timedelta(seconds=seconds))
            outcome.put(None)
        except RuntimeError as error:
            outcome.put(error)


@dataclass(frozen=True, slots=True)
class _NcclPending:
    work: Work
    what: str
    store: Store

    def wait(self, deadline: float) -> None:
        # Waiting on NCCL work only orders the stream; the deadline needs the transfer itself to be over.
        with _failing_as(self.what):
            next_watch = time.monotonic() + _WATCH_S
            while not self.work.is_completed():
                now = time.monotonic()
                if now > deadline:
                    raise WeightSyncError(f"{self.what} failed: its deadline has passed")
                if now > next_watch:
                    _refuse_abandoned(self.store, self.what)
                    next_watch = now + _WATCH_S
                time.sleep(_POLL_S)
            self.work.wait()


class TransferGroup:
    """Peers 0..num_peers-1: trainer ranks first, then engine ranks."""

    def __init__(
        self,
        process_group: _PointToPoint,
        store: Store,
        *,
        downwards: _PointToPoint | None = None,
        name: str,
        peer: int,
        num_peers: int,
        timeout_s: float,
        backend: Backend = "gloo",
    ) -> None:
        self.name = name
        self.peer = peer
        self.num_peers = num_peers
        self.timeout_s = timeout_s
        """Deadline of one whole transfer, and of other operations without a timeout of their own."""
        self._backend = backend
        self._process_group: _PointToPoint | None = process_group
        # NCCL keeps one order for both directions between two peers: a waiting receive would hold up a send the other
        # way. So sends to lower peers have a group of their own.
        self._downwards = downwards
        self._store = store
        self._num_rounds = 0
        self._end = "the group is closed"

    @classmethod
    def join(
        cls,
        address: StoreAddress,
        *,
        name: str,
        peer: int,
        num_peers: int,
        timeout_s: float,
        backend: Backend = "gloo",
        host: str = LOOPBACK,
    ) -> TransferGroup:
        """Meet the other peers at the store. `host` is the address at which other peers reach this process."""
        what = f"peer {peer} of {num_peers} joining {name}"
        with _failing_as(what):
            timeout = timedelta(seconds=timeout_s)
            client = TCPStore(address.host, address.port, timeout=timeout, wait_for_workers=False)
            store = PrefixStore(name, client)
            store.set(f"peer {peer}", "")
            _await_keys(store, [f"peer {i}" for i in range(num_peers)], timeout_s, what)

            def connect(way: str) -> _PointToPoint:
                prefixed = PrefixStore(way, store)
                return _process_group(backend, prefixed, peer=peer, num_peers=num_peers, timeout=timeout, host=host)

            upwards = connect("up")
            downwards = connect("down") if backend == "nccl" else None
        return cls(
            upwards,
            store,
            downwards=downwards,
            name=name,
            peer=peer,
            num_peers=num_peers,
            timeout_s=timeout_s,
            backend=backend,
        )

    @property
    def wire_device(self) -> torch.device:
        """The device of buffers that travel."""
        return torch.device("cuda", torch.cuda.current_device()) if self._backend == "nccl" else torch.device("cpu")

    def send(self, buffer: torch.Tensor, *, peer: int, tag: int) -> Pending:
        """Start sending; the matching `receive` has the same tag."""
        what = f"{self.name}: peer {self.peer} sending {buffer.numel()} bytes to peer {peer}"
        with _failing_as(what):
            work = self._connected(what, is_down=peer < self.peer).send([buffer], peer, tag % _NUM_TAGS)
        return self._pending(work, what)

    def receive(self, buffer: torch.Tensor, *, peer: int, tag: int) -> Pending:
        what = f"{self.name}: peer {self.peer} receiving {buffer.numel()} bytes from peer {peer}"
        with _failing_as(what):
            work = self._connected(what, is_down=peer > self.peer).recv([buffer], peer, tag % _NUM_TAGS)
        return self._pending(work, what)

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
            _await_keys(self._store, keys, timeout_s, what)
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

    def barrier(self) -> None:
        """Return once every peer has called this."""
        number = self.next_round()
        self.report(f"barrier {number} of peer {self.peer}", b"")
        self.collect([f"barrier {number} of peer {peer}" for peer in range(self.num_peers)], self.timeout_s)

    def abandon(self, reason: str) -> None:
        """Close the group, and end the waits of the other peers with this reason."""
        self.close(reason)
        with suppress(RuntimeError):
            self._store.set(_ABANDONED, f"peer {self.peer} gave up: {reason}")

    def close(self, reason: str = "the group is closed") -> None:
        # Dropping the process group closes its connections; gloo's `shutdown` leaves them open.
        self._process_group = self._downwards = None
        self._end = reason

    def _pending(self, work: Work, what: str) -> Pending:
        match self._backend:
            case "gloo":
                return _GlooPending(work, what, self._store)
            case "nccl":
                return _NcclPending(work, what, self._store)
            case _:
                assert_never(self._backend)

    def _connected(self, what: str, *, is_down: bool) -> _PointToPoint:
        """Return the process group for one direction between two peers."""
        if self._process_group is None:
            raise WeightSyncError(f"{what}: the group has ended, join a new group: {self._end}")
        return self._downwards if is_down and self._downwards is not None else self._process_group


def abandon_group(address: StoreAddress, *, name: str, reason: str, timeout_s: float = 10) -> None:
    """End a group from outside when one of its peers is dead: all waits in it end."""
    with _failing_as(f"ending {name}"):
        client = TCPStore(address.host, address.port, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
        PrefixStore(name, client).set(_ABANDONED, reason)


def _process_group(
    backend: Backend, store: Store, *, peer: int, num_peers: int, timeout: timedelta, host: str
) -> _PointToPoint:
    match backend:
        case "gloo":
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            # All pairs connect now, not at first use: then a dead peer is a closed connection, noticed at once.
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host, lazy_init=False)]
            options._timeout = timeout
            return dist.ProcessGroupGloo(store, peer, num_peers, options)  # type: ignore[return-value]
        case "nccl":
            nccl_options = dist.ProcessGroupNCCL.Options()
            nccl_options._timeout = timeout
            return dist.ProcessGroupNCCL(store, peer, num_peers, nccl_options)  # type: ignore[return-value]
        case _:
            assert_never(backend)


def _await_keys(store: Store, keys: Sequence[str], timeout_s: float, what: str) -> None:
    # Polling, not store.wait: a blocked client would block the other threads of its process.
    deadline = time.monotonic() + timeout_s
    pause_s = _POLL_S
    while not store.check(list(keys)):
        _refuse_abandoned(store, what)
        if time.monotonic() > deadline:
            missing = [key for key in keys if not store.check([key])]
            raise WeightSyncError(f"{what}: after {timeout_s:g} s still no {', '.join(missing)}")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.1)


def _refuse_abandoned(store: Store, what: str) -> None:
    with _failing_as(what):
        if store.check([_ABANDONED]):
            raise WeightSyncError(f"{what}: {store.get(_ABANDONED).decode()}")


@contextmanager
def _failing_as(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise WeightSyncError(f"{what} failed: {_reason(error)}") from error


def _reason(error: RuntimeError) -> str:
    """Return the first sentence of an error, without the place in torch's source before it."""
    return re.sub(r"^\[[^\]]*\] ", "", str(error).strip().splitlines()[0]).split(". ")[0]
