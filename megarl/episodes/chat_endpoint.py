"""An OpenAI-style server for agents: each episode has a key, and its session records the tokens.

Sampling is the recipe's; a request only sets messages, tools and a limit of tokens. A request whose messages continue
those of the last one continues its tokens; another one begins a row.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeAlias, cast

import numpy as np
from aiohttp import web

from megarl.config.environment import CallFormat
from megarl.data.tokenizer import Tokenizer, ToolFunction
from megarl.episodes.dialogue import Dialogue
from megarl.episodes.protocol import Call, ChatMessage, Malformed, SampledTurn, TokenSession
from megarl.errors import DataError, MegarlError
from megarl.system.foreign import map_texts, one_line, whole_text
from megarl.system.network import LOOPBACK
from megarl.types import JsonValue, TokenArray

logger = logging.getLogger(__name__)

_MAX_REQUEST_BYTES = 2 << 20
_MAX_DIALOGUES = 16
"""Lists of tools whose dialogues are kept; an agent may send another list with every request."""
_MAX_IGNORED = 32
"""Names of fields without effect that are told."""
_KNOWN = {"model", "messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stream", "n", "user"}
_Body: TypeAlias = Mapping[str, JsonValue]


@dataclass(slots=True)
class _Conversation:
    """The requests of one episode."""

    session: TokenSession
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held during a request: the turns of an episode come one after the other."""
    said: list[ChatMessage] = field(default_factory=list)
    """The messages of the last request and its answer, as the agent knows them."""
    rendered: list[ChatMessage] = field(default_factory=list)
    """The same as the template gets them: answers are the texts that the model wrote."""
    tools: str = ""
    last_ids: TokenArray | None = None
    """The tokens of the last answer."""
    own: set[str] = field(default_factory=set)
    """All texts that the model wrote in the episode."""
    error: MegarlError | None = None
    """The failure of a request that is not the agent's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """An agent's access to the model for one episode."""

    url: str
    """Such as http://10.0.0.7:4711, for clients that add the version of the API themselves."""
    key: str = field(repr=False)
    """Valid as long as the episode, and for it alone."""

    @property
    def base_url(self) -> str:
        """The URL for clients of OpenAI's API."""
        return f"{self.url}/v1"

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables from which clients read URL and key."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.key,
        }


class _RefusedError(Exception):
    """A request that the endpoint does not serve."""


class ChatEndpoint:
    """Serves `/v1/chat/completions` to the agents of one rollout worker."""

    def __init__(self, tokenizer: Tokenizer, *, call_format: CallFormat, host: str = LOOPBACK) -> None:
        """`host` is the address of this machine that it listens on."""
        self._tokenizer = tokenizer
        self._host = host
        self._call_format = call_format
        self._dialogues: OrderedDict[str, Dialogue] = OrderedDict()
        self._conversations: dict[str, _Conversation] = {}
        self._runner: web.AppRunner | None = None
        self._ignored: set[str] = set()
        self._url = ""

    async def start(self) -> None:
        app = web.Application(client_max_size=_MAX_REQUEST_BYTES)
        app.add_routes([web.post("/v1/chat/completions", self._complete)])
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self._url = f"http://{host}:{port}"

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @asynccontextmanager
    async def episode(self, session: TokenSession) -> AsyncIterator[Access]:
        """Serve an episode inside of the block; a failure of one of its requests that is not the agent's ends it."""
        key = secrets.token_urlsafe(24)
        self._conversations[key] = conversation = _Conversation(session)
        try:
            yield Access(url=self._url, key=key)
        finally:
            del self._conversations[key]
            if conversation.error is not None:
                # It is the cause of whatever the agent did afterwards.
                raise conversation.error

    async def _complete(self, request: web.Request) -> web.Response:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        conversation = self._conversations.get(key)
        if conversation is None:
            return _error(401, "this key belongs to no episode that is under way")
        try:
            body = _checked(map_texts(json.loads(await request.read()), whole_text))
            async with conversation.lock:
                return web.json_response(await self._turn(conversation, body))
        except RecursionError:
            return _error(400, "the request is nested too deeply")
        except (_RefusedError, ValueError, DataError) as error:
            return _error(400, one_line(error))
        except MegarlError as error:
            conversation.error = error
            return _error(503, str(error))

    async def _turn(self, conversation: _Conversation, body: _Body) -> dict[str, JsonValue]:
        self._note_ignored(body)
        messages = cast("list[ChatMessage]", body["messages"])
        tools = cast("list[ToolFunction]", body.get("tools") or [])
        dialogue = self._dialogue(tools)
        await self._extend(conversation, dialogue, messages, tools)
        num_prompt_tokens = len(conversation.session.token_ids)
        sampled = await conversation.session.sample(max_tokens=_token_limit(body))
        calls = dialogue.calls(sampled.text) if tools else []
        answer, reason = _answer(sampled, [] if isinstance(calls, Malformed) else calls)
        conversation.said = [*messages, answer]
        conversation.rendered = [*conversation.rendered, {"role": "assistant", "content": sampled.text}]
        conversation.last_ids = sampled.token_ids
        conversation.own.add(sampled.text)
        return _completion(answer, reason, num_prompt_tokens, len(sampled.token_ids), str(body.get("model", "policy")))

    async def _extend(
        self,
        conversation: _Conversation,
        dialogue: Dialogue,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolFunction],
    ) -> None:
        """Bring the session's history to the end of the request's messages."""
        known, key = len(conversation.said), json.dumps(tools)
        new = [_plain(message) for message in messages[known:]]
        continues = (
            conversation.last_ids is not None
            and conversation.tools == key
            and len(new) > 0
            and all(message["role"] != "assistant" for message in new)
            and list(map(_essence, messages[:known])) == list(map(_essence, conversation.said))
        )
        conversation.tools = key
        if not continues:
            conversation.rendered = [self._shown(_plain(message), conversation.own) for message in messages]
            conversation.session.begin_row(await dialogue.prompt_ids(conversation.rendered))
            return
        shown = [self._shown(message, conversation.own) for message in new]
        conversation.rendered += shown
        assert conversation.last_ids is not None
        suffix = await dialogue.suffix(conversation.last_ids, shown)
        if suffix is None:
            conversation.session.begin_row(await dialogue.whole(conversation.rendered))
        else:
            conversation.session.append(suffix)

    def _shown(self, message: ChatMessage, own: Set[str]) -> ChatMessage:
        """Return a message of an agent as text alone, but for the texts that the model wrote itself.

        Other texts under the model's name keep the marks of thoughts and calls, which are no control tokens.
        """
        tokenizer = self._tokenizer
        if message["role"] != "assistant":
            return cast("ChatMessage", map_texts(message, tokenizer.plain))
        if message["content"] in own and "tool_calls" not in message:
            return message
        return cast("ChatMessage", map_texts(message, tokenizer.without_control))

    def _dialogue(self, tools: Sequence[ToolFunction]) -> Dialogue:
        key = json.dumps(tools)
        if key not in self._dialogues:
            tokenizer = self._tokenizer.with_tools(tools)
            limit = int(np.iinfo(np.int32).max)  # an agent cuts its tools' results itself
            self._dialogues[key] = Dialogue(tokenizer, max_result_tokens=limit, call_format=self._call_format)
        self._dialogues.move_to_end(key)
        if len(self._dialogues) > _MAX_DIALOGUES:
            self._dialogues.popitem(last=False)
        return self._dialogues[key]

    def _note_ignored(self, body: _Body) -> None:
        new = {name for name, value in body.items() if value is not None} - _KNOWN - self._ignored
        ignored = sorted(new)[: _MAX_IGNORED - len(self._ignored)]
        if ignored:
            self._ignored.update(ignored)
            names = ", ".join(one_line(name, max_characters=40) for name in ignored)
            logger.warning("agents ask for %s: sampling is the recipe's, these have no effect", names)


