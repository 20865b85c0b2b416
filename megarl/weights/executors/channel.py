"""Carries the rounds of a transfer: a buffer leaves, a buffer arrives, and both are done. No layouts, no plan.

A channel carries one round at a time and posts nothing ahead. A round that does not end by its deadline, or whose group
another peer has given up, is aborted; the process goes on, and the channel is of no use afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Protocol

import torch
from torch import distributed as dist
from torch.distributed.distributed_c10d import Store, Work

WATCH_S = 0.2
"""Interval at which a waiting peer checks whether another has given up."""
_NUM_TAGS = 1 << 30


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
