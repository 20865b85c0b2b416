"""The sockets of an HTTP server that strangers reach: no more than the process can have beside its other files."""

from __future__ import annotations

import asyncio
import resource
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
        self._listener: asyncio.Server | None = None

    async def listen(self, server: web.Server, host: str) -> int:
        """Accept connections at a free port; return it."""

        def accept() -> web.RequestHandler:
            connection, others = server(), server.connections
            if len(others) >= self.limit:
                idle = next((each for each in others if not self._busy[each]), connection)
                asyncio.get_running_loop().call_soon(idle.force_close)
            return connection

        self._listener = await asyncio.get_running_loop().create_server(accept, host, 0, backlog=_BACKLOG)
        port: int = self._listener.sockets[0].getsockname()[1]
        return port

    def close(self) -> None:
        """Accept no more."""
        if self._listener is not None:
            self._listener.close()

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
