"""A wire that blocks as NCCL does, for threads of one process: a send ends only with its receive."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Condition

import numpy as np
import torch

from megarl.errors import WeightSyncError
from megarl.weights.algebra.slices import Holding
from megarl.weights.executors.group import WATCH_S, Message, TransferGroup
from megarl.weights.executors.meeting import StoreServer
from tests.weights.reference import Arrays

TIMEOUT_S = 60.0


class Wire:
    """Connects the channels of one group."""

    def __init__(self) -> None:
        self.changed = Condition()
        self.sends: dict[tuple[int, int], torch.Tensor] = {}
        """Buffers by (sender, receiver); taken out by the receiver."""
        self.num_bytes = 0

    def channel(self, peer: int) -> RendezvousChannel:
        return RendezvousChannel(self, peer)


class RendezvousChannel:
    """One peer's end of a wire."""

    device = torch.device("cpu")

    def __init__(self, wire: Wire, peer: int) -> None:
        self._wire = wire
        self._peer = peer

    def exchange(
        self,
        outgoing: Message | None,
        incoming: Message | None,
        *,
        tag: int,
        deadline: float,
        check: Callable[[], None],
    ) -> None:
        wire = self._wire
        sent = None if outgoing is None else (self._peer, outgoing.peer)
        wanted = None if incoming is None else (incoming.peer, self._peer)
        with wire.changed:
            if sent is not None and outgoing is not None:
                assert sent not in wire.sends, "a send was posted ahead"
                wire.sends[sent] = outgoing.buffer
                wire.changed.notify_all()
            while wanted is not None or sent in wire.sends:
                if wanted in wire.sends and incoming is not None:
                    buffer = wire.sends[wanted]
                    assert buffer.nbytes == incoming.buffer.nbytes, f"{buffer.nbytes} bytes, {incoming.buffer.nbytes}"
                    incoming.buffer.copy_(buffer)
                    wire.num_bytes += buffer.nbytes
                    del wire.sends[wanted]
                    wanted = None
                    wire.changed.notify_all()
                    continue
                if time.monotonic() > deadline:
                    raise WeightSyncError("the deadline has passed")
                wire.changed.wait(WATCH_S)
                check()

    def close(self) -> None:
        """Nothing is held."""


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