def _checked(body: object) -> _Body:
    """Return a request that can be served; a _RefusedError says what cannot."""
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list) or not body["messages"]:
        raise _RefusedError("messages must be a list of at least one message")
    for message in body["messages"]:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _RefusedError("every message must be an object with a role")
        if not isinstance(message.get("content", ""), str | list | None):
            raise _RefusedError("content must be text")
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(_is_function(tool) for tool in tools):
        raise _RefusedError("tools must be a list of functions with names")
    if body.get("stream"):
        raise _RefusedError("streaming is not served; leave out stream")
    if body.get("n") not in (None, 1):
        raise _RefusedError("one choice is served per request; leave out n")
    return body


def _is_function(tool: object) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _token_limit(body: _Body) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        limit = body.get(name)
        if limit is None:
            continue
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            raise _RefusedError(f"{name} must be a whole number above 0")
        return limit
    return None


def _text(content: JsonValue) -> str:
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict)]
        if any(part.get("type") != "text" for part in parts):
            raise _RefusedError("content must be text; pictures and sounds are not served")
        return "".join(str(part.get("text", "")) for part in parts)
    return str(content) if content is not None else ""


def _plain(message: ChatMessage) -> ChatMessage:
    """Return a message as templates take it: content is text, the arguments of calls are objects."""
    plain: dict[str, JsonValue] = {"role": message["role"], "content": _text(message.get("content"))}
    for name in ("name", "tool_call_id"):
        if isinstance(message.get(name), str):
            plain[name] = message[name]
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        plain["tool_calls"] = [_plain_call(call) for call in calls]
    return plain


def _plain_call(call: JsonValue) -> JsonValue:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise _RefusedError("every tool call must have a function")
    arguments = function.get("arguments")
    read = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {"type": "function", "id": call.get("id"), "function": {"name": function.get("name"), "arguments": read}}


def _essence(message: ChatMessage) -> tuple[object, ...]:
    """Return what tells one message from another, without the empty fields that client libraries add."""
    plain = _plain(message)
    return plain["role"], plain["content"], plain.get("tool_call_id"), json.dumps(plain.get("tool_calls"))


def _answer(sampled: SampledTurn, calls: Sequence[Call]) -> tuple[ChatMessage, str]:
    """Return the message and the finish reason."""
    if not calls:
        return {"role": "assistant", "content": sampled.text}, "length" if sampled.is_cut else "stop"
    before = sampled.text.partition("<tool_call>")[0].strip() if "<tool_call>" in sampled.text else ""
    unique = secrets.token_hex(6)
    made: list[JsonValue] = [
        {
            "type": "function",
            "id": f"{call.id}_{unique}",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
        }
        for call in calls
    ]
    return {"role": "assistant", "content": before or None, "tool_calls": made}, "tool_calls"


def _completion(
    answer: ChatMessage, reason: str, num_prompt_tokens: int, num_sampled: int, model: str
) -> dict[str, JsonValue]:
    usage: dict[str, JsonValue] = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt_tokens + num_sampled,
    }
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": dict(answer), "finish_reason": reason, "logprobs": None}],
        "usage": usage,
    }


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "invalid_request_error"}}, status=status)
