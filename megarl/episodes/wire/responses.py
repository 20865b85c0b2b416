"""`/v1/responses`: OpenAI's responses, made of items; a request may name the response that it follows."""

from __future__ import annotations

import time
from typing import cast

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

_TEXTS = ("input_text", "output_text", "text")


class ResponsesDialect(Dialect):
    path = "/v1/responses"
    known = frozenset(
        (
            *("model", "input", "instructions", "tools", "tool_choice", "max_output_tokens", "stream", "store"),
            *("previous_response_id", "include", "metadata", "parallel_tool_calls", "user", "prompt_cache_key"),
        )
    )

    def read(self, body: Body) -> ModelRequest:
        messages: list[ChatMessage] = []
        if instructions := text_of(body.get("instructions"), _TEXTS):
            messages.append({"role": "system", "content": instructions})
        if isinstance(body.get("input"), str):
            messages.append({"role": "user", "content": body["input"]})
        else:
            _add_items(messages, read_items(body, "input"))
        after = body.get("previous_response_id")
        if after is not None and not isinstance(after, str):
            raise RefusedError("previous_response_id must be the id of a response")
        return ModelRequest(
            messages=tuple(messages),
            tools=read_tools(body.get("tools"), schema="parameters"),
            max_tokens=read_limit(body, "max_output_tokens"),
            is_streamed=read_flag(body, "stream"),
            model=read_model(body),
            after=None if after is None else after.removeprefix("resp_"),
        )

    def whole(self, request: ModelRequest, answer: ModelAnswer) -> dict[str, JsonValue]:
        output: list[JsonValue] = [] if answer.calls and not answer.text else [_text_item(answer.id, answer.text)]
        output += [_call_item(answer, place) for place in range(len(answer.calls))]
        return {
            **_head(request, answer.id),
            "status": "incomplete" if answer.is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if answer.is_cut else None,
            "output": output,
            "usage": {
                "input_tokens": answer.num_prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": answer.num_sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": answer.num_prompt_tokens + answer.num_sampled,
            },
        }

    def stream(self, request: ModelRequest, *, answer_id: str, num_prompt_tokens: int) -> AnswerStream:
        return _ResponseStream(self, request, answer_id)


class _ResponseStream(AnswerStream):
    def __init__(self, dialect: ResponsesDialect, request: ModelRequest, answer_id: str) -> None:
        self._dialect = dialect
        self._request = request
        self._id = answer_id
        self._texts: list[str] = []
        self._num_events = 0

    def begin(self) -> bytes:
        response = _head(self._request, self._id)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def text(self, piece: str) -> bytes:
        begin = b""
        if not self._texts:
            item = {**_text_item(self._id, ""), "status": "in_progress", "content": []}
            begin = self._event("response.output_item.added", output_index=0, item=item)
            begin += self._event("response.content_part.added", **self._place, part=_part(""))
        self._texts.append(piece)
        return begin + self._event("response.output_text.delta", **self._place, delta=piece, logprobs=[])

    def end(self, answer: ModelAnswer) -> bytes:
        events = b""
        if not self._texts and not answer.calls:
            events += self.text("")
        if self._texts:
            text = "".join(self._texts)
            events += self._event("response.output_text.done", **self._place, text=text, logprobs=[])
            events += self._event("response.content_part.done", **self._place, part=_part(text))
            item = _text_item(self._id, text)
            events += self._event("response.output_item.done", output_index=0, item=item)
        for number, call in enumerate(answer.calls):
            place, item = number + bool(self._texts), _call_item(answer, number)
            named: dict[str, JsonValue] = {"item_id": item["id"], "output_index": place}
            opened = {**item, "arguments": "", "status": "in_progress"}
            events += self._event("response.output_item.added", output_index=place, item=opened)
            events += self._event("response.function_call_arguments.delta", **named, delta=call.arguments)
            events += self._event(
                "response.function_call_arguments.done", **named, name=call.name, arguments=call.arguments
            )
            events += self._event("response.output_item.done", output_index=place, item=item)
        whole = self._dialect.whole(self._request, answer)
        return events + self._event(f"response.{whole['status']}", response=whole)

    def error(self, message: str) -> bytes:
        return self._event("error", code="server_error", message=message, param=None)

    @property
    def _place(self) -> dict[str, JsonValue]:
        return {"item_id": f"msg_{self._id}", "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **fields: JsonValue) -> bytes:
        self._num_events += 1
        return event({"type": kind, "sequence_number": self._num_events - 1, **fields}, kind)


def _head(request: ModelRequest, answer_id: str) -> dict[str, JsonValue]:
    return {
        "id": f"resp_{answer_id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "model": request.model,
        "output": [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "previous_response_id": None if request.after is None else f"resp_{request.after}",
        "temperature": None,
        "top_p": None,
        "usage": None,
    }


def _part(text: str) -> JsonValue:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _text_item(answer_id: str, text: str) -> dict[str, JsonValue]:
    return {
        "id": f"msg_{answer_id}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [_part(text)],
    }


def _call_item(answer: ModelAnswer, number: int) -> dict[str, JsonValue]:
    call = answer.calls[number]
    return {
        "id": f"fc_{answer.id}_{number}",
        "type": "function_call",
        "status": "completed",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
    }


def _add_items(messages: list[ChatMessage], items: list[dict[str, JsonValue]]) -> None:
    for item in items:
        match item.get("type", "message"):
            case "message":
                role = item.get("role")
                if not isinstance(role, str):
                    raise RefusedError("every message must be an object with a role")
                text = text_of(item.get("content"), _TEXTS)
                messages.append({"role": "system" if role == "developer" else role, "content": text})
            case "function_call":
                call = call_of(item.get("call_id"), item.get("name"), item.get("arguments"))
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                calls = cast("list[JsonValue]", messages[-1].get("tool_calls") or [])
                messages[-1] = {**messages[-1], "tool_calls": [*calls, call]}
            case "function_call_output":
                text = text_of(item.get("output"), _TEXTS)
                messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
            case "reasoning":
                continue
            case kind:
                raise RefusedError(f"items of type {str(kind)[:40]} are not served")
