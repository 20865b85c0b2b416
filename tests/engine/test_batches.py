from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest

from megarl.engine.batches import Line, LineReader
from megarl.engine.client import EngineClient, GenerateRequest
from megarl.engine.http import HttpReply
from megarl.errors import EngineError
from tests.engine.engines import ServedModel, scripted, scripted_client

_ABORTED = re.compile(r"^sglang:num_aborted_requests_total\b.* ([4-9]|\d\d+)\.0$", re.MULTILINE)
REQUEST = GenerateRequest(rid="r", input_ids=(5, 6), max_new_tokens=4, temperature=1.0)


def requests(num: int) -> list[GenerateRequest]:
    return [replace(REQUEST, rid=f"r{place}") for place in range(num)]


class Wire:
    """An engine that holds its requests until it is told to answer."""

    def __init__(self) -> None:
        self.sent: list[list[str]] = []
        self.aborted: list[str] = []
        self.num_closed = 0
        self.replies: dict[str, asyncio.Future[httpx.Response]] = {}

    async def answer(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        if request.url.path == "/abort_request":
            self.aborted.append(body["rid"])
            return httpx.Response(200, json={})
        reply: asyncio.Future[httpx.Response] = asyncio.get_running_loop().create_future()
        self.replies[body["rid"]] = reply
        return await reply

    def client(self) -> EngineClient:
        ask = scripted(self.answer)

        async def send(method: str, url: str, headers: Any, content: bytes | None, read: Any) -> HttpReply:
            if read is not None:
                self.sent.append([each["rid"] for each in json.loads(content or b"")])
            try:
                return await ask(method, url, headers, content, read)
            except asyncio.CancelledError:
                self.num_closed += 1
                raise

        return EngineClient(scripted_client(self.answer).endpoint, request_timeout_s=60, send=send)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


async def begun(wire: Wire, client: EngineClient, asked: Sequence[GenerateRequest]) -> list[asyncio.Task[Any]]:
    """Return the requests when the engine has them all."""
    tasks = [asyncio.create_task(client.generate(each)) for each in asked]
    await until(lambda: len(wire.replies) == len(asked))
    return tasks


async def test_requests_of_one_moment_travel_together_and_are_answered_one_by_one() -> None:
    wire = Wire()
    tasks = await begun(wire, wire.client(), requests(100))
    assert [len(sent) for sent in wire.sent] == [64, 36]
    assert [rid for sent in wire.sent for rid in sent] == [f"r{place}" for place in range(100)]
    wire.replies["r7"].set_result(httpx.Response(200, content=b'{"of": 7}'))
    assert (await tasks[7]).content == b'{"of": 7}'
    wire.replies["r8"].set_result(httpx.Response(400, content=b"too\nlong"))
    with pytest.raises(EngineError, match="generate: status 400: too long"):
        await tasks[8]
    assert sum(task.done() for task in tasks) == 2
    for task in tasks:
        task.cancel()


async def test_one_request_of_each_prompt_is_sent_before_its_siblings() -> None:
    """They find the prompt in the cache then."""
    wire = Wire()
    asked = [replace(each, input_ids=(5, place // 3)) for place, each in enumerate(requests(9))]
    tasks = await begun(wire, wire.client(), asked)
    assert wire.sent == [["r0", "r3", "r6", "r1", "r2", "r4", "r5", "r7", "r8"]]
    for task in tasks:
        task.cancel()


async def test_one_cancelled_request_is_aborted_alone_and_the_last_ones_close_the_connection() -> None:
    wire = Wire()
    tasks = await begun(wire, wire.client(), requests(4))
    tasks[1].cancel()
    await until(lambda: bool(wire.aborted))
    assert (wire.aborted, wire.num_closed) == (["r1"], 0)
    wire.replies["r0"].set_result(httpx.Response(200, content=b"{}"))
    assert (await tasks[0]).content == b"{}"
    tasks[2].cancel()
    tasks[3].cancel()
    await until(lambda: wire.num_closed > 0)
    assert (wire.aborted, wire.num_closed) == (["r1"], 1)


async def test_a_connection_that_breaks_fails_what_it_did_not_answer() -> None:
    wire = Wire()
    tasks = await begun(wire, wire.client(), requests(3))
    wire.replies["r0"].set_result(httpx.Response(200, content=b"{}"))
    await tasks[0]
    wire.replies["r1"].set_exception(httpx.ReadError("reset"))
    for task in tasks[1:]:
        with pytest.raises(EngineError, match=r"engine 0 .*generate: ClientConnectionError: reset"):
            await task


async def test_a_closed_client_leaves_nobody_waiting() -> None:
    wire = Wire()
    client = wire.client()
    (task,) = await begun(wire, client, requests(1))
    await client.close()
    with pytest.raises(EngineError, match="generate: the client was closed"):
        await task


def test_lines_are_put_together_from_any_pieces() -> None:
    lines = [Line(place=place, status_code=200, content=b'{"a": %d}' % place) for place in (2, 0, 11)]
    content = b"".join(line.encode() for line in lines)
    for size in (1, 3, len(content)):
        reader = LineReader(max_bytes=100)
        pieces = [content[start : start + size] for start in range(0, len(content), size)]
        assert [line for piece in pieces for line in reader.lines(piece)] == lines
    for bad in (b"220 mail.example\n", b"a b c\n", b"\n", b" " * 101):
        with pytest.raises(ValueError, match=r"no reply|more than 100 bytes"):
            list(LineReader(max_bytes=100).lines(bad))


async def test_a_real_engine_answers_a_list_as_it_answers_each_alone(qwen2_tp1: ServedModel) -> None:
    asked = [
        replace(each, max_new_tokens=8 + 4 * place, sampling_seed=place, rid=each.rid * 4)
        for place, each in enumerate(requests(6))
    ]
    async with qwen2_tp1.fleet() as fleet:
        client = fleet.engines[0].client
        alone = [json.loads((await client.generate(each)).content)["output_ids"] for each in asked]
        together = await asyncio.gather(*(client.generate(each) for each in asked))
        assert [json.loads(each.content)["output_ids"] for each in together] == alone
        # One that the engine refuses does not harm the others.
        long = replace(REQUEST, rid="long", max_new_tokens=10**6)
        fine, refused = await asyncio.gather(*map(client.generate, (asked[0], long)), return_exceptions=True)
        assert not isinstance(fine, BaseException)
        assert isinstance(refused, EngineError)
        assert "status 400" in str(refused)
        # Those of a connection that is closed end in the engine.
        # Greedy, this model never says its end token.
        endless = [replace(each, rid=f"endless{each.rid}", max_new_tokens=500, temperature=0.0) for each in requests(4)]
        tasks = [asyncio.create_task(client.generate(each)) for each in endless]
        await asyncio.sleep(0.3)
        for task in tasks:
            task.cancel()
        async with asyncio.timeout(60), httpx.AsyncClient(timeout=60) as http:
            metrics = f"{client.endpoint.url}/metrics"
            while not _ABORTED.search((await http.get(metrics)).text):
                await asyncio.sleep(0.1)


async def test_a_real_engine_streams_the_tokens_of_the_reply_that_it_gives_without_streaming(
    qwen2_tp1: ServedModel,
) -> None:
    asked = [
        replace(each, max_new_tokens=12, sampling_seed=place, rid=each.rid * 4)
        for place, each in enumerate(requests(3))
    ]
    told: list[list[int]] = []
    async with qwen2_tp1.fleet() as fleet:
        client = fleet.engines[0].client
        alone = [json.loads((await client.generate(each)).content) for each in asked]
        streamed, *others = await asyncio.gather(
            client.generate(asked[0], heard=lambda token_ids: told.append(list(token_ids))),
            *(client.generate(each) for each in asked[1:]),
        )
    for before, after in zip(alone, (json.loads(each.content) for each in (streamed, *others)), strict=True):
        for name in ("output_token_logprobs", "finish_reason", "weight_version"):
            assert before["meta_info"][name] == after["meta_info"][name]
        assert before["output_ids"] == after["output_ids"]
    assert len(told) > 1
    lengths = [len(token_ids) for token_ids in told]
    assert lengths == sorted(lengths)
    assert all(token_ids == alone[0]["output_ids"][: len(token_ids)] for token_ids in told)
