"""A Ray on this machine alone: one node for a private run, several for a rehearsal, with a network of their own.

It starts nodes and joins none.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from megarl.config.section import CPU_SLOT
from megarl.env import SEVERAL_NODES_ENVIRONMENT, current_environment
from megarl.errors import MachineError
from megarl.system.guard import start_guarded, stop_guarded
from megarl.system.network import LOOPBACK

_STOP_GRACE_S = 20.0
_START_TIMEOUT_S = 360.0
_MAX_STARTS = 8
"""Starts of one node: Ray gives a node 30 s to register, which a busy machine may not keep."""
_POLL_S = 0.1
_CLONE_NEWNET = 0x40000000
_BRIDGE = "nodes"
_STARTED = b"Ray runtime started"
"""In the output of `ray start`."""


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
        network: NodeNetwork | None = None,
    ) -> None:
        self._device = device
        self._network = network
        self._log_folder = log_folder
        self._has_several_nodes = has_several_nodes
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._last_words: list[str] = []
        # Only this user enters it: Ray makes its own folder in it, with sockets, writable for all.
        # In /tmp: the path of a socket must be short.
        self._folder = tempfile.mkdtemp(prefix="megarl-ray-", dir="/tmp")
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
            words = [
                "--head",
                "--port",
                self._port,
                "--include-dashboard",
                "false",
                "--temp-dir",
                f"{self._folder}/ray",
            ]
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
        shutil.rmtree(self._folder, ignore_errors=True)

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
        nodes.wait_started()
        yield nodes
    finally:
        nodes.stop()


class NodeNetwork:
    """A network of nodes on this machine: each has a network namespace of its own, behind one bridge.

    All of it is in a namespace that this process enters for good, and is held by open files: nothing outside of it
    changes, and it is gone when its last process has ended, even by a kill. Needs root, `ip` and `nsenter`. Namespaces
    go by the number of their node; the head, number 0, is in that of this process.
    """

    def __init__(self) -> None:
        """Raise MachineError with the reason if this machine does not allow it; nothing has changed then."""
        missing = [program for program in ("ip", "nsenter") if shutil.which(program) is None]
        if missing:
            raise MachineError(f"there is no {' and no '.join(missing)}")
        # Tried in a thread first, whose namespace ends with it.
        with ThreadPoolExecutor(1) as thread:
            os.close(thread.submit(self._lay_bridge).result())
        self._files: dict[int, int] = {0: self._lay_bridge()}

    def address_of(self, number: int) -> str:
        return f"10.0.0.{number + 1}"

    def entering(self, number: int) -> list[str]:
        """Return the words that run a command in a node's namespace, which is made at its first use."""
        if number not in self._files:
            with ThreadPoolExecutor(1) as thread:
                self._files[number] = thread.submit(_new_namespace).result()
            self._connect(number)
        return ["nsenter", f"--net={self._path(number)}"]

    def close(self) -> None:
        """Give up the namespaces, which end with their last process."""
        for file in self._files.values():
            os.close(file)
        self._files = {}

    def _lay_bridge(self) -> int:
        """Put the calling thread into a namespace with a bridge; return the file that holds it."""
        file = _new_namespace()
        _ip("link", "set", "lo", "up")
        _ip("link", "add", _BRIDGE, "type", "bridge")
        _ip("address", "add", f"{self.address_of(0)}/24", "dev", _BRIDGE)
        _ip("link", "set", _BRIDGE, "up")
        return file

    def _connect(self, number: int) -> None:
        inside = self.entering(number)
        port = f"node{number}"
        _ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", self._path(number))
        _ip("link", "set", port, "master", _BRIDGE, "up")
        _ip("link", "set", "lo", "up", inside=inside)
        _ip("address", "add", f"{self.address_of(number)}/24", "dev", "eth0", inside=inside)
        _ip("link", "set", "eth0", "up", inside=inside)

    def _path(self, number: int) -> str:
        return f"/proc/{os.getpid()}/fd/{self._files[number]}"


def _new_namespace() -> int:
    """Put the calling thread into a network namespace of its own; return a file that holds it."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
        raise MachineError(f"a network namespace is refused: {os.strerror(ctypes.get_errno())}")
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _ip(*words: str, inside: list[str] | None = None) -> None:
    done = subprocess.run([*(inside or []), "ip", *words], capture_output=True, text=True, check=False)  # noqa: S603 - our own words
    if done.returncode:
        raise MachineError(f"ip {' '.join(words)}: {done.stderr.strip()}")
