"""A Ray on this machine alone: one node for a private run, several for a rehearsal. It starts nodes and joins none."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

from megarl.config.section import CPU_SLOT
from megarl.env import SEVERAL_NODES_ENVIRONMENT, current_environment
from megarl.errors import MachineError
from megarl.system.guard import start_guarded, stop_guarded
from megarl.system.network import LOOPBACK

_STOP_GRACE_S = 20.0
_START_TIMEOUT_S = 360.0
_MAX_STARTS = 3
"""Starts of one node: Ray gives a node 30 s to register, which a busy machine may not keep."""
_POLL_S = 0.1
_STARTED = b"Ray runtime started"
"""In the output of `ray start`."""


class LocalNetwork(Protocol):
    """Addresses of local nodes, by number; the head is 0."""

    def address_of(self, number: int) -> str: ...

    def entering(self, number: int) -> list[str]:
        """Return the words that run a command where a node has its address."""
        ...


class LocalRay:
    """The nodes of a Ray on this machine. All of them end with this process.

    Nodes are children in sessions of their own, not `ray.init()`: a signal to our process group must not end Ray before
    everything that runs on it is down. A single node listens on 127.0.0.1. Ray starts further nodes only beside a head
    with another address, so several have addresses in `network`, or loopback addresses of their own. The latter follow
    from the head's port, which no other Ray on this machine has: two rehearsals may run side by side.
    """

    def __init__(
        self,
        *,
        device: str,
        log_folder: Path,
        has_several_nodes: bool = False,
        network: LocalNetwork | None = None,
    ) -> None:
        self._device = device
        self._network = network
        self._log_folder = log_folder
        self._has_several_nodes = has_several_nodes
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._last_words: list[str] = []
        (self._port,) = _free_ports(1)
        self.address = f"{self._address_of(0)}:{self._port}"
        """The head's, for processes that join."""

    def start_node(self, *, num_slots: int, num_gpus: int | None = None) -> str:
        """Start the head, or a further node after it; return the node's address. It may not have joined yet.

        `num_gpus` are declared whether they are there or not, to try a placement; without it Ray counts them.
        The object store takes what Ray takes by default: 30 % of the free memory, less where /dev/shm is smaller.
        """
        number = len(self._nodes)
        node = self._address_of(number)
        if number == 0:
            words = ["--head", "--port", self._port, "--include-dashboard", "false"]
        else:
            self.wait_started()
            words = ["--address", self.address]
        words += [*_agent_ports(), "--node-ip-address", node, "--num-cpus", str(num_slots + 2)]
        if self._device == "cpu":
            words += ["--resources", json.dumps({CPU_SLOT: num_slots})]
        if num_gpus is not None:
            words += ["--num-gpus", str(num_gpus)]
        self._last_words = words
        self._start(node, number)
        return node

    def _start(self, node: str, number: int) -> None:
        environment = {**current_environment(), **(SEVERAL_NODES_ENVIRONMENT if self._has_several_nodes else {})}
        inside = [] if self._network is None else self._network.entering(number)
        command = [*inside, sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *self._last_words]
        with self.log_of(number).open("wb") as log:
            self._nodes[node] = start_guarded(command, environment=environment, output=log)

    def log_of(self, number: int) -> Path:
        return self._log_folder / ("ray.log" if number == 0 else f"ray_node_{number}.log")

    def kill_node(self, node: str) -> None:
        """End every process of a node at once, as a power failure would."""
        stop_guarded(self._nodes[node], grace_s=0.0)

    def stop(self) -> None:
        """Stop all nodes, the head last; it alone ends in order, since nothing runs on the others any more."""
        for node, guard in reversed(self._nodes.items()):
            stop_guarded(guard, grace_s=_STOP_GRACE_S if node == self._address_of(0) else 0.0)

    def _address_of(self, number: int) -> str:
        if self._network is not None:
            return self._network.address_of(number)
        high, low = divmod(int(self._port), 256)
        return f"127.{high}.{low}.{number + 2}" if self._has_several_nodes else LOOPBACK

    def wait_started(self) -> None:
        """Wait until the last node has started: the next one would give up without a head, or take its ports."""
        deadline, num_starts = time.monotonic() + _START_TIMEOUT_S, 1
        number = len(self._nodes) - 1
        node, log = self._address_of(number), self.log_of(number)
        while _STARTED not in log.read_bytes():
            has_ended = self._nodes[node].poll() is not None
            if time.monotonic() > deadline or (has_ended and num_starts == _MAX_STARTS):
                raise MachineError(f"node {number} of the local Ray does not start; log: {log}")
            if has_ended:
                num_starts += 1
                stop_guarded(self._nodes[node], grace_s=0.0)
                self._start(node, number)
            time.sleep(_POLL_S)


def _free_ports(number: int) -> list[str]:
    """Return ports that are free on every address: a node with another address than 127.0.0.1 listens on all."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("", 0))) for _ in range(number)]
        return [str(listener.getsockname()[1]) for listener in listeners]


def _agent_ports() -> Iterator[str]:
    """Yield options that name a free port for each agent of a node.

    Without them a raylet ends itself when an agent has not reported its port within 15 s, as on a busy machine.
    """
    agents = ("dashboard-agent-grpc", "dashboard-agent-listen", "metrics-export", "runtime-env-agent")
    for agent, port in zip(agents, _free_ports(len(agents)), strict=True):
        yield from (f"--{agent}-port", port)


@contextmanager
def local_ray(nodes: LocalRay, *, num_slots: int, num_gpus: int | None = None) -> Iterator[LocalRay]:
    """Start the head and stop every node after the block."""
    try:
        nodes.start_node(num_slots=num_slots, num_gpus=num_gpus)
        yield nodes
    finally:
        nodes.stop()
