"""A server on loopback that speaks the protocol of S3 or of Google Cloud Storage, in a process of its own."""

from __future__ import annotations

import json
import socket
import socketserver
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Literal, TypeAlias

import pytest

from megarl.env import current_environment
from tests.episodes.servers import free_port

_READY_S = 120.0
BUCKET = "bucket"
Protocol: TypeAlias = Literal["s3", "gs"]
GS = pytest.param(
    "gs",
    marks=pytest.mark.skipif(
        find_spec("gcsfs") is None or find_spec("gcp_storage_emulator") is None,
        reason="needs `pip install 'megarl[gs]' gcp-storage-emulator`",
    ),
)
"""A parameter of tests: what reads and serves it is not in requirements.txt, because it brings gRPC along."""


@dataclass(frozen=True, kw_only=True)
class ObjectStore:
    port: int
    protocol: Protocol = "s3"

    @property
    def url(self) -> str:
        return f"{self.protocol}://{BUCKET}/checkpoints"

    @property
    def environment(self) -> Mapping[str, str]:
        """What a client needs to reach it, and to give up soon."""
        if self.protocol == "gs":
            # The kind of a bucket is asked for by gRPC, which the emulator does not serve.
            return {
                "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{self.port}",
                "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            }
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",
        }


@contextmanager
def object_store(protocol: Protocol = "s3") -> Iterator[ObjectStore]:
    """Serve an empty bucket until the block ends."""
    store = ObjectStore(port=free_port(), protocol=protocol)
    words = {
        "s3": ["moto.server", "-H", "127.0.0.1", "-p", str(store.port)],
        "gs": ["gcp_storage_emulator", "start", "-H", "127.0.0.1", "--port", str(store.port), "--in-memory"],
    }
    server = subprocess.Popen(
        [sys.executable, "-m", *words[protocol]],
        env=dict(current_environment()),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _make_bucket(store, server)
        yield store
    finally:
        server.kill()
        server.wait()


def _make_bucket(store: ObjectStore, server: subprocess.Popen[bytes]) -> None:
    place = f"http://127.0.0.1:{store.port}"
    request = urllib.request.Request(f"{place}/{BUCKET}", method="PUT")
    if store.protocol == "gs":
        body, kind = json.dumps({"name": BUCKET}).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{place}/storage/v1/b?project=test", body, kind, method="POST")
    deadline = time.monotonic() + _READY_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=10.0):
                return
        except (urllib.error.URLError, OSError):
            assert server.poll() is None, "the server ended"
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.1)


@contextmanager
def slow_network(store: ObjectStore, *, bytes_per_s: float, port: int = 0) -> Iterator[ObjectStore]:
    """Serve the same store over a network that brings so many of its bytes a second, at a free port or this one."""
    turn = threading.Lock()  # one network, however many connections

    class Door(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError), socket.create_connection(("127.0.0.1", store.port)) as inner:
                asking = threading.Thread(target=_pass_on, args=(self.request, inner), daemon=True)
                asking.start()
                while read := inner.recv(16 << 10):
                    with turn:
                        time.sleep(len(read) / bytes_per_s)
                    self.request.sendall(read)

    class Network(socketserver.ThreadingTCPServer):
        daemon_threads = True
        allow_reuse_address = True

    with Network(("127.0.0.1", port), Door) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield replace(store, port=server.server_address[1])
        finally:
            server.shutdown()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while read := source.recv(1 << 16):
            target.sendall(read)
        target.shutdown(socket.SHUT_WR)
