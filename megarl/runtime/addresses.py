"""By which address the processes of a run reach the machine they are asked on."""

from __future__ import annotations

import ray

from megarl.system.network import address_in


def own_address(bind: str | None) -> str:
    """As `network.bind` says, or as Ray knows this machine: loopback where Ray serves this machine alone."""
    if bind is not None:
        return address_in(bind)
    address: str = ray.util.get_node_ip_address()
    return address
