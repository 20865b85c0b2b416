"""`/v1/chat/completions`: OpenAI's chats, which most agents speak."""

from __future__ import annotations

import time
from typing import cast

from megarl.data.tokenizer import ToolFunction
from megarl.episodes.protocol import ChatMessage
from megarl.episodes.wire.values import (
    AnswerStream,
    Body,
    Dialect,
    ModelAnswer,
    ModelRequest,
    RefusedError,
    call_of,
    event,
    read_flag,
    read_items,
    read_limit,
    read_model,
    text_of,
)
from megarl.types import JsonValue

DONE = b"data: [DONE]\n\n"


class ChatDialect(Dialect):
    path = "/v1/chat/completions"
    known = frozenset(
        (
            *("model", "messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stream"),
            *("stream_options", "n", "user", "store", "metadata", "parallel_tool_calls"),
        )
    )

    def read(self, body: Body) -> ModelRequest:
        if body.get("n") not in (None, 1):
            raise RefusedError("one choice is served per request; leave out n")
        tools = body.get("tools") or []
        if not isinstance(tools, list) or not all(_is_function(tool) for tool in tools):
            raise RefusedError("tools must be a list of functions with names")
        options = body.get("stream_options")
        return ModelRequest(
            messages=tuple(map(_message, read_items(body, "messages"))),
            tools=tuple(cast("list[ToolFunction]", tools)),
            max_tokens=read_limit(body, "max_completion_tokens", "max_tokens"),
            is_streamed=read_flag(body, "stream"),
            has_usage=isinstance(options, dict) and bool(options.get("include_usage")),
            model=read_model(body),
        )

    def whole(self, request: ModelRequest, answer: ModelAnswer) -> dict[str, JsonValue]:
        message: dict[str, JsonValue] = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.calls:
            message |= {"content": answer.text or None, "tool_calls": _calls(answer)}
        choice: dict[str, JsonValue] = {
            "index": 0,
            "message": message,
            "finish_reason": _reason(answer),
            "logprobs": None,
        }
        return {
            "id": f"chatcmpl-{answer.id}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": request.model,
            "choices": [choice],
            "usage": usage_of(answer),
        }

    def stream(self, request: ModelRequest, *, answer_id: str, num_prompt_tokens: int) -> AnswerStream:
        return _ChatStream(request, answer_id)


class _ChatStream(AnswerStream):
    def __init__(self, request: ModelRequest, answer_id: str) -> None:
        self._request = request
        self._head: dict[str, JsonValue] = {
            "id": f"chatcmpl-{answer_id}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": request.model,
        }

    def begin(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def text(self, piece: str) -> bytes:
        return self._chunk({"content": piece})

    def end(self, answer: ModelAnswer) -> bytes:
        events = b""
        if answer.calls:
            events += self._chunk({"tool_calls": _calls(answer)})
        events += self._chunk({}, reason=_reason(answer))
        if self._request.has_usage:
            events += event({**self._head, "choices": [], "usage": usage_of(answer)})
        return events + DONE

    def error(self, message: str) -> bytes:
        return event(ChatDialect().error(503, message)) + DONE

    def _chunk(self, delta: dict[str, JsonValue], *, reason: str | None = None) -> bytes:
        choice: dict[str, JsonValue] = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}
        return event({**self._head, "choices": [choice]})


def _reason(answer: ModelAnswer) -> str:
    if answer.calls:
        return "tool_calls"
    return "length" if answer.is_cut else "stop"


def usage_of(answer: ModelAnswer) -> dict[str, JsonValue]:
    return {
        "prompt_tokens": answer.num_prompt_tokens,
        "completion_tokens": answer.num_sampled,
        "total_tokens": answer.num_prompt_tokens + answer.num_sampled,
    }


def _calls(answer: ModelAnswer) -> list[JsonValue]:
    return [
        {
            "index": place,
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for place, call in enumerate(answer.calls)
    ]


def _is_function(tool: object) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _message(message: dict[str, JsonValue]) -> ChatMessage:
    role = message.get("role")
    if not isinstance(role, str):
        raise RefusedError("every message must be an object with a role")
    plain: dict[str, JsonValue] = {
        "role": "system" if role == "developer" else role,
        "content": text_of(message.get("content")),
    }
    for name in ("name", "tool_call_id"):
        if isinstance(message.get(name), str):
            plain[name] = message[name]
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        plain["tool_calls"] = [_call(call) for call in calls]
    return plain


def _call(call: JsonValue) -> JsonValue:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise RefusedError("every tool call must have a function")
    return call_of(call.get("id"), function.get("name"), function.get("arguments"))
