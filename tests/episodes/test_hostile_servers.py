"""Tool servers and agents that send too much, too long, or nonsense."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data.tokenizer import Tokenizer
from megarl.episodes import mcp_environments
from megarl.episodes.chat_endpoint import ChatEndpoint
from megarl.episodes.mcp_environments import open_mcp
from megarl.episodes.openenv_environments import OpenEnvEnvironments, open_openenv, step_tool
from megarl.episodes.protocol import Call, Transcript
from megarl.errors import ConfigError, EnvironmentLostError, MegarlError
from tests import hostile
from tests.episodes.scripted import ScriptedSession
from tests.episodes.templates import ADD, family_tokenizer

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_STEP = Call(name="step", arguments={"guess": 1}, id="call_0")
_OVER = Transcript(prompt=(), messages=(), ending="answered")
_MARKS = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</think>")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return family_tokenizer(tmp_path_factory.mktemp("qwen"), "qwen2.5", tools=())


@asynccontextmanager
async def _serving(handler: _Handler) -> AsyncIterator[str]:
    """Serve every request in this process; yield host and port."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"{host}:{port}"
    finally:
        await runner.cleanup()


def _flood(content_type: str) -> tuple[_Handler, list[int]]:
    """Return a handler that sends for ever, and where it counts the bytes."""
    sent = [0]

    async def handler(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Type": content_type})
        await reply.prepare(request)
        while True:
            await reply.write(b'[["' + b"x" * (1 << 20))
            sent[0] += 1 << 20

    return handler, sent


# OpenEnv


def _playing(*answers: object) -> _Handler:
    """Return an OpenEnv server that gives one answer after the other, texts as they are."""

    async def handler(request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        for answer in answers:
            await socket.receive()
            await socket.send_str(answer if isinstance(answer, str) else json.dumps(answer))
        await socket.receive()
        return socket

    return handler


def _observed(**data: object) -> dict[str, object]:
    return {"type": "observation", "data": {"observation": {"text": "here"}, "done": False, **data}}


@asynccontextmanager
async def _environments(handler: _Handler, timeout_s: float = 20) -> AsyncIterator[OpenEnvEnvironments]:
    tool = step_tool(json.dumps({"action": {"properties": {"guess": {}}}}).encode())
    async with _serving(handler) as address, aiohttp.ClientSession() as session:
        yield OpenEnvEnvironments(session, f"ws://{address}/ws", tool=tool, timeout_s=timeout_s)


@pytest.mark.parametrize("reward", ["1" + "0" * 400, "1e308", "NaN", "1e30", '"much"'])
async def test_a_reward_that_is_not_finite_in_32_bits_loses_the_environment(reward: str) -> None:
    answer = json.dumps(_observed(reward="REWARD")).replace('"REWARD"', reward)
    async with _environments(_playing(_observed(), answer)) as environments:
        environment = await environments.open({})
        with pytest.raises(EnvironmentLostError, match="not finite in 32 bits"):
            await environment.call(_STEP)
        await environment.close()


async def test_numbers_of_a_state_that_are_not_finite_are_left_out() -> None:
    state = json.dumps({"type": "state", "data": {"big": "BIG", "steps": 2, **{f"n{i}": i for i in range(999)}}})
    answers = (_observed(), _observed(reward=1.0, done=True), state.replace('"BIG"', "1" + "0" * 400))
    async with _environments(_playing(*answers)) as environments:
        environment = await environments.open({})
        assert (await environment.call(_STEP)).ended
        score = await environment.score(_OVER)
        assert score is not None
        assert (score.value, score.components["steps"], "big" in score.components) == (1.0, 2.0, False)
        assert len(score.components) <= 65
        await environment.close()


@settings(max_examples=40)
@given(opening=hostile.values(), answer=hostile.values(), is_whole=st.booleans())
def test_no_message_of_a_server_raises_anything_but_the_loss_of_the_environment(
    opening: object, answer: object, is_whole: bool
) -> None:
    async def play() -> None:
        data = {"observation": answer, "reward": answer, "done": True}
        second = {"type": "observation", "data": data if is_whole else answer}
        last = {"type": "state", "data": {"a": answer} if is_whole else answer}
        async with _environments(_playing(_observed(observation=opening), second, last)) as environments:
            with suppress(EnvironmentLostError):
                environment = await environments.open({})
                try:
                    await environment.call(_STEP)
                    await environment.score(_OVER)
                finally:
                    await environment.close()

    asyncio.run(play())


async def test_an_observation_that_is_nested_deeply_is_a_lost_environment_or_text() -> None:
    deep = json.dumps(_observed(observation="DEEP")).replace('"DEEP"', "[" * 900 + "]" * 900)
    async with _environments(_playing(deep)) as environments:
        with suppress(EnvironmentLostError):
            await (await environments.open({})).close()


@given(hostile.values())
def test_any_schema_is_a_tool_or_refused(value: object) -> None:
    for described in (value, {"action": value}, {"action": {"properties": value, "required": value}}):
        with suppress(ValueError):
            assert step_tool(json.dumps(described).encode()).name == "step"


async def test_a_schema_without_end_is_refused_before_it_fills_the_memory() -> None:
    handler, sent = _flood("application/json")
    async with _serving(handler) as address:
        with pytest.raises(ConfigError, match="more than 4194304 bytes"):
            await open_openenv(f"ws://{address}/ws", key=None, timeout_s=60)
    assert sent[0] < 64 << 20


# The Model Context Protocol


@pytest.mark.parametrize("content_type", ["application/json", "text/event-stream"])
async def test_a_reply_of_a_tool_server_without_end_is_cut(content_type: str) -> None:
    handler, sent = _flood(content_type)
    async with _serving(handler) as address:
        with pytest.raises(ConfigError, match="does not answer"):
            await open_mcp({"flood": f"http://{address}/mcp"}, keys={}, timeout_s=20)
    assert sent[0] < 128 << 20


def _stub(monkeypatch: pytest.MonkeyPatch, client: object) -> None:
    """Let sessions have this client instead of a connection."""

    async def connected(self: object) -> object:
        return client

    async def hold(self: object) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(mcp_environments._Session, "_connected", connected)
    monkeypatch.setattr(mcp_environments._Session, "_hold", hold)
    monkeypatch.setattr(mcp_environments, "_CLOSE_TIMEOUT_S", 0.1)


@pytest.mark.fault("a tool server whose list of tools has no end", "refused at one deadline for the whole list")
@pytest.mark.parametrize(("pause_s", "why"), [(0.0, "more than 64 pages"), (0.4, "no answer within 1 s")])
async def test_a_list_of_tools_without_end_is_refused(
    pause_s: float, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages: list[object] = []

    class Endless:
        async def list_tools(self, *, cursor: str | None) -> object:
            await asyncio.sleep(pause_s)
            pages.append(cursor)
            return SimpleNamespace(tools=[], next_cursor=f"{len(pages)}")

    _stub(monkeypatch, Endless())
    with pytest.raises(ConfigError, match=why):
        await open_mcp({"endless": "http://127.0.0.1:9/mcp"}, keys={}, timeout_s=1)
    assert len(pages) <= 64


async def test_a_list_of_tools_that_fills_every_prompt_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wordy:
        async def list_tools(self, *, cursor: str | None) -> object:
            tool = SimpleNamespace(name="add", description="x" * (5 << 20), input_schema={})
            return SimpleNamespace(tools=[tool], next_cursor=None)

    _stub(monkeypatch, Wordy())
    with pytest.raises(ConfigError, match="more than 4194304 bytes"):
        await open_mcp({"wordy": "http://127.0.0.1:9/mcp"}, keys={}, timeout_s=5)


# The chat endpoint


@asynccontextmanager
async def _posting(
    tokenizer: Tokenizer, session: ScriptedSession
) -> AsyncIterator[Callable[[bytes], Awaitable[tuple[int, str]]]]:
    """Yield a function that posts a body to the endpoint and returns status and text."""
    endpoint = ChatEndpoint(tokenizer, call_format="auto")
    await endpoint.start()
    try:
        async with (
            endpoint.episode(session) as access,
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {access.key}"}) as client,
        ):

            async def post(body: bytes) -> tuple[int, str]:
                async with client.post(f"{access.base_url}/chat/completions", data=body) as reply:
                    return reply.status, await reply.text()

            post.endpoint = endpoint  # type: ignore[attr-defined]
            yield post
    finally:
        await endpoint.close()


def _body(text: str, **keys: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text}], **keys}).encode()


