"""Lists, retires and adds engines of a running fleet through a socket in the run's folder that only its owner can open.

One JSON line each way: `megarl fleet` sends a request, the driver replies.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from megarl.engine.fleet import Fleet
from megarl.errors import FleetError, MachineError
from megarl.serving.nodes import EngineNodes
from megarl.serving.supervisor import Supervisor

SOCKET_FILE = "fleet.sock"
_TIMEOUT_S = 10.0
_HANDLE_S = 180.0
"""For a request to be handled: Ray takes a while to place engines on a node."""
_MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRequest:
    action: Literal["list", "retire", "add"]
    engine: int | None = None
    node: str | None = None
    """The address of a node: all its engines."""
    count: int | None = None
    """Further engines to start on the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    index: int
    state: str
    version: int
    num_outstanding: int
    num_restarts: int
    address: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorReply:
    error: str | None = None
    engines: tuple[EngineReport, ...] = ()


_REQUEST: TypeAdapter[OperatorRequest] = TypeAdapter(OperatorRequest)
_RESPONSE: TypeAdapter[OperatorReply] = TypeAdapter(OperatorReply)


@asynccontextmanager
async def open_to_operator(
    folder: Path, fleet: Fleet, supervisor: Supervisor, nodes: EngineNodes
) -> AsyncIterator[None]:
    """Serve requests at a socket in `folder` inside the block."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, ValueError, TimeoutError):
            async with asyncio.timeout(_TIMEOUT_S):
                line = await reader.readline()
            response = await _handle(line, fleet, supervisor, nodes)
            async with asyncio.timeout(_TIMEOUT_S):
                writer.write(_RESPONSE.dump_json(response) + b"\n")
                await writer.drain()
        writer.close()

    path = folder / SOCKET_FILE
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _short(folder) as short:
        listener.bind(str(short / SOCKET_FILE))
    # Nothing can connect yet: the socket does not listen.
    path.chmod(0o600)
    server = await asyncio.start_unix_server(answer, sock=listener, limit=_MAX_LINE_BYTES)
    try:
        async with server:
            yield
    finally:
        path.unlink(missing_ok=True)


def ask(folder: Path, request: OperatorRequest) -> tuple[EngineReport, ...]:
    """Send a request to the run in `folder`; return the states of its engines."""
    with _short(folder) as short, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_TIMEOUT_S)
        try:
            connection.connect(str(short / SOCKET_FILE))
            connection.settimeout(_HANDLE_S)
            connection.sendall(_REQUEST.dump_json(request) + b"\n")
            line = connection.makefile("rb").readline(_MAX_LINE_BYTES)
            response = _RESPONSE.validate_json(line)
        except FileNotFoundError:
            raise MachineError(f"{folder}: no run with engines is under way here; name its folder") from None
        except (OSError, ValidationError) as error:
            reason = error.strerror if isinstance(error, OSError) else "no answer"
            raise MachineError(f"{folder}: the run cannot be asked: {reason}; is it still running?") from None
    if response.error is not None:
        raise FleetError(response.error)
    return response.engines


async def _handle(line: bytes, fleet: Fleet, supervisor: Supervisor, nodes: EngineNodes) -> OperatorReply:
    try:
        request = _REQUEST.validate_json(line)
    except ValidationError:
        return OperatorReply(error="not a request of this version of megarl")
    try:
        match request:
            case OperatorRequest(count=int()) if request.action != "add" or request.node is None:
                return OperatorReply(error="--count says how many engines to add to a node: name it with --node")
            case OperatorRequest(action="retire", engine=int(index)):
                supervisor.retire(index)
            case OperatorRequest(action="add", engine=int(index)):
                supervisor.add(index)
            case OperatorRequest(action="retire", node=str(node)):
                nodes.retire(node)
            case OperatorRequest(action="add", node=str(node), count=count):
                await nodes.add(node, count)
            case OperatorRequest(action="list"):
                pass
            case _:
                return OperatorReply(error=f"{request.action} which engine? Name its number, or a node with --node")
    except FleetError as error:
        return OperatorReply(error=str(error))
    return OperatorReply(
        engines=tuple(
            EngineReport(
                index=engine.index,
                state=engine.state,
                version=engine.version,
                num_outstanding=engine.num_requests,
                num_restarts=engine.life.num_restarts,
                address=f"{engine.client.endpoint.host}:{engine.client.endpoint.port}",
                reason=engine.reason,
            )
            for engine in fleet.engines
        )
    )


@contextmanager
def _short(folder: Path) -> Iterator[Path]:
    """Yield a short name of a folder: the path of a socket is limited to 107 bytes."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise MachineError(f"{folder}: cannot be opened: {error.strerror}") from error
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
