"""A server that answers all requests at once, or after a fixed time, with replies shaped like SGLang's.

It computes nothing: what a benchmark measures on the other side is the cost of asking, reading and checking.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from megarl.engine.batches import Line
from megarl.system.network import LOOPBACK

_START_TIMEOUT_S = 120.0
_BACKLOG = 2048  # uvicorn's, and so SGLang's


def reply_content(num_tokens: int, *, vocab: int, is_flat: bool) -> bytes:
    """Return a reply of `/generate` of version 0 that was cut at its length; `is_flat` as `megarl.engine.server`."""
    random = np.random.default_rng(num_tokens)
    token_ids = random.integers(3, vocab, num_tokens, dtype=np.int32)
    logprobs = (-random.exponential(0.5, num_tokens)).astype(np.float32)
    entries: object
    if is_flat:
        arrays = {"logprobs": logprobs.astype("<f4"), "token_ids": token_ids.astype("<i4")}
        entries = {name: b64encode(array.tobytes()).decode() for name, array in arrays.items()}
    else:
        pairs = zip(logprobs.astype(float).tolist(), token_ids.tolist(), strict=True)
        entries = [[logprob, token_id, None] for logprob, token_id in pairs]
    meta = {
        "id": "0" * 32,
        "finish_reason": {"type": "length", "length": num_tokens},
        "prompt_tokens": 64,
        "weight_version": "0",
        "num_retractions": 0,
        "input_token_logprobs": [],
        "output_token_logprobs": entries,
        "reasoning_tokens": 0,
        "completion_tokens": num_tokens,
        "cached_tokens": 0,
        "weight_versions": [{"version": "0", "start": 0, "end": num_tokens}],
        "e2e_latency": 1.0,
    }
    reply = {"output_ids": token_ids.tolist(), "meta_info": meta}
    return json.dumps(reply, separators=(",", ":")).encode()


@contextmanager
def instant_engine(content: bytes, *, num_ports: int, delay_s: float = 0.0) -> Iterator[list[int]]:
    """Run the server in a process of its own; yields its ports."""
    with serving(_serve, content, num_ports, delay_s) as ports:
        yield ports


@contextmanager
def serving(target: Callable[..., None], *arguments: object) -> Iterator[Any]:
    """Run `target` in a process of its own, with a pipe as its last argument; yields what it sends first."""
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(*arguments, sending), daemon=True)
    process.start()
    try:
        if not receiving.poll(_START_TIMEOUT_S):
            raise TimeoutError(f"the server did not start within {_START_TIMEOUT_S:.0f} s")
        yield receiving.recv()
    finally:
        process.terminate()
        process.join()


def _serve(content: bytes, num_ports: int, delay_s: float, started: Connection) -> None:
    async def serve() -> None:
        loop = asyncio.get_running_loop()
        servers = [
            await loop.create_server(lambda: _Answer(content, delay_s), LOOPBACK, 0, backlog=_BACKLOG)
            for _ in range(num_ports)
        ]
        started.send([server.sockets[0].getsockname()[1] for server in servers])
        await asyncio.gather(*(server.serve_forever() for server in servers))

    asyncio.run(serve())


def _with_head(content: bytes) -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


_INFO = _with_head(b'{"weight_version":"0"}')
"""The reply to probes."""


class _Answer(asyncio.Protocol):
    """One connection; it stays open between requests, as SGLang's do."""

    def __init__(self, content: bytes, delay_s: float) -> None:
        self._content = content
        self._delay_s = delay_s
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, body = self._received.partition(b"\r\n\r\n")
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        if not separator or len(body) < (int(lengths[0].split(b":")[1]) if lengths else 0):
            return
        self._received = b""
        if head.startswith(b"GET "):
            self._answer(_INFO)
        else:
            num_requests = body.count(b'"rid":')  # each has one
            lines = [Line(place=place, status_code=200, content=self._content) for place in range(num_requests)]
            reply = _with_head(b"".join(line.encode() for line in lines))
            asyncio.get_running_loop().call_later(self._delay_s, self._answer, reply)

    def _answer(self, reply: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(reply)
