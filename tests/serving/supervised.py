"""Engines with a real supervisor, whose processes and wire are scripted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx

from megarl.engine.client import EngineClient, EngineEndpoint
from megarl.engine.fleet import Engine, Fleet
from megarl.engine.lifecycle import RestartPolicy
from megarl.errors import MachineError
from megarl.serving.processes import Engines
from megarl.serving.supervisor import Supervisor
from megarl.types import PolicyVersion
from tests.engine.engines import EOS, reply_of, scripted_client

POLICY = RestartPolicy(max_restarts=2, back_off_s=0.05, silence_timeout_s=3, start_timeout_s=5)


class Scripted(Engines):
    """Engines as processes and servers: each can be killed, frozen, or kept from starting."""

    def __init__(self, num_engines: int, *, per_node: int | None = None) -> None:
        """With `per_node`, nodes of so many engines are 10.0.0.0, 10.0.0.1 and so on."""
        self._per_node = per_node
        self.calls: list[str] = []
        self.frozen: set[int] = set()
        self.cannot_start: set[int] = set()
        self.asked: list[str] = []
        self.poison: int | None = None
        """A token that ends the engine that gets it."""
        self.killed: set[int] = set()
        self.is_mad: set[int] = set()
        self.reasons: list[str] = []
        self.served = dict.fromkeys(range(num_engines), PolicyVersion(0))
        self._ends = {index: asyncio.get_running_loop().create_future() for index in range(num_engines)}

    def kill(self, index: int) -> None:
        self._ends[index].set_result("exited with SIGKILL")

    async def start(self, index: int) -> EngineEndpoint:
        self.calls.append(f"start {index}")
        if index in self.cannot_start:
            raise MachineError(f"engine {index}: out of memory")
        self._ends[index] = asyncio.get_running_loop().create_future()
        self.frozen.discard(index)
        self.served[index] = PolicyVersion(0)
        return self.client(index).endpoint

    def has_nodes(self, index: int) -> bool:
        return True

    async def wait_end(self, index: int) -> str:
        return str(await asyncio.shield(self._ends[index]))

    async def end(self, index: int) -> None:
        self.calls.append(f"end {index}")

    def client(self, index: int) -> EngineClient:
        async def answer(request: httpx.Request) -> httpx.Response:
            self.asked.append(request.url.path)
            if index in self.is_mad:
                raise KeyError(index)
            if request.url.path == "/generate":
                if self.poison in json.loads(request.content)["input_ids"]:
                    self.killed.add(index)
                    if not self._ends[index].done():
                        self.kill(index)
                    await asyncio.sleep(60)
                return reply_of(EOS, version=str(self.served[index]))
            if index in self.frozen:
                await asyncio.sleep(60)
            return httpx.Response(200, json={"weight_version": str(self.served[index])})

        host = "127.0.0.1" if self._per_node is None else f"10.0.0.{index // self._per_node}"
        return scripted_client(answer, index=index, host=host)

    async def catch_up(self, engine: Engine) -> bool:
        self.calls.append(f"sync {engine.index}")
        self.served[engine.index] = PolicyVersion(7)
        await self.fleet.joined(engine)
        return True

    fleet: Fleet


@asynccontextmanager
async def supervised(
    num_engines: int = 2, *, per_node: int | None = None
) -> AsyncIterator[tuple[Scripted, Fleet, Supervisor]]:
    """A fleet at version 7."""
    scripted = Scripted(num_engines, per_node=per_node)
    fleet = Fleet(
        [scripted.client(index) for index in range(num_engines)],
        max_outstanding=8,
        publish_timeout_s=20,
        policy=POLICY,
    )
    scripted.fleet = fleet
    fleet.listen(lambda engine, _before: scripted.reasons.append(engine.reason))
    scripted.served = dict.fromkeys(scripted.served, PolicyVersion(7))
    await fleet.committed(PolicyVersion(7), fleet.engines)
    supervisor = Supervisor(fleet, scripted, connect=lambda endpoint: scripted.client(endpoint.index))
    supervisor.attach(scripted.catch_up)
    async with supervisor.running():
        yield scripted, fleet, supervisor


async def until(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)
