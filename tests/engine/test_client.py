from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from megarl.config.section import Device
from megarl.engine import admin
from megarl.engine.batches import Line
from megarl.engine.client import EngineClient, EngineKeys, GenerateRequest
from megarl.engine.http import KEEP_ALIVE_S
from megarl.env import ENGINE_ENVIRONMENT
from megarl.errors import EngineError
from megarl.types import JsonValue, PolicyVersion
from tests.engine.engines import EOS, ServedModel, generator_of, prompt_of, scripted_client

REQUEST = GenerateRequest(rid="r", input_ids=(5, 6), max_new_tokens=4, temperature=1.0)


class Recorder:
    """An engine that says yes, or what it is told to, and remembers what it was asked."""

    def __init__(self, **statuses: int) -> None:
        self.asked: list[httpx.Request] = []
        self._statuses = statuses

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        return httpx.Response(self._statuses.get(request.url.path.strip("/"), 200), json={})

    @property
    def paths(self) -> list[str]:
        return [request.url.path for request in self.asked]


async def test_generating_and_controlling_use_different_keys() -> None:
    engine = Recorder()
    client = scripted_client(engine)

    await client.generate(REQUEST)
    await admin.pause(client, admin.PauseMode.RETRACT)
    assert [request.headers["authorization"] for request in engine.asked] == ["Bearer api-key", "Bearer admin-key"]


def test_keys_are_not_shown() -> None:
    keys = EngineKeys.fresh()
    assert keys.api not in repr(keys)
    assert keys.admin not in repr(keys)


def test_a_refusal_names_engine_operation_and_reason() -> None:
    client = scripted_client(lambda request: httpx.Response(400, text="no such thing"), index=3)
    with pytest.raises(EngineError, match=r"engine 3 \(127.0.0.1:30003\): generate: status 400: no such thing"):
        asyncio.run(client.generate(REQUEST))


def test_a_broken_connection_names_engine_and_operation_and_is_not_healthy() -> None:
    def broken(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(EngineError, match=r"engine 0 .*: flush cache: ClientConnectionError: refused"):
        asyncio.run(scripted_client(broken).flush_cache())
    assert not asyncio.run(scripted_client(broken).is_healthy())


def test_a_late_answer_names_the_deadline() -> None:
    def late(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("late")

    with pytest.raises(EngineError, match="generate: no answer within 90 s"):
        asyncio.run(scripted_client(late).generate(REQUEST))


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def client_of(answer: Handler, *, timeout_s: float = 60) -> AsyncIterator[EngineClient]:
    """Yield the client of a real server that answers `/generate`."""
    app = web.Application()
    app.router.add_post("/generate", answer)
    async with TestServer(app) as server:
        endpoint = replace(scripted_client(Recorder()).endpoint, port=server.make_url("/").port or 0)
        client = EngineClient(endpoint, request_timeout_s=timeout_s)
        try:
            yield client
        finally:
            await client.close()


async def ask(answer: Handler, *, timeout_s: float) -> bytes:
    async with client_of(answer, timeout_s=timeout_s) as client:
        return (await client.generate(REQUEST)).content


def test_a_reply_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.engine.batches.MAX_REPLY_BYTES", 1000)

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" " * 100)

    with pytest.raises(EngineError, match=r"engine 0 .*: generate: the reply has more than 1000 bytes"):
        asyncio.run(ask(endless, timeout_s=60))


async def test_turns_after_each_other_share_a_connection_and_survive_its_end() -> None:
    """A server that closes an idle connection costs no request."""
    connections: list[asyncio.BaseTransport] = []

    async def answer(request: web.Request) -> web.Response:
        assert request.transport is not None
        connections.append(request.transport)
        return web.Response(body=Line(place=0, status_code=200, content=b"{}").encode())

    async with client_of(answer) as client:
        for _ in range(3):
            await client.generate(REQUEST)
        connections[-1].close()
        await asyncio.sleep(1.0)
        await client.generate(REQUEST)
    assert len({id(each) for each in connections[:3]}) == 1
    assert connections[3] is not connections[0]
    assert float(ENGINE_ENVIRONMENT["SGLANG_TIMEOUT_KEEP_ALIVE"]) > 100 * KEEP_ALIVE_S


@pytest.mark.fault("a reply byte by byte", "cut at the deadline of the whole exchange")
def test_a_reply_that_trickles_is_late() -> None:
    async def trickle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" ")
            await asyncio.sleep(0.01)

    began = time.monotonic()
    with pytest.raises(EngineError, match="generate: no answer within 1 s"):
        asyncio.run(ask(trickle, timeout_s=0.5))
    assert time.monotonic() - began < 30


