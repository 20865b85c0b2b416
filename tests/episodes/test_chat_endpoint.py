"""The endpoint in all its dialects, by the clients that agents use; the model's texts are scripted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import aiohttp
import httpx
import numpy as np
import openai
import pytest

from megarl.data.tokenizer import Tokenizer
from megarl.episodes.chat_endpoint import Access, ChatEndpoint
from megarl.types import Ending, TurnKind
from tests.episodes.scripted import ScriptedSession
from tests.episodes.templates import family_tokenizer

_CALL = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
_TOOL: Any = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": _SCHEMA}}
_FLAT_TOOL: Any = {"type": "function", "name": "add", "description": "Add.", "parameters": _SCHEMA}
_ASKED: Any = {"role": "user", "content": "2+3?"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return family_tokenizer(tmp_path_factory.mktemp("qwen"), "qwen2.5", tools=())


@asynccontextmanager
async def _serving(tokenizer: Tokenizer, *sessions: ScriptedSession) -> AsyncIterator[list[Access]]:
    """Serve each session as an episode."""
    endpoint = ChatEndpoint(tokenizer, call_format="auto")
    await endpoint.start()
    try:
        async with asyncio.TaskGroup() as tasks:
            accesses: list[Access] = []
            is_over = asyncio.Event()

            async def play(session: ScriptedSession) -> None:
                async with endpoint.episode(session) as access:
                    accesses.append(access)
                    await is_over.wait()

            for session in sessions:
                tasks.create_task(play(session))
            while len(accesses) < len(sessions):
                await asyncio.sleep(0)
            try:
                yield accesses
            finally:
                is_over.set()
    finally:
        await endpoint.close()


def _client(access: Access, *, max_retries: int = 0) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=access.base_url, api_key=access.key, max_retries=max_retries)


def _history(tokenizer: Tokenizer, session: ScriptedSession) -> str:
    return tokenizer.decode(session.token_ids)


_CALLED_AND_ANSWERED = (
    f"<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n{_CALL}<|im_end|>\n"
    "<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\nIt is 5.<|im_end|>"
)


async def test_a_streamed_chat_with_a_call_is_recorded_as_one_row(tokenizer: Tokenizer) -> None:
    session = ScriptedSession(tokenizer, [_CALL, "It is 5."])
    async with _serving(tokenizer, session) as (access,), _client(access) as client:
        chat: list[Any] = [_ASKED]
        texts, calls, reasons = [], {}, []
        stream: Any = await client.chat.completions.create(
            model="policy", messages=chat, tools=[_TOOL], stream=True, stream_options={"include_usage": True}
        )
        async for chunk in stream:
            for choice in chunk.choices:
                texts.append(choice.delta.content or "")
                for call in choice.delta.tool_calls or []:
                    calls[call.index] = call
                reasons.append(choice.finish_reason)
            usage = chunk.usage
        (call,) = calls.values()
        assert ("".join(texts), reasons[-1], call.function.name) == ("I add.", "tool_calls", "add")
        assert len(texts) > 3
        assert usage.completion_tokens == len(tokenizer.encode([_CALL])[0]) + 1
        made = {"id": call.id, "type": "function", "function": call.function.model_dump()}
        chat += [
            {"role": "assistant", "content": "I add.", "tool_calls": [made]},
            {
                "role": "tool",
                "tool_call_id": call.id,
                "content": str(sum(json.loads(call.function.arguments).values())),
            },
        ]
        reply = await client.chat.completions.create(model="policy", messages=chat, tools=[_TOOL])
        assert reply.choices[0].message.content == "It is 5."
        assert [model.id async for model in client.models.list()] == ["policy"]
    assert session.num_rows == 1
    assert _history(tokenizer, session).endswith(_CALLED_AND_ANSWERED)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("is_named", [False, True])
async def test_responses_with_a_call_are_recorded_as_one_row(
    tokenizer: Tokenizer, is_streamed: bool, is_named: bool
) -> None:
    session = ScriptedSession(tokenizer, [_CALL, "It is 5."])
    async with _serving(tokenizer, session) as (access,), _client(access) as client:

        async def ask(items: list[Any], **keys: Any) -> Any:
            if not is_streamed:
                return await client.responses.create(model="policy", input=items, tools=[_FLAT_TOOL], **keys)
            async with client.responses.stream(model="policy", input=items, tools=[_FLAT_TOOL], **keys) as stream:
                pieces = [event.delta async for event in stream if event.type == "response.output_text.delta"]
                response = await stream.get_final_response()
                assert "".join(pieces) == response.output_text
                return response

        first = await ask([_ASKED])
        text, call = first.output
        assert (text.content[0].text, call.type, call.name) == ("I add.", "function_call", "add")
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "5"}
        if is_named:
            second = await ask([result], previous_response_id=first.id)
        else:
            second = await ask([_ASKED, *(item.model_dump() for item in first.output), result])
        assert (second.output_text, second.status) == ("It is 5.", "completed")
        with pytest.raises(openai.BadRequestError, match="of no response of this episode"):
            await client.responses.create(model="policy", input="so?", previous_response_id="resp_0")
    assert session.num_rows == 1
    assert _history(tokenizer, session).endswith(_CALLED_AND_ANSWERED)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_messages_with_a_call_are_recorded_as_one_row(tokenizer: Tokenizer, is_streamed: bool) -> None:
    session = ScriptedSession(tokenizer, [_CALL, "It is 5."])
    tool = {"name": "add", "description": "Add.", "input_schema": _SCHEMA}
    async with _serving(tokenizer, session) as (access,), httpx.AsyncClient(base_url=access.url) as client:

        async def ask(messages: list[Any]) -> dict[str, Any]:
            body = {"model": "m", "max_tokens": 99, "messages": messages, "tools": [tool], "stream": is_streamed}
            reply = await client.post("/v1/messages", json=body, headers={"x-api-key": access.key})
            assert reply.status_code == 200, reply.text
            return _message(reply.text) if is_streamed else reply.json()

        first = await ask([_ASKED])
        text, call = first["content"]
        assert (text, first["stop_reason"]) == ({"type": "text", "text": "I add."}, "tool_use")
        assert (call["name"], call["input"]) == ("add", {"a": 2, "b": 3})
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "5"}]}
        answered = {"role": "assistant", "content": first["content"]}
        second = await ask([_ASKED, answered, {"role": "user", "content": [result]}])
        assert (second["content"], second["stop_reason"]) == ([{"type": "text", "text": "It is 5."}], "end_turn")
        refused = await client.post("/v1/messages", json={"messages": []}, headers={"x-api-key": access.key})
        assert refused.json()["error"]["type"] == "invalid_request_error"
        unknown = await client.post("/v1/messages", json={"messages": []}, headers={"x-api-key": "another"})
        assert (unknown.status_code, unknown.json()["error"]["type"]) == (401, "authentication_error")
    assert session.num_rows == 1
    assert _history(tokenizer, session).endswith(_CALLED_AND_ANSWERED)


_PIXELS = "data:image/png;base64,iVBORw0KGgo="


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": _PIXELS}}]}]},
            "image_url",
        ),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "base64"}}]}]},
            "image",
        ),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": _PIXELS}]}]},
            "input_image",
        ),
    ],
)
async def test_an_image_is_refused_by_name_in_every_dialect(
    path: str, body: dict[str, Any], kind: str, tokenizer: Tokenizer
) -> None:
    session = ScriptedSession(tokenizer, [])
    async with _serving(tokenizer, session) as (access,), httpx.AsyncClient(base_url=access.url) as client:
        headers = {"x-api-key": access.key, "Authorization": f"Bearer {access.key}"}
        refused = await client.post(path, json={"model": "m", "max_tokens": 9, **body}, headers=headers)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == f"content must be text; parts of type {kind} are not served"


def _message(text: str) -> dict[str, Any]:
    """Put a message together from its events, as Anthropic's client does."""
    message: dict[str, Any] = {}
    for line in text.splitlines():
        if not line.startswith("data: "):
            continue
        event = json.loads(line.removeprefix("data: "))
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append({**event["content_block"], "json": ""})
            case "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                if delta["type"] == "text_delta":
                    block["text"] += delta["text"]
                else:
                    block["json"] += delta["partial_json"]
            case "content_block_stop":
                block = message["content"][event["index"]]
                written = block.pop("json")
                if written:
                    block["input"] = json.loads(written)
            case "message_delta":
                message |= event["delta"]
    return message


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_texts_are_continued_as_they_are(tokenizer: Tokenizer, is_streamed: bool) -> None:
    session = ScriptedSession(tokenizer, ["2+3=5", "6", "!"])
    async with _serving(tokenizer, session) as (access,), _client(access) as client:

        async def ask(prompt: Any) -> str:
            made: Any = await client.completions.create(
                model="policy", prompt=prompt, max_tokens=64, stream=is_streamed
            )
            if not is_streamed:
                return str(made.choices[0].text)
            return "".join([choice.text async for chunk in made for choice in chunk.choices])

        assert await ask("Sums: ") == "2+3=5"
        assert await ask("Sums: 2+3=5<|im_end|>3+3=") == "6"
        assert session.num_rows == 1
        assert await ask(tokenizer.encode(["Hello"])[0].tolist()) == "!"
        with pytest.raises(openai.BadRequestError, match="outside of the vocabulary"):
            await ask([5, tokenizer.vocab])
    assert session.num_rows == 2


