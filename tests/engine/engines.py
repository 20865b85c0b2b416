"""Engines for the tests of this package: real ones, shared, and scripted ones that answer over a fake wire."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import httpx
import numpy as np

from megarl.config.roles import InFlight, RolloutRoleConfig
from megarl.engine import admin
from megarl.engine.batches import Line
from megarl.engine.client import EngineClient, EngineEndpoint, EngineKeys
from megarl.engine.fleet import Fleet
from megarl.engine.http import HttpReply, Read, Send
from megarl.engine.process import EngineProcess, EngineSpec
from megarl.engine.tool_commands import ToolControl
from megarl.families import family_of
from megarl.families.shape import ModelShape
from megarl.rollout.generator import FleetGenerator
from megarl.rollout.task import Sampling, Vocabulary
from megarl.types import PolicyVersion, Prompt, TokenArray
from tests.tiny_models import write_tiny_model

EOS = 2
"""What tiny models end with."""
CONTEXT = 512
REQUEST_TIMEOUT_S = 600.0
COMMAND_TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A real engine that serves `folder`; `other_folder` is the same architecture with other weights."""

    process: EngineProcess
    folder: Path
    other_folder: Path
    shape: ModelShape

    @asynccontextmanager
    async def fleet(self) -> AsyncIterator[Fleet]:
        """A fleet of this one engine, back at version 0 whatever happened before."""
        client = EngineClient(self.process.endpoint, request_timeout_s=REQUEST_TIMEOUT_S)
        await admin.load_weights_from_disk(client, self.folder, version=PolicyVersion(0), timeout_s=REQUEST_TIMEOUT_S)
        fleet = Fleet([client], max_outstanding=128, publish_timeout_s=10)
        try:
            yield fleet
        finally:
            await fleet.close()


def serve(
    folder: Path, family: str, *, tensor: int, tied: bool, expert: int = 1, rope: dict[str, object] | None = None
) -> ServedModel:
    """Write two tiny models and start an engine on the first; the caller stops it."""
    shape = write_tiny_model(folder / "model", family, tied=tied, layers=2, seed=1, rope=rope)
    write_tiny_model(folder / "other", family, tied=tied, layers=2, seed=2, rope=rope)
    engine = family_of(shape).engine
    spec = engine_spec(folder / "model", folder / "run", tensor=tensor, expert=expert)
    images = None if shape.vision is None else folder / "images"
    spec = replace(spec, options=engine.cpu_options, is_text_alone=engine.is_text_alone, images=images)
    process = EngineProcess(spec)
    process.start()
    asyncio.run(process.wait_ready())
    return ServedModel(process=process, folder=folder / "model", other_folder=folder / "other", shape=shape)


def engine_spec(
    model_folder: Path,
    run_folder: Path,
    *,
    tensor: int = 1,
    expert: int = 1,
    port: int | None = None,
    start_timeout_s: float = 900,
) -> EngineSpec:
    return EngineSpec(
        index=0,
        model_folder=model_folder,
        config=RolloutRoleConfig(pool="rollout", tensor=tensor, expert=expert),
        device="cpu",
        seed=1,
        run_folder=run_folder,
        keys=EngineKeys.fresh(),
        port=port,
        start_timeout_s=start_timeout_s,
    )


def control_of(fleet: Fleet) -> ToolControl:
    return ToolControl(fleet, timeout_s=COMMAND_TIMEOUT_S)


def generator_of(
    fleet: Fleet,
    *,
    num_rollouts: int = 1,
    temperature: float = 1.0,
    max_response_tokens: int = 12,
    max_attempts: int = 3,
    vocab: int = 99,
    seed: int = 7,
    in_flight: InFlight | None = None,
) -> FleetGenerator:
    sampling = Sampling(
        num_rollouts=num_rollouts,
        temperature=temperature,
        top_p=1.0,
        top_k=None,
        max_response_tokens=max_response_tokens,
    )
    vocabulary = Vocabulary(size=vocab, eos_ids=(EOS,), max_context_tokens=CONTEXT, decode=spell)
    return FleetGenerator(
        fleet, sampling=sampling, vocabulary=vocabulary, seed=seed, max_attempts=max_attempts, in_flight=in_flight
    )


def spell(token_ids: TokenArray) -> str:
    return " ".join(str(token_id) for token_id in token_ids)