@pytest.mark.patient
@settings(max_examples=40)
@given(texts=st.lists(hostile.texts(_MARKS), min_size=3, max_size=3), value=hostile.values())
def test_a_message_of_an_agent_has_no_control_token_and_no_request_is_an_error_of_the_server(
    tokenizer: Tokenizer, texts: list[str], value: object
) -> None:
    said, name, description = texts

    async def counts() -> list[int]:
        session = ScriptedSession(tokenizer, ["a"] * 9)
        found = []
        async with _posting(tokenizer, session) as post:
            for one, other, third in ((said, name, description), ("hi", "x", "y")):
                chat = [{"role": "user", "content": one}, {"role": "tool", "name": other, "content": third}]
                tools = [{"type": "function", "function": {**ADD.as_function["function"], "description": third}}]  # type: ignore[dict-item]
                status, _ = await post(json.dumps({"messages": chat, "tools": tools}).encode())
                assert status == 200
                found.append(int(np.isin(session.token_ids, list(tokenizer._inner.added_tokens_decoder)).sum()))
            for key in ("messages", "tools", "max_tokens", "n", "stream", "model", said):
                status, _ = await post(json.dumps({**json.loads(_body("hi")), key: value}).encode())
                assert status in (200, 400)
        return found

    hostile_count, plain_count = asyncio.run(counts())
    assert hostile_count == plain_count