async def test_a_client_that_hangs_up_ends_its_generation_and_the_episode_goes_on(tokenizer: Tokenizer) -> None:
    session = ScriptedSession(tokenizer, ["I think about it.", "It is 5.", "Yes."])
    session.script.going_on.clear()
    async with _serving(tokenizer, session) as (access,), _client(access) as client:
        stream: Any = await client.chat.completions.create(model="policy", messages=[_ASKED], stream=True)
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()
        while session.script.num_cancelled == 0:
            await asyncio.sleep(0.01)
        session.script.going_on.set()
        reply = await client.chat.completions.create(model="policy", messages=[_ASKED])
        assert reply.choices[0].message.content == "It is 5."
    rollout = session.finish(Ending.ANSWERED, None)
    assert tokenizer.decode(rollout.token_ids[rollout.loss_mask]) == "It is 5.<|im_end|>"


async def test_an_answer_that_did_not_arrive_is_given_again_and_not_sampled_again(tokenizer: Tokenizer) -> None:
    session = ScriptedSession(tokenizer, ["first", "second", "third"])
    async with _serving(tokenizer, session) as (access,), _client(access) as client:
        asked: Any = {"model": "policy", "messages": [_ASKED]}
        first = await client.chat.completions.create(**asked)
        again = await client.chat.completions.create(**asked, extra_headers={"x-stainless-retry-count": "1"})
        assert again.choices[0].message.content == first.choices[0].message.content == "first"
        assert again.id == first.id
        # Without a word that it is a retry, the same request asks for another answer.
        other = await client.chat.completions.create(**asked)
        assert other.choices[0].message.content == "second"
    assert session.num_sampled == 2


