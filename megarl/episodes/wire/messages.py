"""`/v1/messages`: Anthropic's messages, made of blocks."""

from __future__ import annotations

import json

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
    read_tools,
    text_of,
)
from megarl.types import JsonValue

_ERRORS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_THOUGHTS = ("thinking", "redacted_thinking")


class MessagesDialect(Dialect):
    path = "/v1/messages"
    known = frozenset(
        ("model", "messages", "system", "tools", "tool_choice", "max_tokens", "stream", "metadata", "thinking")
    )

    def read(self, body: Body) -> ModelRequest:
        messages: list[ChatMessage] = []
        if system := text_of(body.get("system")):
            messages.append({"role": "system", "content": system})
        for message in read_items(body, "messages"):
            messages += _messages(message)
        return ModelRequest(
            messages=tuple(messages),
            tools=read_tools(body.get("tools"), schema="input_schema"),
            max_tokens=read_limit(body, "max_tokens"),
            is_streamed=read_flag(body, "stream"),
            model=read_model(body),
        )

    def whole(self, request: ModelRequest, answer: ModelAnswer) -> dict[str, JsonValue]:
        content: list[JsonValue] = [{"type": "text", "text": answer.text}] if answer.text or not answer.calls else []
        content += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}
            for call in answer.calls
        ]
        head = _head(request, answer.id, answer.num_prompt_tokens)
        usage: JsonValue = {"input_tokens": answer.num_prompt_tokens, "output_tokens": answer.num_sampled}
        return {**head, "content": content, "stop_reason": _reason(answer), "usage": usage}

    def stream(self, request: ModelRequest, *, answer_id: str, num_prompt_tokens: int) -> AnswerStream:
        return _MessageStream(_head(request, answer_id, num_prompt_tokens))

    def error(self, status: int, message: str) -> dict[str, JsonValue]:
        kind = _ERRORS.get(status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}}


class _MessageStream(AnswerStream):
    def __init__(self, head: dict[str, JsonValue]) -> None:
        self._head = head
        self._has_text = False
        self._num_blocks = 0

    def begin(self) -> bytes:
        return _event("message_start", {"message": self._head})

    def text(self, piece: str) -> bytes:
        begin = b"" if self._has_text else self._block({"type": "text", "text": ""})
        self._has_text = True
        return begin + self._delta({"type": "text_delta", "text": piece})

    def end(self, answer: ModelAnswer) -> bytes:
        events = b""
        if not self._has_text and not answer.calls:
            events += self._block({"type": "text", "text": ""})
            self._has_text = True
        if self._has_text:
            events += self._close()
        for call in answer.calls:
            events += self._block({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            events += self._delta({"type": "input_json_delta", "partial_json": call.arguments})
            events += self._close()
        delta: JsonValue = {"stop_reason": _reason(answer), "stop_sequence": None}
        usage: JsonValue = {"input_tokens": answer.num_prompt_tokens, "output_tokens": answer.num_sampled}
        return events + _event("message_delta", {"delta": delta, "usage": usage}) + _event("message_stop", {})

    def error(self, message: str) -> bytes:
        return event(MessagesDialect().error(503, message), "error")

    def _block(self, block: JsonValue) -> bytes:
        return _event("content_block_start", {"index": self._num_blocks, "content_block": block})

    def _delta(self, delta: JsonValue) -> bytes:
        return _event("content_block_delta", {"index": self._num_blocks, "delta": delta})

    def _close(self) -> bytes:
        self._num_blocks += 1
        return _event("content_block_stop", {"index": self._num_blocks - 1})


def _event(kind: str, fields: dict[str, JsonValue]) -> bytes:
    return event({"type": kind, **fields}, kind)


def _head(request: ModelRequest, answer_id: str, num_prompt_tokens: int) -> dict[str, JsonValue]:
    return {
        "id": f"msg_{answer_id}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": num_prompt_tokens, "output_tokens": 0},
    }


def _reason(answer: ModelAnswer) -> str:
    if answer.calls:
        return "tool_use"
    return "max_tokens" if answer.is_cut else "end_turn"


def _messages(message: dict[str, JsonValue]) -> list[ChatMessage]:
    """Return the messages of one that may have results of calls among its blocks."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise RefusedError("every message must be an object with a role")
    if not isinstance(content, list):
        return [{"role": role, "content": text_of(content)}]
    texts: list[str] = []
    calls: list[JsonValue] = []
    results: list[ChatMessage] = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(block, dict) or kind in _THOUGHTS:
            continue
        match kind:
            case "tool_use":
                calls.append(call_of(block.get("id"), block.get("name"), block.get("input")))
            case "tool_result":
                result, call_id = text_of(block.get("content")), block.get("tool_use_id")
                results.append({"role": "tool", "tool_call_id": call_id, "content": result})
            case _:
                texts.append(text_of([block]))
    if results and not texts:
        return results
    said: dict[str, JsonValue] = {"role": role, "content": "".join(texts)}
    return [*results, {**said, "tool_calls": calls} if calls else said]
