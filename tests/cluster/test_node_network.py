"""Nodes with network namespaces of their own: what one listens on, others reach by its address and nobody else does."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megarl.cluster.local_ray import NodeNetwork
from megarl.errors import MachineError
from tests.repository import ROOT

SCENARIO = """
import socket, subprocess, sys
from megarl.cluster.local_ray import NodeNetwork

LISTEN = (
    "import socket, sys; listener = socket.create_server((sys.argv[1], 5555)); print('up', flush=True);"
    "print(listener.accept()[1][0], flush=True); print(listener.accept()[1][0], flush=True)"
)
REACH = "import socket, sys; socket.create_connection((sys.argv[1], 5555), timeout=20).close()"
network = NodeNetwork()
first, second = network.entering(1), network.entering(2)
assert network.entering(1) == first
address = network.address_of(1)
words = [*first, sys.executable, "-c", LISTEN, address]
node = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
assert node.stdout.readline().strip() == "up"
subprocess.run([*second, sys.executable, "-c", REACH, address], check=True)
subprocess.run([sys.executable, "-c", REACH, address], check=True)
assert node.stdout.read().split() == [network.address_of(2), network.address_of(0)]
# The same port of another node is free, and its loopback is its own.
refused = subprocess.run([*second, sys.executable, "-c", REACH, "127.0.0.1"], capture_output=True)
assert b"refused" in refused.stderr, refused.stderr
network.close()
print("done")
"""


@pytest.mark.needs("root")
def test_nodes_reach_each_other_over_a_bridge() -> None:
    """In a process of its own, whose network is another one from then on."""
    done = subprocess.run([sys.executable, "-c", SCENARIO], capture_output=True, text=True, cwd=ROOT, check=False)
    if "MachineError" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.stdout.endswith("done\n"), done.stderr


def test_the_reason_is_told_where_a_program_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(MachineError, match="there is no ip and no nsenter"):
        NodeNetwork()
