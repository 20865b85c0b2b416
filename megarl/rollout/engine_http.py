"""HTTP exchanges with one server, each with a deadline and a limit on the reply. Knows no endpoint of SGLang."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp
import httpx
import msgspec
from httpx_aiohttp import AiohttpTransport

from megarl.types import JsonValue

MAX_REPLY_BYTES = 256 << 20
"""Limit of one reply: a million tokens with their log-probabilities take a quarter of it."""
_CONNECT_TIMEOUT_S = 60.0
"""Long: a busy process notices late that it is connected. Probes find out sooner that an engine is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpReply:
    status_code: int
    content: bytes

    def json(self) -> JsonValue:
        """Return the decoded content; None if it is not JSON."""
        try:
            value: JsonValue = msgspec.json.decode(self.content)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return None
        return value


class EngineHttp:
    def __init__(self, url: str, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._url = url
        self._urls: dict[str, httpx.URL] = {}
        # httpx's own client is left out: it costs the driver as much per request as the sending itself.
        # `verify` is of a session that is not used; its default reads all certificates of the machine for each engine.
        self._transport = transport or AiohttpTransport(client=_open_session, verify=False)

    async def close(self) -> None:
        await self._transport.aclose()

    async def exchange(
        self, method: str, path: str, body: Mapping[str, JsonValue] | None, key: str | None, timeout_s: float
    ) -> HttpReply:
        """Return the whole reply, whatever its status; raise httpx.HTTPError if it is not there within `timeout_s`."""
        if path not in self._urls:
            self._urls[path] = httpx.URL(f"{self._url}{path}")
        headers = {"Accept-Encoding": "identity"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        if body is not None:
            headers["Content-Type"] = "application/json"
        request = httpx.Request(
            method,
            self._urls[path],
            headers=headers,
            content=None if body is None else msgspec.json.encode(body),
            extensions={"timeout": httpx.Timeout(timeout_s, connect=_CONNECT_TIMEOUT_S).as_dict()},
        )
        try:
            # The transport's own limits are per read: a server that sends a byte now and then would never be late.
            async with asyncio.timeout(timeout_s):
                return await self._receive(request)
        except TimeoutError as error:
            raise httpx.ReadTimeout("late") from error
        except (aiohttp.ClientError, ValueError) as error:
            # The transport passes on what it cannot name: answers that are not HTTP, as from a port that is another's.
            raise httpx.RemoteProtocolError(f"not an answer: {str(error)[:200]}") from error

    async def _receive(self, request: httpx.Request) -> HttpReply:
        response = await self._transport.handle_async_request(request)
        try:
            encoding = response.headers.get("Content-Encoding", "identity")
            if encoding != "identity":
                # Nobody asked for it, and its size after decompression is unknown.
                raise httpx.ReadError(f"the reply is compressed ({encoding[:40]})")
            reply = bytearray()
            async for chunk in response.aiter_bytes():
                reply += chunk
                if len(reply) > MAX_REPLY_BYTES:
                    raise httpx.ReadError(f"the reply has more than {MAX_REPLY_BYTES} bytes")
        finally:
            await response.aclose()
        return HttpReply(status_code=response.status_code, content=bytes(reply))


def failure_reason(error: httpx.HTTPError, timeout_s: float) -> str:
    cause = error.__cause__
    # The transport reports every broken connection as a timeout.
    is_broken = isinstance(cause, aiohttp.ClientConnectionError) and not isinstance(cause, aiohttp.ServerTimeoutError)
    if isinstance(cause, aiohttp.ConnectionTimeoutError):
        return f"no connection within {_CONNECT_TIMEOUT_S:.0f} s"
    if isinstance(error, httpx.TimeoutException) and not is_broken:
        return f"no answer within {timeout_s:.0f} s"
    name = type(cause if is_broken else error).__name__
    return f"{name}: {error}" if str(error) else name


def _open_session() -> aiohttp.ClientSession:
    """Return the session under httpx. Its transport costs a fraction of a millisecond per request, httpx's own several.

    Each request has its own connection: the server can close a kept one just as the next request is written to it.
    """
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))
