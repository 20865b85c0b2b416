"""HTTP to one server: a request and its reply, within a deadline and a size. Knows nothing of engines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import TypeAlias

import aiohttp
import msgspec

from megarl.types import JsonValue

MAX_REPLY_BYTES = 256 << 20
"""Limit of one reply: a million tokens with their log-probabilities take a quarter of it."""
_CONNECT_TIMEOUT_S = 60.0
"""Long: a busy process notices late that it is connected. Probes find out sooner that an engine is gone."""
KEEP_ALIVE_S = 4.0
"""Idle connections stay open so long; engines wait much longer, so that none ends as a request is written to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpReply:
    status_code: int
    content: bytes

    @property
    def refusal(self) -> str | None:
        """The reason that the server gave; None if it did what it was asked for."""
        if self.status_code == HTTPStatus.OK:
            return None
        return f"status {self.status_code}: {self.content[:1200].decode(errors='replace').strip()[:300]}"

    def json(self) -> JsonValue:
        """Return the decoded content; None if it is not JSON."""
        try:
            value: JsonValue = msgspec.json.decode(self.content)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return None
        return value


class HttpError(Exception):
    """No usable reply came; the text says why."""


Body: TypeAlias = Mapping[str, JsonValue] | Sequence[Mapping[str, JsonValue]]
Read: TypeAlias = Callable[[bytes], None]
"""Takes a piece of a reply of status 200 as it arrives."""
Send: TypeAlias = Callable[[str, str, Mapping[str, str], bytes | None, Read | None], Awaitable[HttpReply]]
"""Sends a request of a method, a URL, headers and a content; what the last argument reads is not in the reply."""


class EngineHttp:
    def __init__(self, url: str, *, send: Send | None = None) -> None:
        self._url = url
        self._session: aiohttp.ClientSession | None = None
        self._send = send or self._over_network

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def exchange(
        self, method: str, path: str, body: Body | None, key: str | None, timeout_s: float, *, read: Read | None = None
    ) -> HttpReply:
        """Return the whole reply, whatever its status; raise HttpError if it is not there within `timeout_s`.

        With `read`, the content of a reply of status 200 goes there piece by piece; `read` limits its size.
        """
        headers = {"Accept-Encoding": "identity"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        if body is not None:
            headers["Content-Type"] = "application/json"
        content = None if body is None else msgspec.json.encode(body)
        try:
            # One limit for all: a server that sends a byte now and then would never be late.
            async with asyncio.timeout(timeout_s):
                return await self._send(method, f"{self._url}{path}", headers, content, read)
        except aiohttp.ConnectionTimeoutError as error:
            raise HttpError(f"no connection within {_CONNECT_TIMEOUT_S:.0f} s") from error
        except TimeoutError as error:
            raise HttpError(f"no answer within {timeout_s:.0f} s") from error
        except (aiohttp.ClientError, ValueError) as error:
            # A ValueError: an answer that is not HTTP, as from a port that is another's.
            raise HttpError(f"{type(error).__name__}: {str(error)[:200]}".removesuffix(": ")) from error

    async def _over_network(
        self, method: str, url: str, headers: Mapping[str, str], content: bytes | None, read: Read | None
    ) -> HttpReply:
        if self._session is None:
            self._session = _open_session()
        request = self._session.request(method, url, headers=headers, data=content, allow_redirects=False)
        async with request as response:
            encoding = response.headers.get("Content-Encoding", "identity")
            if encoding != "identity":
                # It was not requested, and its size after decompression is unknown.
                raise HttpError(f"the reply is compressed ({encoding[:40]})")
            chunks, num_bytes = [], 0
            async for chunk in response.content.iter_any():
                if read is not None and response.status == HTTPStatus.OK:
                    read(chunk)
                    continue
                chunks.append(chunk)
                num_bytes += len(chunk)
                if num_bytes > MAX_REPLY_BYTES:
                    raise HttpError(f"the reply has more than {MAX_REPLY_BYTES} bytes")
        return HttpReply(status_code=response.status, content=b"".join(chunks))


def _open_session() -> aiohttp.ClientSession:
    """Return a session without a limit of requests.

    Connections stay open for the next turn of an episode: to open one costs a fifth of a turn.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
    )
