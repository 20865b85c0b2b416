"""A socket of this process that listens inside of the network of another one, which reaches nothing else.

A network is entered by a short-lived process, this file, which makes the socket there and hands it over. Who made a
user namespace may enter it: no rights are needed that the maker of the box has not.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

_NS_GET_USERNS = 0xB701
_CLONE_NEWUSER = 0x1000_0000
_CLONE_NEWNET = 0x4000_0000
_TIMEOUT_S = 60.0
_BACKLOG = 128
_LOOPBACK = "127.0.0.1"


def listen_inside(pid: int) -> socket.socket:
    """Return a socket at a free port of the loopback device that the process sees; an OSError if it cannot be had."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-I", "-S", str(Path(__file__)), str(pid), str(theirs.fileno())]
        try:
            done = subprocess.run(  # noqa: S603 - this file
                command, pass_fds=(theirs.fileno(),), capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise OSError(f"its network was not entered within {_TIMEOUT_S:g} s") from None
        if done.returncode != 0:
            raise OSError(f"its network cannot be entered: {done.stderr.strip().rpartition(chr(10))[2]}")
        _, (descriptor,), _, _ = socket.recv_fds(ours, 1, 1)
    return socket.socket(fileno=descriptor)


def _main(pid: str, channel: str) -> None:
    network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    if os.geteuid() != 0:
        # The rights over a network are those in the user namespace that made it.
        _enter(fcntl.ioctl(network, _NS_GET_USERNS), _CLONE_NEWUSER)
    _enter(network, _CLONE_NEWNET)
    with socket.create_server((_LOOPBACK, 0), backlog=_BACKLOG) as listener:
        socket.send_fds(socket.socket(fileno=int(channel)), [b"+"], [listener.fileno()])


def _enter(namespace: int, kind: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.setns(namespace, kind) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    _main(*sys.argv[1:])