async def test_what_the_model_wrote_comes_back_as_it_was_and_other_text_keeps_its_thoughts(
    tokenizer: Tokenizer,
) -> None:
    session = ScriptedSession(tokenizer, ["<think>hm</think>5<|endoftext|>!", "b", "c"])
    async with _posting(tokenizer, session) as post:
        _, first = await post(_body("hi"))
        own = json.loads(first)["choices"][0]["message"]["content"]
        for said in (own, "<think>ha</think>6<|im_end|>"):
            chat = [{"role": "user", "content": "new"}, {"role": "assistant", "content": said}]
            await post(json.dumps({"messages": [*chat, {"role": "user", "content": "so?"}]}).encode())
            history = tokenizer.decode(session.token_ids)
            assert (own in history) == (said is own)
        assert "<think>ha</think>6< |im_end|><|im_end|>" in history


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (_body("hi", max_tokens=-5), 400),
        (_body("hi", max_tokens=0), 400),
        (_body("hi", max_completion_tokens=True), 400),
        (_body("hi", max_tokens="9"), 400),
        (_body("hi", tools=[{"name": "add"}]), 400),
        (_body("hi", tools="all"), 400),
        (b'{"messages": ' + b"[" * 100_000, 400),
        (b"\xff\xfe", 400),
    ],
)
async def test_odd_requests_are_refused_and_the_server_goes_on(body: bytes, status: int, tokenizer: Tokenizer) -> None:
    async with _posting(tokenizer, ScriptedSession(tokenizer, ["a"])) as post:
        found, text = await post(body)
        assert found == status, text
        assert "\n" not in text


async def test_lists_of_tools_and_names_of_fields_leave_little_behind(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    async with _posting(tokenizer, ScriptedSession(tokenizer, ["a"] * 60)) as post:
        with caplog.at_level(logging.WARNING):
            for number in range(60):
                tools = [{"type": "function", "function": {"name": f"tool_{number}", "parameters": {}}}]
                status, _ = await post(_body("hi", tools=tools, **{f"odd\n\x1b[2J{number}" + "x" * 99: 1}))
                assert status == 200
        assert len(post.endpoint._dialogues) <= 16  # type: ignore[attr-defined]
    told = [record.getMessage() for record in caplog.records if "agents ask for" in record.getMessage()]
    assert len(told) == 32
    assert all(text.isprintable() and len(text) < 150 for text in told)


async def test_a_long_message_does_not_hold_the_event_loop(tokenizer: Tokenizer) -> None:
    async with _posting(tokenizer, ScriptedSession(tokenizer, ["a"])) as post:
        posting = asyncio.ensure_future(post(_body("the sum " * 100_000)))
        longest, loop = 0.0, asyncio.get_running_loop()
        while not posting.done():
            began = loop.time()
            await asyncio.sleep(0.005)
            longest = max(longest, loop.time() - began)
        assert (await posting)[0] == 200
    assert longest < 0.5  # it takes 2 s in all on one core


async def test_an_error_of_an_engine_is_not_the_agents(tokenizer: Tokenizer) -> None:
    with pytest.raises(MegarlError, match="gone"):
        async with _posting(tokenizer, ScriptedSession(tokenizer, [], error=MegarlError("gone"))) as post:
            assert (await post(_body("hi")))[0] == 503
