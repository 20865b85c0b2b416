"""An OpenAI-style server on loopback for agents: each episode has a key, and its session records the tokens.

Sampling is the recipe's; a request only sets messages, tools and a limit of tokens. A request whose messages continue
those of the last one continues its tokens; another one begins a row.

`ChatAgents` runs a user's agent in worker processes that talk to the server; `FunctionAgents` calls a user's function
in this process.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias, cast

import numpy as np
from aiohttp import web

from megarl.config.environment import CallFormat, ChatEnvironmentConfig, FunctionEnvironmentConfig
from megarl.config.section import GIB
from megarl.data.tokenizer import Tokenizer, ToolFunction
from megarl.episodes.class_environments import ask_process, open_pool, read_score, take_process
from megarl.episodes.dialogue import Dialogue
from megarl.episodes.protocol import Call, ChatMessage, Malformed, Row, SampledTurn, TokenSession
from megarl.episodes.worker import EnvironmentTask, LoadedClass, score_answer
from megarl.errors import ConfigError, DataError, EnvironmentLostError, MegarlError, Problem
from megarl.system.foreign import map_texts, one_line, whole_text
from megarl.system.user_code import describe_error, load_code
from megarl.types import JsonValue, Score, TokenArray

logger = logging.getLogger(__name__)

_MAX_REQUEST_BYTES = 2 << 20
_MAX_DIALOGUES = 16
"""Lists of tools whose dialogues are kept; an agent may send another list with every request."""
_MAX_IGNORED = 32
"""Names of fields without effect that are told."""
_KNOWN = {"model", "messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stream", "n", "user"}
_Body: TypeAlias = Mapping[str, JsonValue]
_UserFunction: TypeAlias = Callable[[Row, TokenSession, Tokenizer], Awaitable[object]]


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


class _RefusedError(Exception):
    """A request that the endpoint does not serve."""


class ChatEndpoint:
    """Serves `/v1/chat/completions` to the agents of one rollout worker."""

    def __init__(self, tokenizer: Tokenizer, *, call_format: CallFormat) -> None:
        self._tokenizer = tokenizer
        self._call_format = call_format
        self._dialogues: OrderedDict[str, Dialogue] = OrderedDict()
        self._conversations: dict[str, _Conversation] = {}
        self._runner: web.AppRunner | None = None
        self._ignored: set[str] = set()
        self.base_url = ""

    async def start(self) -> None:
        app = web.Application(client_max_size=_MAX_REQUEST_BYTES)
        app.add_routes([web.post("/v1/chat/completions", self._complete)])
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.base_url = f"http://{host}:{port}/v1"

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def admit(self, session: TokenSession) -> str:
        """Return the key of a new episode."""
        key = secrets.token_urlsafe(24)
        self._conversations[key] = _Conversation(session)
        return key

    def dismiss(self, key: str) -> MegarlError | None:
        """End an episode; return the failure of one of its requests, if there was one."""
        return self._conversations.pop(key).error

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


def agent_task(config: ChatEnvironmentConfig) -> EnvironmentTask:
    """Return what a worker process of an agent runs."""
    return EnvironmentTask(
        classes=[LoadedClass(path=str(config.path.resolve()), name=None, options={})],
        agent=config.name,
        has_user_class=False,
        memory_bytes=None if config.memory_gib is None else int(config.memory_gib * GIB),
        cpu_s=config.cpu_s,
        call_deadline_s=config.wall_s,
    )


class ChatAgents:
    """`Agents` that talk to a chat endpoint of this process."""

    def __init__(self, config: ChatEnvironmentConfig, tokenizer: Tokenizer, *, log_path: Path | None = None) -> None:
        self._wall_s = config.wall_s
        self._endpoint = ChatEndpoint(tokenizer, call_format=config.call_format)
        self._pool = open_pool(
            agent_task(config),
            workers=config.workers,
            episodes_per_worker=config.episodes_per_worker,
            log_path=log_path,
        )

    async def start(self) -> None:
        await self._endpoint.start()

    async def run(self, row: Row, session: TokenSession) -> Score:
        process = await take_process(self._pool)
        key = self._endpoint.admit(session)
        is_usable = False
        try:
            arguments: dict[str, JsonValue] = {"task": dict(row), "base_url": self._endpoint.base_url, "api_key": key}
            answer = await ask_process(process, "run", timeout_s=self._wall_s, arguments=arguments)
            is_usable = True
        finally:
            error = self._endpoint.dismiss(key)
            self._pool.give(process, is_usable=is_usable)
        if error is not None:
            raise error
        if "error" in answer:
            raise EnvironmentLostError(f"agent {answer['error']}")
        return read_score(answer)

    async def close(self) -> None:
        self._pool.close()
        await self._endpoint.close()


def load_function(config: FunctionEnvironmentConfig) -> _UserFunction:
    """Return the user's function; a ConfigError if it cannot be one."""
    function = load_code(config.code, key="environment.code")
    try:
        inspect.signature(function).bind(None, None, None)
    except TypeError:
        message = f"{config.code} must take row, session and tokenizer"
        raise ConfigError("recipe", (Problem(key="environment.code", message=message),)) from None
    if not inspect.iscoroutinefunction(function):
        message = f"{config.code} must be an async function: it awaits the model"
        raise ConfigError("recipe", (Problem(key="environment.code", message=message),))
    return cast("_UserFunction", function)


class FunctionAgents:
    """`Agents` of a function in this process."""

    def __init__(self, config: FunctionEnvironmentConfig, tokenizer: Tokenizer) -> None:
        self._function = load_function(config)
        self._tokenizer = tokenizer

    async def run(self, row: Row, session: TokenSession) -> Score:
        try:
            value = await self._function(row, session, self._tokenizer)
        except MegarlError:
            raise
        except Exception as error:
            # The user's code may raise anything.
            raise EnvironmentLostError(f"environment.code {describe_error(error)}") from error
        return read_score(cast("dict[str, JsonValue]", score_answer(value)))

    async def close(self) -> None:
        """Nothing to close."""
