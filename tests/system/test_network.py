from __future__ import annotations

import pytest

from megarl.errors import MachineError
from megarl.system import network as module
from megarl.system.network import PRIVATE, address_in, interface_of


@pytest.mark.parametrize("network", ["127.0.0.0/8", "127.0.0.1", "127.0.0.1/32"])
def test_the_address_of_this_machine_in_a_network(network: str) -> None:
    assert address_in(network) == "127.0.0.1"
    assert interface_of(address_in(network)) == "lo"


def test_a_network_this_machine_is_not_in() -> None:
    with pytest.raises(MachineError, match=r"network.bind: .* has no address in 203.0.113.0/24; it has .*127.0.0.1"):
        address_in("203.0.113.0/24")


def test_an_address_that_is_no_interface_has() -> None:
    assert interface_of("203.0.113.7") is None


PUBLIC, STORAGE, CLUSTER = "8.8.4.4", "192.168.7.2", "10.1.0.5"


HEAD = "10.1.0.1:6379"


def routed(monkeypatch: pytest.MonkeyPatch, own: tuple[str, ...], ways: dict[str, str]) -> None:
    """Let this machine have these addresses, and use them towards some hosts."""
    monkeypatch.setattr(module, "_own_addresses", lambda: dict.fromkeys(own, "eth"))
    monkeypatch.setattr(module, "_address_towards", lambda target: ways.get(target[0]))


@pytest.mark.parametrize(
    ("own", "ways", "expected"),
    [
        (("127.0.0.1", CLUSTER), {}, CLUSTER),
        (("127.0.0.1", PUBLIC, CLUSTER), {module._ANYWHERE: PUBLIC}, CLUSTER),
        (("127.0.0.1", "169.254.3.4", STORAGE, CLUSTER), {module._ANYWHERE: CLUSTER}, CLUSTER),
        ((STORAGE, CLUSTER), {"10.1.0.1": CLUSTER}, CLUSTER),
        ((STORAGE, CLUSTER), {module._ANYWHERE: STORAGE, "10.1.0.1": CLUSTER}, CLUSTER),
        ((PUBLIC, STORAGE, CLUSTER), {module._ANYWHERE: PUBLIC, "10.1.0.1": CLUSTER}, CLUSTER),
    ],
    ids=["the only one", "never public", "default route", "no default route", "another default route", "a public one"],
)
def test_the_private_address_of_this_machine(
    own: tuple[str, ...], ways: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    routed(monkeypatch, own, ways)
    assert address_in(PRIVATE, towards=HEAD) == expected
    monkeypatch.setenv("RAY_ADDRESS", HEAD)
    assert address_in(PRIVATE) == expected


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (("127.0.0.1", PUBLIC), "it has no private address; name the network that the machines share"),
        (
            (STORAGE, CLUSTER, PUBLIC),
            f"none of these is used towards Ray's head or by its default route: {STORAGE}, {CLUSTER}; name",
        ),
    ],
)
def test_a_machine_without_one_private_address_is_told_to_name_the_network(
    own: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    routed(monkeypatch, own, {module._ANYWHERE: PUBLIC})
    with pytest.raises(MachineError, match=message):
        address_in(PRIVATE)


def test_the_address_towards_a_host_of_this_machine_is_its_own() -> None:
    assert module._address_towards(("127.0.0.1", 9)) == "127.0.0.1"
