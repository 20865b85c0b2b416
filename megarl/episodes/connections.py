"""The sockets of an HTTP server that strangers reach: no more than the process can have beside its other files."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

_BACKLOG = 1024


class Connections:
    """At most half of the files that the process may open; past it a new connection replaces the oldest idle one."""

    def __init__(self) -> None:
        self.limit = max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2, 1)
        self._busy: Counter[asyncio.BaseProtocol] = Counter()

    async def listen(self, server: web.Server, at: str | socket.socket) -> asyncio.Server:
        """Accept connections at a free port of an address, or at a socket that listens already."""

        def accept() -> web.RequestHandler:
            connection, others = server(), server.connections
            if len(others) >= self.limit:
                idle = next((each for each in others if not self._busy[each]), connection)
                asyncio.get_running_loop().call_soon(idle.force_close)
            return connection

        loop = asyncio.get_running_loop()
        if isinstance(at, str):
            return await loop.create_server(accept, at, 0, backlog=_BACKLOG)
        return await loop.create_server(accept, sock=at, backlog=_BACKLOG)

    @contextmanager
    def busy(self, http: web.Request) -> Iterator[None]:
        """Keep the connection of a request."""
        connection = http.protocol
        self._busy[connection] += 1
        try:
            yield
        finally:
            self._busy[connection] -= 1
            if not self._busy[connection]:
                del self._busy[connection]
