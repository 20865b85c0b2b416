"""The addresses of this machine that a run listens on: loopback, or the one in the network that the recipe names."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable

import psutil

from megarl.env import RAY_ADDRESS
from megarl.errors import MachineError

LOOPBACK = "127.0.0.1"
PRIVATE = "private"
_ANYWHERE = "198.51.100.1"
"""An address outside of every private network."""
_ANY_PORT = 9


def address_in(network: str, *, towards: str | None = None) -> str:
    """Return this machine's address in `network`: 10.0.0.0/8, one address, or `PRIVATE` for one that is not public.

    Of several that are not public it is the one by which this machine reaches `towards`, which is Ray's head unless it
    is given, or else the one by which it leaves its network: many nodes of clusters cannot leave it.
    """
    own = _own_addresses()
    if network == PRIVATE:
        return _private_address(own, RAY_ADDRESS.read() if towards is None else towards)
    addresses = ipaddress.ip_network(network, strict=False)
    address = next((each for each in own if ipaddress.ip_address(each) in addresses), None)
    if address is None:
        raise MachineError(f"network.bind: {socket.gethostname()} has no address in {network}; it has {', '.join(own)}")
    return address


def _private_address(own: Iterable[str], towards: str) -> str:
    parsed = [ipaddress.ip_address(each) for each in own]
    private = [str(each) for each in parsed if not (each.is_global or each.is_loopback or each.is_link_local)]
    if len(private) == 1:
        return private[0]
    ways = [_address_towards((host, _ANY_PORT)) for host in (towards.rpartition(":")[0], _ANYWHERE)]
    if used := [each for each in ways if each in private]:
        return used[0]
    what = "it has no private address"
    if private:
        what = f"none of these is used towards Ray's head or by its default route: {', '.join(private)}"
    raise MachineError(
        f"network.bind: {socket.gethostname()}: {what}; name the network that the machines share, such as 10.1.0.0/16"
    )


def _address_towards(target: tuple[str, int]) -> str | None:
    """Return the address from which this machine sends to a host; None without a way to it. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(target)
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
