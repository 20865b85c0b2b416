"""Engines without a model, in a thread: the tokens of a reply follow from its seed, as those of a real engine do."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from aiohttp import web

from megarl.engine.batches import Line
from megarl.engine.client import EngineClient, EngineEndpoint, EngineKeys
from megarl.system.network import LOOPBACK

KEYS = EngineKeys(api="0" * 48, admin="1" * 48)


@dataclass
class SeededEngines:
    """Their ports, and how they behave from now on."""

    ports: list[int] = field(default_factory=list)
    is_held: bool = False
    """Whether requests wait."""
    version: str = "0"
    broken: dict[int, Callable[[dict[str, Any]], web.Response]] = field(default_factory=dict)
    """Engines that answer every request with something else than the reply they should give."""
    num_requests: int = 0
    num_open: int = 0
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    def clients(self) -> list[EngineClient]:
        return [
            EngineClient(
                EngineEndpoint(index=index, host=LOOPBACK, port=port, tensor=1, device="cpu", keys=KEYS),
                request_timeout_s=120,
            )
            for index, port in enumerate(self.ports)
        ]

    async def model_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})

    async def generate(self, index: int, request: web.Request) -> web.StreamResponse:
        asked = json.loads(await request.read())
        replies = web.StreamResponse()
        await replies.prepare(request)

        async def answer(place: int, fields: dict[str, Any]) -> None:
            reply = await self._answer(index, fields)
            assert isinstance(reply.body, bytes)
            await replies.write(Line(place=place, status_code=reply.status, content=reply.body).encode())

        async with asyncio.TaskGroup() as tasks:
            for place, fields in enumerate(asked):
                self._tasks[fields["rid"]] = tasks.create_task(answer(place, fields))
        for fields in asked:
            del self._tasks[fields["rid"]]
        return replies

    async def abort(self, request: web.Request) -> web.Response:
        asked = json.loads(await request.read())
        for rid, task in self._tasks.items():
            if asked.get("abort_all") or rid == asked.get("rid"):
                task.cancel()
        return web.Response(text="")

    async def _answer(self, index: int, fields: dict[str, Any]) -> web.Response:
        self.num_requests += 1
        self.num_open += 1
        try:
            while self.is_held:
                await asyncio.sleep(0.02)
        finally:
            self.num_open -= 1
        parameters = fields["sampling_params"]
        random = np.random.default_rng(parameters["sampling_seed"])
        size = int(random.integers(1, parameters["max_new_tokens"]))
        eos_ids = parameters["stop_token_ids"]
        others = [token_id for token_id in range(3, 60) if token_id not in eos_ids]
        token_ids = [*random.choice(others, size - 1).tolist(), eos_ids[0]]
        meta = {
            "finish_reason": {"type": "stop"},
            "weight_version": self.version,
            "output_token_logprobs": [[-float(random.random()), token_id, None] for token_id in token_ids],
        }
        reply = {"output_ids": token_ids, "meta_info": meta}
        return self.broken[index](reply) if index in self.broken else web.json_response(reply)


@contextmanager
def seeded_engines(num_engines: int) -> Iterator[SeededEngines]:
    engines = SeededEngines()
    started, loop = threading.Event(), asyncio.new_event_loop()
    runners: list[web.AppRunner] = []

    async def start() -> None:
        for index in range(num_engines):
            app = web.Application()
            app.router.add_post("/generate", partial(engines.generate, index))
            app.router.add_get("/health", _healthy)
            app.router.add_post("/abort_request", engines.abort)
            app.router.add_get("/server_info", _healthy)
            app.router.add_get("/model_info", engines.model_info)
            runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
            await runner.setup()
            runners.append(runner)
            site = web.TCPSite(runner, LOOPBACK, 0)
            await site.start()
            engines.ports.append(runner.addresses[0][1])
        started.set()

    async def stop() -> None:
        for runner in runners:
            await runner.cleanup()  # else the handlers of open connections are destroyed while they wait

    def serve() -> None:
        loop.create_task(start())
        loop.run_forever()
        loop.run_until_complete(stop())
        loop.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert started.wait(60)
    try:
        yield engines
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)


async def _healthy(_: web.Request) -> web.Response:
    return web.Response(text="")
