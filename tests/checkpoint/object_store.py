"""A server on loopback that speaks the S3 protocol, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from megarl.env import current_environment
from tests.episodes.servers import free_port

_READY_S = 120.0
BUCKET = "bucket"


@dataclass(frozen=True, kw_only=True)
class ObjectStore:
    port: int

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}/checkpoints"

    @property
    def environment(self) -> Mapping[str, str]:
        """What a client needs to reach it, and to give up soon."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",
        }


@contextmanager
def object_store(port: int | None = None) -> Iterator[ObjectStore]:
    """Serve an empty bucket until the block ends."""
    store = ObjectStore(port=port or free_port())
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(store.port)]
    server = subprocess.Popen(
        command, env=dict(current_environment()), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        _make_bucket(store, server)
        yield store
    finally:
        server.kill()
        server.wait()


def _make_bucket(store: ObjectStore, server: subprocess.Popen[bytes]) -> None:
    request = urllib.request.Request(f"http://127.0.0.1:{store.port}/{BUCKET}", method="PUT")
    deadline = time.monotonic() + _READY_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=10.0):
                return
        except (urllib.error.URLError, OSError):
            assert server.poll() is None, "the server ended"
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.1)