async def test_parallel_and_rewritten_conversations_are_rows_of_the_exact_tokens(tokenizer: Tokenizer) -> None:
    session = ScriptedSession(tokenizer, [f"<think>{number}</think>{number} \u00e9" for number in range(20)])
    async with _serving(tokenizer, session) as (access,), _client(access) as client:

        async def ask(chat: list[Any]) -> list[Any]:
            reply = await client.chat.completions.create(model="policy", messages=chat)
            return [*chat, {"role": "assistant", "content": reply.choices[0].message.content}]

        # Three agents at the same time, two turns each, and then the first goes back to its first turn.
        first = await asyncio.gather(*(ask([{"role": "user", "content": f"agent {each}"}]) for each in range(3)))
        second = await asyncio.gather(*(ask([*chat, {"role": "user", "content": "more"}]) for chat in first))
        await ask([*first[0], {"role": "user", "content": "other"}])
        await ask([second[1][0], {"role": "user", "content": "a summary"}])
        # Both continue the end of the same row at the same time.
        await asyncio.gather(*(ask([*second[2], {"role": "user", "content": f"branch {each}"}]) for each in range(2)))
    rollout = session.finish(Ending.ANSWERED, None)
    sampled = [turn for turn in rollout.episode.turns if turn.kind is TurnKind.SAMPLED]
    assert len(sampled) == 10
    assert len(rollout.episode.rows) == 6
    edges = (*rollout.episode.rows, rollout.num_tokens)
    histories = sorted(tuple(history.tolist()) for history in session.script.histories)
    rows = list(pairwise(edges))
    seen = [
        tuple(rollout.token_ids[start : turn.start].tolist())
        for turn in sampled
        for start, end in rows
        if start <= turn.start < end
    ]
    assert sorted(seen) == histories
    assert np.count_nonzero(rollout.loss_mask) == sum(turn.end - turn.start for turn in sampled)