MALFORMED = {
    "a status line of another protocol": b"220 mail.example ESMTP\r\n\r\n",
    "a status that is no number": b"HTTP/1.1 abc OK\r\n\r\n",
    "a bad chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "a header of a megabyte": b"HTTP/1.1 200 OK\r\nX: " + b"a" * (1 << 20) + b"\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 5\r\n\r\nabc",
    "nothing": b"",
}


@pytest.mark.fault("an answer that is not HTTP", "the engine is not healthy; a probe fails; supervision goes on")
@pytest.mark.parametrize("kind", MALFORMED)
async def test_an_answer_that_is_not_http_is_an_error_of_the_engine(kind: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        with suppress(ConnectionError):
            writer.write(MALFORMED[kind])
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        client = EngineClient(replace(scripted_client(Recorder()).endpoint, port=port), request_timeout_s=60)
        try:
            assert not await client.is_healthy(timeout_s=60)
            with pytest.raises(EngineError, match=r"engine 0 .*probe: "):
                await client.probe(timeout_s=60)
            with pytest.raises(EngineError, match=r"engine 0 .*generate: "):
                await client.generate(REQUEST)
        finally:
            await client.close()


@pytest.mark.fault("a reply that grows when it is decompressed", "refused before it is read")
@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_a_compressed_reply_is_refused(encoding: str) -> None:
    async def bomb(request: web.Request) -> web.StreamResponse:
        return web.Response(body=gzip.compress(bytes(10_000_000)), headers={"Content-Encoding": encoding})

    with pytest.raises(EngineError, match=rf"generate: the reply is compressed \({encoding}\)"):
        asyncio.run(ask(bomb, timeout_s=60))


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_reply_over_a_real_connection_arrives_whole(is_chunked: bool) -> None:
    reply: JsonValue = {"output_ids": list(range(100_000)), "text": "ü"}

    async def answer(request: web.Request) -> web.StreamResponse:
        assert [each["rid"] for each in await request.json()] == ["r"]
        # As any JSON may: with line breaks.
        content = json.dumps(reply, indent=0).encode()
        response = web.Response(body=Line(place=0, status_code=200, content=content).encode())
        if is_chunked:
            response.enable_chunked_encoding()
        return response

    async with client_of(answer) as client:
        assert not await client.is_healthy()  # 404
        assert json.loads((await client.generate(REQUEST)).content) == reply


@pytest.mark.parametrize(("is_asleep", "holds"), [(False, True), (True, False)])
async def test_a_load_is_one_call_and_leaves_the_pause_of_a_sleeping_engine(*, is_asleep: bool, holds: bool) -> None:
    engine = Recorder()
    client = scripted_client(engine, tensor=2)
    client.is_asleep = is_asleep
    await client.load_weights(
        ["a", "b"], load_format="x.y", version=PolicyVersion(3), timeout_s=60, holds_requests=True
    )
    assert engine.paths == ["/load_weights"]
    assert json.loads(engine.asked[0].content) == {
        "payloads": ["a", "b"],
        "load_format": "x.y",
        "version": "3",
        "is_for_draft": False,
        "holds_requests": holds,
    }


ASLEEP_AND_AWAKE = {
    "cpu": ["/pause_generation", "/continue_generation"],
    "cuda": [
        "/pause_generation",
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/continue_generation",
    ],
}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
async def test_a_sleeping_engine_holds_requests_before_it_gives_memory_back(device: Device) -> None:
    engine = Recorder()
    client = scripted_client(engine)
    client.endpoint = replace(client.endpoint, device=device)

    for call in (admin.sleep, admin.sleep, admin.wake, admin.wake):
        await call(client)
    assert engine.paths == ASLEEP_AND_AWAKE[device]


async def test_an_aborted_request_says_so_and_keeps_its_tokens(qwen2_tp1: ServedModel) -> None:
    # Greedy, this model never says its end token.
    request = GenerateRequest(rid="to-abort", input_ids=(5,), max_new_tokens=500, temperature=0.0)

    async with qwen2_tp1.fleet() as fleet:
        client = fleet.engines[0].client
        running = asyncio.create_task(client.generate(request))
        await asyncio.sleep(0.3)
        await client.abort(request.rid)
        reply = json.loads((await running).content)
    assert isinstance(reply, dict)
    meta, token_ids = reply["meta_info"], reply["output_ids"]
    assert isinstance(meta, dict)
    assert isinstance(meta["finish_reason"], dict)
    assert meta["finish_reason"]["type"] == "abort"
    assert isinstance(token_ids, list)
    assert 0 < len(token_ids) < 500


async def test_a_paused_engine_is_healthy_and_goes_on_when_resumed(qwen2_tp1: ServedModel) -> None:
    async with qwen2_tp1.fleet() as fleet:
        client, generator = fleet.engines[0].client, generator_of(fleet)
        await admin.sleep(client)
        held = asyncio.create_task(generator.generate(prompt_of(5, 6)))
        await asyncio.sleep(0.5)
        assert not held.done()
        assert await client.is_healthy()
        assert await client.probe(timeout_s=60) == "0"
        await client.flush_cache()
        await admin.wake(client)
        assert len((await held).rollouts) == 1


def test_probes_change_nothing_about_what_is_sampled(qwen2_tp1: ServedModel) -> None:
    async def sample(*, is_probed: bool) -> list[list[int]]:
        async with qwen2_tp1.fleet() as fleet:
            generator, client = generator_of(fleet, num_rollouts=16, max_response_tokens=64), fleet.engines[0].client
            sampling = asyncio.create_task(generator.generate(prompt_of(5, 6)))
            num_probes = 0
            while is_probed and not sampling.done():
                assert await client.probe(timeout_s=60) == "0"
                num_probes += 1
            group = await sampling
            assert not is_probed or num_probes > 3
            return [rollout.token_ids.tolist() for rollout in group.rollouts]

    assert asyncio.run(sample(is_probed=True)) == asyncio.run(sample(is_probed=False))


async def test_only_the_right_key_opens_an_engine(qwen2_tp1: ServedModel) -> None:
    endpoint = qwen2_tp1.process.endpoint
    async with httpx.AsyncClient(base_url=endpoint.url, timeout=120) as http:
        body = {"input_ids": [EOS]}
        attempts = [
            await http.post("/generate", json=body),
            await http.post("/generate", json=body, headers={"Authorization": f"Bearer {endpoint.keys.admin}"}),
            await http.post("/pause_generation", json={}, headers={"Authorization": f"Bearer {endpoint.keys.api}"}),
        ]
        key = {"Authorization": f"Bearer {endpoint.keys.api}"}
        bad = [
            await http.post("/generate", content=content, headers=key) for content in (b"{", b'{"no_field": 1}', b"[]")
        ]
    assert [attempt.status_code for attempt in attempts] == [401, 401, 401]
    assert [attempt.status_code for attempt in bad] == [400, 400, 400]
    assert "no_field" in bad[1].text
