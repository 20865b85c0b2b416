from __future__ import annotations

import pytest

from megarl.errors import MachineError
from megarl.system.network import address_in, interface_of


@pytest.mark.parametrize("network", ["127.0.0.0/8", "127.0.0.1", "127.0.0.1/32"])
def test_the_address_of_this_machine_in_a_network(network: str) -> None:
    assert address_in(network) == "127.0.0.1"
    assert interface_of(address_in(network)) == "lo"


def test_a_network_this_machine_is_not_in() -> None:
    with pytest.raises(MachineError, match=r"network.bind: .* has no address in 203.0.113.0/24; it has .*127.0.0.1"):
        address_in("203.0.113.0/24")


def test_an_address_that_is_no_interface_has() -> None:
    assert interface_of("203.0.113.7") is None
