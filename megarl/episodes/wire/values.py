"""A request to the model and its answer, whatever the dialect; and what a dialect is. Knows no tokens and no HTTP."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from secrets import token_hex
from typing import ClassVar, TypeAlias

import msgspec

from megarl.data.tokenizer import ToolFunction
from megarl.episodes.protocol import ChatMessage
from megarl.types import JsonValue

Body: TypeAlias = Mapping[str, JsonValue]


class RefusedError(Exception):
    """A request that is not served; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    messages: tuple[ChatMessage, ...] = ()
    """In the form that templates take: content is text, the arguments of calls are objects."""
    prompt: str | tuple[int, ...] | None = None
    """Text or tokens to continue as they are, in place of messages."""
    tools: tuple[ToolFunction, ...] = ()
    max_tokens: int | None = None
    is_streamed: bool = False
    has_usage: bool = False
    """Whether a stream ends with the numbers of tokens, where its dialect leaves that to the request."""
    model: str = "policy"
    after: str | None = None
    """The id of the answer that the messages follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredCall:
    id: str
    name: str
    arguments: str
    """JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAnswer:
    text: str
    """Without the calls."""
    calls: tuple[AnsweredCall, ...] = ()
    is_cut: bool
    num_prompt_tokens: int
    num_sampled: int
    id: str = field(default_factory=lambda: token_hex(12))

    @property
    def message(self) -> ChatMessage:
        """The answer as a message of the next request."""
        calls: list[JsonValue] = [
            {
                "type": "function",
                "id": call.id,
                "function": {"name": call.name, "arguments": json.loads(call.arguments)},
            }
            for call in self.calls
        ]
        message: dict[str, JsonValue] = {"role": "assistant", "content": self.text}
        return {**message, "tool_calls": calls} if calls else message


class Dialect(ABC):
    """The form of requests, answers, streams and errors at one path."""

    path: ClassVar[str]
    known: ClassVar[frozenset[str]]
    """Fields that have an effect, or need none."""

    @abstractmethod
    def read(self, body: Body) -> ModelRequest:
        """Return what is asked for; a RefusedError if it cannot be served."""

    @abstractmethod
    def whole(self, request: ModelRequest, answer: ModelAnswer) -> dict[str, JsonValue]:
        """Return the reply to a request that is not streamed."""

    @abstractmethod
    def stream(self, request: ModelRequest, *, answer_id: str, num_prompt_tokens: int) -> AnswerStream:
        """Return what writes the events of one reply."""

    def error(self, status: int, message: str) -> dict[str, JsonValue]:
        kinds = {401: "authentication_error", 429: "rate_limit_error", 503: "server_error"}
        kind = kinds.get(status, "invalid_request_error")
        return {"error": {"message": message, "type": kind, "param": None, "code": None}}


class AnswerStream(ABC):
    """The events of one reply, in their order: the beginning, pieces of text, then the end or an error."""

    def begin(self) -> bytes:
        return b""

    @abstractmethod
    def text(self, piece: str) -> bytes: ...

    @abstractmethod
    def end(self, answer: ModelAnswer) -> bytes:
        """Return the events after all text."""

    @abstractmethod
    def error(self, message: str) -> bytes: ...


def event(value: Mapping[str, JsonValue], name: str | None = None) -> bytes:
    data = b"data: " + msgspec.json.encode(value) + b"\n\n"
    return data if name is None else b"event: " + name.encode() + b"\n" + data


def read_limit(body: Body, *names: str) -> int | None:
    """Return the first of these limits of tokens that is set."""
    for name in names:
        limit = body.get(name)
        if limit is None:
            continue
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            raise RefusedError(f"{name} must be a whole number above 0")
        return limit
    return None


def read_model(body: Body) -> str:
    return str(body.get("model") or "policy")


def read_flag(body: Body, name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise RefusedError(f"{name} must be true or false")
    return bool(value)


def read_items(body: Body, name: str) -> list[dict[str, JsonValue]]:
    """Return a list of objects."""
    items = body.get(name)
    if not isinstance(items, list) or not items:
        raise RefusedError(f"{name} must be a list of at least one message")
    objects = [item for item in items if isinstance(item, dict)]
    if len(objects) < len(items):
        raise RefusedError(f"every entry of {name} must be an object")
    return objects


def read_tools(tools: JsonValue, *, schema: str) -> tuple[ToolFunction, ...]:
    """Return tools that are listed without a `function` around them; `schema` names their parameters."""
    if not isinstance(tools or [], list):
        raise RefusedError("tools must be a list")
    found: list[ToolFunction] = []
    for tool in tools if isinstance(tools, list) else ():
        if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
            raise RefusedError("every tool must be a function with a name; tools of a provider are not served")
        function: dict[str, JsonValue] = {"name": tool["name"], "parameters": tool.get(schema) or {}}
        if isinstance(tool.get("description"), str):
            function["description"] = tool["description"]
        found.append({"type": "function", "function": function})
    return tuple(found)


def text_of(content: JsonValue, kinds: Sequence[str] = ("text",)) -> str:
    """Return the text of a content: a text, or a list of parts of these kinds."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RefusedError("content must be text")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, dict) or part.get("type") not in kinds:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RefusedError(f"content must be text; parts of type {str(kind)[:40]} are not served")
        texts.append(str(part.get("text") or ""))
    return "".join(texts)


def read_arguments(arguments: JsonValue) -> JsonValue:
    """Return the arguments of a call as an object where they are JSON."""
    if not isinstance(arguments, str):
        return arguments
    try:
        read: JsonValue = json.loads(arguments or "{}")
    except ValueError:
        raise RefusedError("the arguments of a call must be JSON") from None
    return read


def call_of(call_id: JsonValue, name: JsonValue, arguments: JsonValue) -> JsonValue:
    if not isinstance(name, str):
        raise RefusedError("every call must name a function")
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": read_arguments(arguments)}}