async def test_an_episode_has_its_own_key_and_ends_with_it(tokenizer: Tokenizer) -> None:
    sessions = [ScriptedSession(tokenizer, [f"secret {number}"] * 3) for number in range(2)]
    async with _serving(tokenizer, *sessions) as accesses:
        assert accesses[0].key != accesses[1].key
        assert accesses[0].key not in repr(accesses[0])
        for number, access in enumerate(accesses):
            async with _client(access) as client:
                reply = await client.chat.completions.create(model="policy", messages=[_ASKED])
                assert reply.choices[0].message.content == f"secret {number}"
    endpoint = ChatEndpoint(tokenizer, call_format="auto")
    await endpoint.start()
    async with endpoint.episode(sessions[0]) as access:
        assert access.variables["ANTHROPIC_BASE_URL"] + "/v1" == access.variables["OPENAI_BASE_URL"]
    async with _client(access) as client:
        with pytest.raises(openai.AuthenticationError, match="no episode that is under way"):
            await client.chat.completions.create(model="policy", messages=[_ASKED])
    await endpoint.close()


async def test_an_episode_that_ends_ends_its_requests(tokenizer: Tokenizer) -> None:
    session = ScriptedSession(tokenizer, ["never said"])
    session.script.going_on.clear()
    endpoint = ChatEndpoint(tokenizer, call_format="auto")
    await endpoint.start()
    async with aiohttp.ClientSession() as client:
        async with endpoint.episode(session) as access:
            headers = {"Authorization": f"Bearer {access.key}"}
            body = {"messages": [_ASKED]}
            asking = asyncio.ensure_future(
                client.post(f"{access.base_url}/chat/completions", json=body, headers=headers)
            )
            while not session.script.histories:
                await asyncio.sleep(0.01)
        assert session.script.num_cancelled == 1
        with pytest.raises(aiohttp.ClientError):
            await asking
    await endpoint.close()


async def test_turns_and_tokens_are_used_up_without_an_error(tokenizer: Tokenizer) -> None:
    session = ScriptedSession(tokenizer, ["one two three"] * 9, max_turns=2)
    async with _serving(tokenizer, session) as (access,), _client(access) as client:
        replies = [await client.chat.completions.create(model="policy", messages=[_ASKED]) for _ in range(4)]
    assert [reply.choices[0].finish_reason for reply in replies] == ["stop", "stop", "length", "length"]
    assert (session.num_sampled, session.num_rows) == (2, 2)
    full = ScriptedSession(tokenizer, ["one two three"] * 9, max_tokens=50)
    async with _serving(tokenizer, full) as (access,), _client(access) as client:
        long: Any = {"role": "user", "content": "word " * 200}
        reply = await client.chat.completions.create(model="policy", messages=[long])
        assert (reply.choices[0].finish_reason, full.num_left) == ("length", 0)
