"""Replies of bounded size: who answers too much is cut off before this process has read it all."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx


class BoundedTransport(httpx.AsyncBaseTransport):
    """Another transport, whose replies fail as a broken connection does once they have more than `max_bytes`."""

    def __init__(self, inner: httpx.AsyncBaseTransport, *, max_bytes: int) -> None:
        self._inner = inner
        self._max_bytes = max_bytes

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await self._inner.handle_async_request(request)
        assert isinstance(response.stream, httpx.AsyncByteStream), f"a reply as {type(response.stream).__name__}"
        response.stream = _BoundedStream(response.stream, self._max_bytes)
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


class _BoundedStream(httpx.AsyncByteStream):
    def __init__(self, inner: httpx.AsyncByteStream, max_bytes: int) -> None:
        self._inner = inner
        self._max_bytes = max_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        num_bytes = 0
        async for chunk in self._inner:
            num_bytes += len(chunk)
            if num_bytes > self._max_bytes:
                raise httpx.ReadError(f"the reply has more than {self._max_bytes} bytes")
            yield chunk

    async def aclose(self) -> None:
        await self._inner.aclose()
