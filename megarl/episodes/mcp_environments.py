"""Tools of servers of the Model Context Protocol; one session per server and episode. The recipe's reward scores."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Mapping
from typing import TypeVar

import anyio
import httpx2
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CONNECTION_CLOSED, CallToolResult, ImageContent, TextContent
from pydantic import ValidationError

from megarl.episodes.protocol import Call, Observation, Row, ToolSchema, Transcript
from megarl.episodes.worker import MAX_RESULT_CHARACTERS
from megarl.errors import ConfigError, DataError, EnvironmentLostError, Problem
from megarl.system.foreign import one_line
from megarl.system.secret import Secret
from megarl.types import Score

_T = TypeVar("_T")

_CLOSE_TIMEOUT_S = 5.0
_GRACE_S = 5.0
"""The deadline of a call is kept here; the library's own comes later and ends a session that hangs."""
_MAX_REPLY_BYTES = 16 << 20
_MAX_PAGES = 64
_MAX_LIST_BYTES = 4 << 20
"""Pages and bytes of a list of tools, all of which is part of every prompt."""
_LOST = (OSError, httpx2.HTTPError, anyio.ClosedResourceError, anyio.BrokenResourceError, ValidationError)


class _BoundedStream(httpx2.AsyncByteStream):
    """A reply that fails when it has more bytes than it may."""

    def __init__(self, inner: httpx2.AsyncByteStream) -> None:
        self._inner = inner

    async def __aiter__(self) -> AsyncIterator[bytes]:
        num_left = _MAX_REPLY_BYTES
        async for chunk in self._inner:
            num_left -= len(chunk)
            if num_left < 0:
                raise httpx2.ReadError(f"a reply has more than {_MAX_REPLY_BYTES} bytes")
            yield chunk

    async def aclose(self) -> None:
        await self._inner.aclose()


class _BoundedTransport(httpx2.AsyncHTTPTransport):
    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await super().handle_async_request(request)
        if response.headers.get("Content-Encoding", "identity") != "identity":
            await response.aclose()
            raise httpx2.ReadError("a reply is compressed, which was not asked for")
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _BoundedStream(response.stream)
        return response


class _Session:
    """A session with one server. The library must end it in the task that began it, so it has one of its own."""

    def __init__(self, url: str, *, key: Secret | None, timeout_s: float) -> None:
        self._url = url
        self._key = key
        self._timeout_s = timeout_s
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()
        self._task = asyncio.create_task(self._hold())

    async def _hold(self) -> None:
        limit_s = self._timeout_s + _GRACE_S
        timeout = httpx2.Timeout(limit_s, read=None)  # a server may be silent between two calls
        headers = {"Accept-Encoding": "identity"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key.reveal()}"
        async with (
            httpx2.AsyncClient(transport=_BoundedTransport(), timeout=timeout, headers=headers) as http,
            Client(
                streamable_http_client(self._url, http_client=http), read_timeout_seconds=limit_s, cache=None
            ) as client,
        ):
            self._client.set_result(client)
            await self._closing.wait()

    async def tools(self) -> tuple[ToolSchema, ...]:
        """Return the server's tools; an EnvironmentLostError if it does not tell them all until the deadline."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._listed()
        except (TimeoutError, MCPError) as error:
            raise self._lost(str(error) or f"no answer within {self._timeout_s:g} s") from None

    async def _listed(self) -> tuple[ToolSchema, ...]:
        client = await self._connected()
        found: list[ToolSchema] = []
        cursor: str | None = None
        for _ in range(_MAX_PAGES):
            page = await self._within(client.list_tools(cursor=cursor))
            found += [
                ToolSchema(name=tool.name, description=tool.description or "", parameters=dict(tool.input_schema))
                for tool in page.tools
            ]
            cursor = page.next_cursor
            if cursor is None:
                break
        else:
            raise self._lost(f"its list of tools has more than {_MAX_PAGES} pages")
        if len(json.dumps([tool.as_function for tool in found])) > _MAX_LIST_BYTES:
            raise self._lost(f"its list of tools has more than {_MAX_LIST_BYTES} bytes")
        return tuple(found)

    async def call(self, call: Call) -> Observation:
        client = await self._connected()
        try:
            return _observed(call.name, await self._within(client.call_tool(call.name, dict(call.arguments))))
        except TimeoutError:
            text = f"{call.name} gave no result within {self._timeout_s:g} s"
        except MCPError as error:
            if self._task.done() or error.error.code == CONNECTION_CLOSED:
                raise self._lost(str(error)) from None
            text = error.error.message
        return Observation(text=f"error: {text}", is_error=True)

    async def close(self) -> None:
        self._closing.set()
        await asyncio.wait({self._task}, timeout=_CLOSE_TIMEOUT_S)
        self._task.cancel()
        await asyncio.wait({self._task}, timeout=_CLOSE_TIMEOUT_S)
        if self._task.done() and not self._task.cancelled():
            self._task.exception()  # the server may be gone: that is no error of the episode any more

    async def _connected(self) -> Client:
        waited: set[asyncio.Future[None] | asyncio.Future[Client]] = {self._task, self._client}
        await asyncio.wait(waited, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if self._task.done() or not self._client.done():
            raise self._lost(f"no answer within {self._timeout_s:g} s")
        return self._client.result()

    async def _within(self, answer: Awaitable[_T]) -> _T:
        """Wait for an answer until the deadline; what shows that the server is gone is an EnvironmentLostError."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await answer
        except TimeoutError:
            raise
        except _LOST as error:
            raise self._lost(f"{type(error).__name__}: {error}") from None

    def _lost(self, reason: str) -> EnvironmentLostError:
        if self._task.done() and not self._task.cancelled() and (error := self._task.exception()) is not None:
            reason = _innermost(error)
        return EnvironmentLostError(f"{self._url}: {one_line(reason)}")


