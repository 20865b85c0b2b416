"""A network for nodes on one machine: each has a network namespace of its own, and packets between them cross a bridge.

Everything is in a namespace that this process enters for good, and is held by open files: nothing outside of it
changes, and all of it is gone when its last process has ended, even by a kill. Needs root, `ip` and `nsenter`.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

from megarl.errors import MachineError

_CLONE_NEWNET = 0x40000000
_BRIDGE = "nodes"


class NodeNetwork:
    """Namespaces by the number of their node; the head, number 0, is in that of this process."""

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
