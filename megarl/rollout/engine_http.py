"""HTTP exchanges with one server, each with a deadline and a limit on the reply. Knows no endpoint of SGLang."""

from __future__ import annotations

from collections.abc import Mapping

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport

from megarl.types import JsonValue

MAX_REPLY_BYTES = 256 << 20
"""Limit of one reply: a million tokens with their log-probabilities take a quarter of it."""
_CONNECT_TIMEOUT_S = 10.0


class EngineHttp:
    def __init__(self, url: str, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._url = url
        self._urls: dict[str, httpx.URL] = {}
        # httpx's own client is left out: it costs the driver as much per request as the sending itself.
        self._transport = transport or AiohttpTransport(client=_open_session)

    async def close(self) -> None:
        await self._transport.aclose()

    async def exchange(
        self, method: str, path: str, body: Mapping[str, JsonValue] | None, key: str | None, timeout_s: float
    ) -> httpx.Response:
        """Return the whole reply, whatever its status; raise httpx.HTTPError if there is none."""
        if path not in self._urls:
            self._urls[path] = httpx.URL(f"{self._url}{path}")
        request = httpx.Request(
            method,
            self._urls[path],
            # One chunk of a compressed reply could exceed the limit.
            headers={"Accept-Encoding": "identity", **({} if key is None else {"Authorization": f"Bearer {key}"})},
            json=body,
            extensions={"timeout": httpx.Timeout(timeout_s, connect=_CONNECT_TIMEOUT_S).as_dict()},
        )
        response = await self._transport.handle_async_request(request)
        reply = bytearray()
        try:
            async for chunk in response.aiter_bytes():
                reply += chunk
                if len(reply) > MAX_REPLY_BYTES:
                    raise httpx.ReadError(f"the reply has more than {MAX_REPLY_BYTES} bytes")
        finally:
            await response.aclose()
        return httpx.Response(response.status_code, content=bytes(reply))


def failure_reason(error: httpx.HTTPError, timeout_s: float) -> str:
    cause = error.__cause__
    # The transport reports every broken connection as a timeout.
    is_broken = isinstance(cause, aiohttp.ClientConnectionError) and not isinstance(cause, aiohttp.ServerTimeoutError)
    if isinstance(error, httpx.TimeoutException) and not is_broken:
        return f"no answer within {timeout_s:.0f} s"
    name = type(cause if is_broken else error).__name__
    return f"{name}: {error}" if str(error) else name


def parse_json(response: httpx.Response) -> JsonValue:
    try:
        value: JsonValue = response.json()
    except ValueError:
        return None
    return value


def _open_session() -> aiohttp.ClientSession:
    """Return the session under httpx. Its transport costs a fraction of a millisecond per request, httpx's own several.

    Each request has its own connection: the server can close a kept one just as the next request is written to it.
    """
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))
