"""Which of this machine's addresses the run listens on: loopback, or the one in the network that the recipe names."""

from __future__ import annotations

import ipaddress
import socket

import psutil

from megarl.errors import MachineError

LOOPBACK = "127.0.0.1"


def address_in(network: str) -> str:
    """The address of this machine that lies in `network`, such as 10.0.0.0/8 or a single address."""
    wanted = ipaddress.ip_network(network, strict=False)
    own = _own_addresses()
    found = [address for address in own if ipaddress.ip_address(address) in wanted]
    if not found:
        raise MachineError(f"network.bind: {socket.gethostname()} has no address in {network}; it has {', '.join(own)}")
    return found[0]


def interface_of(address: str) -> str | None:
    """The name of the interface that has it, such as lo; None for an address that is translated on its way here."""
    return _own_addresses().get(address)


def _own_addresses() -> dict[str, str]:
    """IPv4, which every library below can do; by address, the interface."""
    return {
        entry.address: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
    }