def _innermost(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def _observed(name: str, result: CallToolResult) -> Observation:
    for block in result.content:
        if isinstance(block, ImageContent):
            text = f"error: {name} answered with an image ({block.mime_type[:40]}), and results are text alone"
            return Observation(text=text, is_error=True)
    parts = [block.text if isinstance(block, TextContent) else f"[{block.type}]" for block in result.content]
    is_error = bool(result.is_error)
    text = ("error: " if is_error else "") + "\n".join(parts)
    return Observation(text=text[:MAX_RESULT_CHARACTERS], is_error=is_error)


class McpEnvironments:
    """`Environments` of some servers, whose tools must stay as they are."""

    def __init__(
        self,
        servers: Mapping[str, str],
        *,
        keys: Mapping[str, Secret],
        by_server: Mapping[str, tuple[ToolSchema, ...]],
        timeout_s: float,
    ) -> None:
        self._servers = servers
        self._keys = keys
        self._by_server = by_server
        self._timeout_s = timeout_s

    @property
    def tools(self) -> tuple[ToolSchema, ...]:
        return tuple(tool for tools in self._by_server.values() for tool in tools)

    async def open(self, row: Row) -> McpEnvironment:
        sessions = {
            name: _Session(url, key=self._keys.get(name), timeout_s=self._timeout_s)
            for name, url in self._servers.items()
        }
        environment = McpEnvironment(sessions, self._by_server)
        try:
            for name, session in sessions.items():
                if await session.tools() != self._by_server[name]:
                    raise DataError(
                        f"environment.servers.{name}: its tools changed during the run, and prompts name the old ones; "
                        "start the run again"
                    )
        except BaseException:
            await environment.close()
            raise
        return environment

    async def close(self) -> None:
        """Nothing to close: every episode has sessions of its own."""


class McpEnvironment:
    """The sessions of one episode."""

    opening = None

    def __init__(self, sessions: Mapping[str, _Session], by_server: Mapping[str, tuple[ToolSchema, ...]]) -> None:
        self._sessions = sessions
        self._server_of = {tool.name: name for name, tools in by_server.items() for tool in tools}
        self.tools = tuple(tool for tools in by_server.values() for tool in tools)

    async def call(self, call: Call) -> Observation:
        server = self._server_of.get(call.name)
        if server is None:
            text = f"error: there is no tool {call.name[:100]}; there are: {', '.join(self._server_of)}"
            return Observation(text=text, is_error=True)
        return await self._sessions[server].call(call)

    async def score(self, transcript: Transcript) -> Score | None:
        return None

    async def close(self) -> None:
        for session in self._sessions.values():
            await session.close()


async def open_mcp(servers: Mapping[str, str], *, keys: Mapping[str, Secret], timeout_s: float) -> McpEnvironments:
    """Ask all servers for their tools; a ConfigError for those that do not answer, and for two tools of one name."""
    # The library writes a traceback for each lost connection; here it is an error of one line.
    logging.getLogger("mcp.client").setLevel(logging.CRITICAL)
    by_server: dict[str, tuple[ToolSchema, ...]] = {}
    problems: list[Problem] = []
    owners: dict[str, str] = {}
    for name, url in servers.items():
        key = f"environment.servers.{name}"
        session = _Session(url, key=keys.get(name), timeout_s=timeout_s)
        try:
            by_server[name] = await session.tools()
        except EnvironmentLostError as error:
            problems.append(Problem(key=key, message=f"does not answer; is the server running? {error}"))
            continue
        finally:
            await session.close()
        if not by_server[name]:
            problems.append(Problem(key=key, message=f"{url} has no tools"))
        for tool in by_server[name]:
            if tool.name in owners:
                message = f"two tools have the name {tool.name}: of {owners[tool.name]} and {name}"
                problems.append(Problem(key=key, message=message))
            owners[tool.name] = name
    if problems:
        raise ConfigError("recipe", tuple(problems))
    return McpEnvironments(servers, keys=keys, by_server=by_server, timeout_s=timeout_s)