def prompt_of(*token_ids: int, uid: str = "row-0", epoch: int = 0) -> Prompt:
    return Prompt(
        uid=uid,
        position=0,
        epoch=epoch,
        token_ids=np.array(token_ids, dtype=np.int32),
        data_source="test",
        ground_truth="",
        extra_info={},
    )


Handler = Callable[[httpx.Request], httpx.Response]
SlowHandler = Callable[[httpx.Request], Coroutine[None, None, httpx.Response]]


def scripted_client(
    handler: Handler | SlowHandler, *, index: int = 0, tensor: int = 1, host: str = "127.0.0.1"
) -> EngineClient:
    """A client whose engine is `handler`."""
    endpoint = EngineEndpoint(
        index=index,
        host=host,
        port=30000 + index,
        tensor=tensor,
        device="cpu",
        keys=EngineKeys(api="api-key", admin="admin-key"),
    )
    return EngineClient(endpoint, request_timeout_s=60, send=scripted(handler))


def scripted(handler: Handler | SlowHandler) -> Send:
    """Let `handler` answer instead of a server, single requests; what it raises is what the network would."""
    transport = httpx.MockTransport(handler)

    async def ask(method: str, url: str, headers: Mapping[str, str], content: bytes | None) -> HttpReply:
        try:
            response = await transport.handle_async_request(
                httpx.Request(method, url, headers=dict(headers), content=content)
            )
        except httpx.TimeoutException as error:
            raise TimeoutError from error
        except httpx.HTTPError as error:
            raise aiohttp.ClientConnectionError(str(error)) from error
        return HttpReply(status_code=response.status_code, content=await response.aread())

    return one_by_one(ask)


def one_by_one(ask: Callable[[str, str, Mapping[str, str], bytes | None], Awaitable[HttpReply]]) -> Send:
    """Let `ask` answer each request of a list alone, as an engine does; one that fails ends the connection."""

    async def send(
        method: str, url: str, headers: Mapping[str, str], content: bytes | None, read: Read | None
    ) -> HttpReply:
        if read is None:
            return await ask(method, url, headers, content)

        async def answer(place: int, fields: object) -> None:
            reply = await ask(method, url, headers, json.dumps(fields).encode())
            read(Line(place=place, status_code=reply.status_code, content=reply.content).encode())

        try:
            async with asyncio.TaskGroup() as tasks:
                for place, fields in enumerate(json.loads(content or b"[]")):
                    tasks.create_task(answer(place, fields))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        return HttpReply(status_code=200, content=b"")

    return send


def scripted_fleet(*handlers: Handler | SlowHandler, max_outstanding: int = 8, policies: Sequence[str] = ()) -> Fleet:
    clients = [scripted_client(handler, index=index) for index, handler in enumerate(handlers)]
    return Fleet(clients, max_outstanding=max_outstanding, publish_timeout_s=0.2, policies=policies)


def reply_of(*token_ids: int, version: str = "0", kind: str = "stop") -> httpx.Response:
    meta = {
        "finish_reason": {"type": kind},
        "weight_version": version,
        "output_token_logprobs": [[-1.0, token_id, None] for token_id in token_ids],
    }
    return httpx.Response(200, json={"output_ids": list(token_ids), "meta_info": meta})


class ScriptedEngine:
    """Answers `/generate` with the next reply of its script, the last one over and over."""

    def __init__(self, *replies: httpx.Response | httpx.HTTPError, is_healthy: bool = True) -> None:
        self.requests: list[dict[str, object]] = []
        self._replies = replies
        self._is_healthy = is_healthy

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/health":
            return httpx.Response(200 if self._is_healthy else 503)
        reply = self._replies[min(len(self.requests), len(self._replies) - 1)]
        self.requests.append(json.loads(request.content))
        if isinstance(reply, httpx.HTTPError):
            raise reply
        # A fresh one each time: a response can be read once.
        return httpx.Response(reply.status_code, content=reply.content)


async def fingerprints_from_disk(control: ToolControl, fleet: Fleet, folder: Path) -> list[Mapping[str, int]]:
    """Return the fingerprints of the parameters after SGLang's own loading of a folder."""
    for engine in fleet.engines:
        await admin.load_weights_from_disk(engine.client, folder, version=PolicyVersion(0), timeout_s=REQUEST_TIMEOUT_S)
    return await control.fingerprints()
