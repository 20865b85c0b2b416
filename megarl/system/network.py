"""The addresses of this machine that a run listens on: loopback, or the one in the network that the recipe names."""

from __future__ import annotations

import ipaddress
import socket

import psutil

from megarl.errors import MachineError

LOOPBACK = "127.0.0.1"


def address_in(network: str) -> str:
    """Return this machine's address in `network`, such as 10.0.0.0/8 or a single address."""
    wanted = ipaddress.ip_network(network, strict=False)
    own = _own_addresses()
    address = next((each for each in own if ipaddress.ip_address(each) in wanted), None)
    if address is None:
        raise MachineError(f"network.bind: {socket.gethostname()} has no address in {network}; it has {', '.join(own)}")
    return address


def interface_of(address: str) -> str | None:
    """Return the interface that has the address, such as lo; None for an address behind a translation."""
    return _own_addresses().get(address)


def _own_addresses() -> dict[str, str]:
    """Return the interface of each IPv4 address; every library below supports IPv4."""
    return {
        entry.address: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
    }
