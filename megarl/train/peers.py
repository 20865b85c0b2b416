"""Where the ranks of one trainer meet for what they do beside training: transfer groups apart from training's own."""

from __future__ import annotations

import socket

import torch
import torch.distributed as dist

from megarl.train.topology import Topology
from megarl.weights.executors.group import StoreAddress, StoreServer, TransferGroup

_ANY_PORT = 9


class Peers:
    """Made by all ranks together; afterwards groups are joined from any thread, without training's own groups."""

    def __init__(self, topology: Topology, master_address: str, *, timeout_s: float) -> None:
        # Rank 0 serves the store for as long as its trainer lives.
        self._server = StoreServer(master_address) if topology.rank == 0 else None
        port = torch.tensor(self._server.address.port if self._server else 0, device=topology.device)
        dist.broadcast(port, src=0)
        self._address = StoreAddress(host=master_address, port=int(port))
        self._topology = topology
        self._timeout_s = timeout_s

    def join(self, name: str) -> TransferGroup:
        """Peer r is rank r. Weights travel through host memory: the group is there for files, not for speed."""
        return TransferGroup.join(
            self._address,
            name=name,
            peer=self._topology.rank,
            num_peers=self._topology.world,
            timeout_s=self._timeout_s,
            host=_own_address(self._address.host),
        )


def _own_address(peer_address: str) -> str:
    """The address of this machine from which `peer_address` is reached. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer_address, _ANY_PORT))
        address: str = probe.getsockname()[0]
    return address
