"""All trainer ranks as the peers of a transfer group, for as long as one operation of the weights layer needs it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megarl.train.topology import Topology
from megarl.weights.group import StoreAddress, StoreServer, TransferGroup

_ANY_PORT = 9


@contextmanager
def peer_group(topology: Topology, master_address: str, *, name: str, timeout_s: float) -> Iterator[TransferGroup]:
    """Peer r is rank r. Weights travel through host memory: the group is there for files, not for speed."""
    server = StoreServer(master_address) if topology.rank == 0 else None
    port = torch.tensor(server.address.port if server else 0, device=topology.device)
    dist.broadcast(port, src=0)
    group = TransferGroup.join(
        StoreAddress(host=master_address, port=int(port)),
        name=name,
        peer=topology.rank,
        num_peers=topology.world,
        timeout_s=timeout_s,
        host=_own_address(master_address),
    )
    try:
        yield group
    finally:
        group.close()
    # Rank 0 serves the store until nobody needs it.
    dist.barrier()


def _own_address(peer_address: str) -> str:
    """The address of this machine from which `peer_address` is reached. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer_address, _ANY_PORT))
        address: str = probe.getsockname()[0]
    return address
