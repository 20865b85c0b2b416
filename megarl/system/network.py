"""The addresses of this machine that a run listens on: loopback, or the one in the network that the recipe names."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable

import psutil

from megarl.errors import MachineError

LOOPBACK = "127.0.0.1"
PRIVATE = "private"
_ANYWHERE = ("198.51.100.1", 9)
"""An address outside of every private network."""


def address_in(network: str) -> str:
    """Return this machine's address in `network`: 10.0.0.0/8, one address, or `PRIVATE` for one that is not public."""
    own = _own_addresses()
    if network == PRIVATE:
        return _private_address(own)
    addresses = ipaddress.ip_network(network, strict=False)
    address = next((each for each in own if ipaddress.ip_address(each) in addresses), None)
    if address is None:
        raise MachineError(f"network.bind: {socket.gethostname()} has no address in {network}; it has {', '.join(own)}")
    return address


def _private_address(own: Iterable[str]) -> str:
    """Return the only address that is not public; of several, the one by which this machine leaves its network."""
    parsed = [ipaddress.ip_address(each) for each in own]
    private = [str(each) for each in parsed if not (each.is_global or each.is_loopback or each.is_link_local)]
    leaving = _leaving_address() if len(private) > 1 else None
    if len(private) == 1 or leaving in private:
        return leaving or private[0]
    what = "it has no private address"
    if private:
        what = f"none of these is used by its default route: {', '.join(private)}"
    raise MachineError(
        f"network.bind: {socket.gethostname()}: {what}; name the network that the machines share, such as 10.1.0.0/16"
    )


def _leaving_address() -> str | None:
    """Return the address of the default route. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ANYWHERE)
        except OSError:
            return None
        address: str = probe.getsockname()[0]
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


def reserve_port(host: str, port: int | None) -> socket.socket:
    """Return a bound socket that does not listen: the port is given to no other process, but the server can take it."""
    reservation = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        reservation.bind((host, port or 0))
    except OSError as error:
        reservation.close()
        message = f"cannot listen on {host}:{port or 'any port'}: {error.strerror}; choose another port"
        raise MachineError(message) from error
    return reservation
