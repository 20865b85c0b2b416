"""Lists, retires and adds engines of a running fleet through a socket in the run's folder that only its owner can open.

One JSON line each way: `megarl fleet` sends a request, the driver replies.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from megarl.cluster.cluster import RAY_FAILURES, NodeBundle, Place, Pool, free_devices, live_nodes
from megarl.cluster.lost_nodes import reserve_on
from megarl.engine.client import EngineClient, EngineEndpoint
from megarl.engine.fleet import Fleet
from megarl.errors import EngineError, FleetError, MachineError, first_line
from megarl.serving.nodes import EngineNodes
from megarl.serving.processes import Engines
from megarl.serving.supervisor import Supervisor

SOCKET_FILE = "fleet.sock"
_TIMEOUT_S = 10.0
_HANDLE_S = 180.0
"""Timeout of one operator request; placement takes Ray seconds."""
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
    folder: Path, fleet: Fleet, supervisor: Supervisor, nodes: EngineNodes, *, warn: Callable[[str], None]
) -> AsyncIterator[None]:
    """Serve requests at a socket in `folder` inside the block; without one where the folder cannot have sockets."""

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
    try:
        listener = _bind(path)
    except OSError as error:
        warn(f"{path}: cannot be made: {error.strerror}; the run goes on, and `megarl fleet` does not reach it")
        yield
        return
    own = path.stat().st_ino
    server = await asyncio.start_unix_server(answer, sock=listener, limit=_MAX_LINE_BYTES)
    try:
        async with server:
            yield
    finally:
        with suppress(OSError):
            if path.stat().st_ino == own:  # another driver may have taken over
                path.unlink()


def _bind(path: Path) -> socket.socket:
    """Return a socket at a path that only this user can open; it does not listen yet."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short(path.parent) as short:
            listener.bind(str(short / path.name))
        path.chmod(0o600)
    except OSError:
        listener.close()
        raise
    return listener


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
                num_restarts=engine.status.num_restarts,
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


@dataclass(eq=False)
class Growth:
    """Adds engines to a pool that only engines use."""

    pool: Pool
    fleet: Fleet
    engines: Engines
    _: KW_ONLY
    connect: Callable[[EngineEndpoint], EngineClient]
    _reserve_lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def add(self, address: str, count: int | None) -> None:
        """Start `count` engines on a node, or as many as have room there. Raise EngineError if there is no room."""
        if self.pool.is_shared:
            raise EngineError("the engines share their pool with other roles; only a pool of their own can grow")
        async with self._reserve_lock:
            try:
                bundle = await asyncio.to_thread(self._reserve, address, count)
            except RAY_FAILURES as error:
                raise EngineError(f"node {address}: Ray cannot place engines there now: {first_line(error)}") from error
            places = [Place(bundle=bundle, slot=slot) for slot in range(bundle.size)]
            self.pool.places = [*self.pool.places, *places]
            tensor = self.engines.tensor
            by_engine = [places[first : first + tensor] for first in range(0, bundle.size, tensor)]
            endpoints = [self.engines.extend(of_engine, address) for of_engine in by_engine]
            self.fleet.add([self.connect(endpoint) for endpoint in endpoints], "was added by the operator")

    def _reserve(self, address: str, count: int | None) -> NodeBundle:
        """Reserve the devices of further engines on a node."""
        resource = self.pool.places[0].bundle.resource
        free = free_devices(resource)
        nodes = {str(node["NodeManagerAddress"]): str(node["NodeID"]) for node in live_nodes()}
        if address not in nodes:
            roomy = sorted(each for each, key in nodes.items() if free.get(key, 0) >= self.engines.tensor)
            there = f"there is room on {', '.join(roomy)}" if roomy else "no node has free devices"
            raise EngineError(f"no node {address} is in the Ray cluster; {there}")
        num_free = free.get(nodes[address], 0)
        num_engines = num_free // self.engines.tensor if count is None else count
        size = num_engines * self.engines.tensor
        if not 0 < size <= num_free or (bundle := reserve_on(address, resource=resource, size=size)) is None:
            each = f"an engine takes {self.engines.tensor} (roles.rollout.tensor)"
            raise EngineError(f"node {address} has {num_free} free device(s), {each}; no engine was added")
        bundle.node, bundle.is_bound = nodes[address], True
        return bundle
