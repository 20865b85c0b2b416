"""Servers in processes of their own, for the environments that speak to one."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(module: str, port: int, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run `python -m module PORT ...` until the port is open; kill it at the end."""
    command = [sys.executable, "-m", module, str(port), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.1)
        yield process
    finally:
        process.kill()
        process.wait()
