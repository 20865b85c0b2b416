"""The model over HTTP for agents, in the dialects of `wire`: an episode has a key, and its session records the tokens.

Sampling is the recipe's; a request only sets messages, tools and a limit of tokens. `conversation` finds the tokens
that it continues. A client that hangs up ends its generation; one that missed an answer gets it when it asks again.
An agent may be anything: what it sends is bounded in size, time and number, and harms no other episode.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import socket
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import msgspec
import numpy as np
from aiohttp import web

from megarl.config.environment import CallFormat
from megarl.data.tokenizer import Tokenizer, ToolFunction
from megarl.episodes.agent_reply import AgentReply, LostStreamError
from megarl.episodes.connections import Connections
from megarl.episodes.conversation import AgentConversation, Asked
from megarl.episodes.dialogue import Dialogue, text_before_calls
from megarl.episodes.protocol import Call, Malformed, TokenSession
from megarl.episodes.wire.chat import ChatDialect
from megarl.episodes.wire.completions import CompletionsDialect
from megarl.episodes.wire.messages import MessagesDialect
from megarl.episodes.wire.responses import ResponsesDialect
from megarl.episodes.wire.values import AnsweredCall, Body, Dialect, ModelAnswer, RefusedError
from megarl.errors import DataError, MegarlError
from megarl.system.foreign import map_texts, one_line, whole_text
from megarl.system.network import LOOPBACK
from megarl.types import JsonValue

logger = logging.getLogger(__name__)

_DIALECTS: tuple[Dialect, ...] = (ChatDialect(), CompletionsDialect(), ResponsesDialect(), MessagesDialect())
_BYTES_PER_TOKEN = 64
"""A request has at most so many for each token of the longest history: escapes and names take more than text."""
_LEAST_BODY_BYTES = 2 << 20
"""A history that is longer than the model takes is answered, not refused for its size."""
_UNKNOWN_KEY = "this key belongs to no episode that is under way"
_READ_S = 60.0
"""Time for an agent to send its request; an idle connection is closed after it."""
_MAX_DIALOGUES = 16
"""Lists of tools whose dialogues are kept; an agent may send another list with every request."""
_MAX_IGNORED = 32
"""Names of fields without effect that are told."""


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


class _StatusError(Exception):
    """A request that is answered with a status other than 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status, message)
        self.status = status
        self.message = message


class ChatEndpoint:
    """Serves the model to the agents of one rollout worker."""

    def __init__(self, tokenizer: Tokenizer, *, call_format: CallFormat, host: str = LOOPBACK) -> None:
        """`host` is the address of this machine that it listens on."""
        self._tokenizer = tokenizer
        self._host = host
        self._call_format = call_format
        self._dialogues: OrderedDict[bytes, Dialogue] = OrderedDict()
        self._conversations: dict[str, AgentConversation] = {}
        self._connections = Connections()
        self._runner: web.AppRunner | None = None
        self._ignored: set[str] = set()
        self._listener: asyncio.Server | None = None

    async def start(self) -> None:
        app = web.Application()
        app.add_routes([web.get("/v1/models", self._models)])
        for dialect in _DIALECTS:
            app.router.add_post(dialect.path, partial(self._answer, dialect=dialect))
        # A handler whose client is gone is cancelled, and with it the request to the engine.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, keepalive_timeout=_READ_S)
        await self._runner.setup()
        assert self._runner.server is not None, "it is set up"
        self._listener = await self._connections.listen(self._runner.server, self._host)

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()

    @asynccontextmanager
    async def episode(self, session: TokenSession, *, listener: socket.socket | None = None) -> AsyncIterator[Access]:
        """Serve an episode inside of the block; a failure of one of its requests that is not the agent's ends it.

        Its agent reaches the model at `listener`, where there is one, instead of the endpoint's own address.
        """
        own = None
        if listener is not None:
            assert self._runner is not None
            assert self._runner.server is not None, "it is set up"
            own = await self._connections.listen(self._runner.server, listener)
        key = secrets.token_urlsafe(24)
        self._conversations[key] = conversation = AgentConversation(session)
        try:
            yield Access(url=_url_of(own or self._listener), key=key)
        finally:
            if own is not None:
                own.close()
            del self._conversations[key]
            for task in conversation.tasks:
                task.cancel()
            if conversation.tasks:
                await asyncio.wait(conversation.tasks)
            if conversation.error is not None:
                # It is the cause of whatever the agent did afterwards.
                raise conversation.error

    async def _models(self, http: web.Request) -> web.Response:
        if self._conversation(http) is None:
            return web.json_response(_DIALECTS[0].error(401, _UNKNOWN_KEY), status=401)
        model: JsonValue = {"id": "policy", "object": "model", "created": 0, "owned_by": "megarl"}
        return web.json_response({"object": "list", "data": [model]})

    def _conversation(self, http: web.Request) -> AgentConversation | None:
        bearer = http.headers.get("Authorization", "").removeprefix("Bearer ")
        return self._conversations.get(http.headers.get("x-api-key") or bearer)

    async def _answer(self, http: web.Request, *, dialect: Dialect) -> web.StreamResponse:
        conversation, task = self._conversation(http), asyncio.current_task()
        assert task is not None, "a handler runs in a task"
        if conversation is None:
            return web.json_response(dialect.error(401, _UNKNOWN_KEY), status=401)
        if len(conversation.tasks) >= conversation.session.max_turns:
            message = "more requests are under way than the episode may have turns"
            return web.json_response(dialect.error(429, message), status=429)
        conversation.tasks.add(task)
        try:
            with self._connections.busy(http):
                return await self._reply(http, dialect, conversation)
        finally:
            conversation.tasks.discard(task)

    async def _reply(self, http: web.Request, dialect: Dialect, conversation: AgentConversation) -> web.StreamResponse:
        reply = None
        try:
            body = await _read_body(http, conversation.session)
            self._note_ignored(body, dialect)
            asked = conversation.asked(dialect.read(body))
            reply = AgentReply(http, dialect, asked.request)
            answer = conversation.recorded(asked, is_retry=_is_retry(http))
            if answer is None:
                answer = await self._turn(conversation, asked, reply)
            response = await reply.end(answer)
            conversation.deliver(asked)
            return response
        except _StatusError as error:
            status, message = error.status, error.message
        except RecursionError:
            status, message = 400, "the request is nested too deeply"
        except LostStreamError as error:
            status, message = 503, str(error)
        except (RefusedError, ValueError, DataError) as error:
            status, message = 400, one_line(error)
        except MegarlError as error:
            conversation.error = error
            status, message = 503, str(error)
        if reply is not None:
            return await reply.fail(status, message)
        return web.json_response(dialect.error(status, message), status=status)

    async def _turn(self, conversation: AgentConversation, asked: Asked, reply: AgentReply) -> ModelAnswer:
        """Sample and record the answer to a request."""
        if not conversation.session.has_turn:
            return ModelAnswer(text="", is_cut=True, num_prompt_tokens=0, num_sampled=0)
        tools = asked.request.tools
        dialogue = self._dialogue(tools)

        def spoken(text: str) -> str:
            return text_before_calls(text, dialogue.call_format) if tools else text

        async with conversation.place(asked, dialogue, self._tokenizer) as place:
            num_prompt_tokens = place.num_prompt_tokens
            sampled = await reply.sample(place, decode=self._tokenizer.decode, spoken=spoken)
            calls = dialogue.calls(sampled.text) if tools else []
            has_calls = isinstance(calls, list) and len(calls) > 0
            answer = ModelAnswer(
                text=spoken(sampled.text) if has_calls else sampled.text,
                calls=() if isinstance(calls, Malformed) else _made(calls),
                is_cut=sampled.is_cut,
                num_prompt_tokens=num_prompt_tokens,
                num_sampled=len(sampled.token_ids),
                id=reply.answer_id,
            )
            if answer.num_sampled:
                conversation.note(asked, place, answer, sampled.text)
            return answer

    def _dialogue(self, tools: Sequence[ToolFunction]) -> Dialogue:
        key = msgspec.json.encode(tools)
        if key not in self._dialogues:
            tokenizer = self._tokenizer.with_tools(tools)
            limit = int(np.iinfo(np.int32).max)  # an agent cuts its tools' results itself
            self._dialogues[key] = Dialogue(tokenizer, max_result_tokens=limit, call_format=self._call_format)
        self._dialogues.move_to_end(key)
        if len(self._dialogues) > _MAX_DIALOGUES:
            self._dialogues.popitem(last=False)
        return self._dialogues[key]

    def _note_ignored(self, body: Body, dialect: Dialect) -> None:
        new = {name for name, value in body.items() if value is not None} - dialect.known - self._ignored
        ignored = sorted(new)[: _MAX_IGNORED - len(self._ignored)]
        if ignored:
            self._ignored.update(ignored)
            names = ", ".join(one_line(name, max_characters=40) for name in ignored)
            logger.warning("agents ask for %s: sampling is the recipe's, these have no effect", names)


def _url_of(listener: asyncio.Server | None) -> str:
    assert listener is not None, "the endpoint is started"
    host, port = listener.sockets[0].getsockname()
    return f"http://{host}:{port}"


async def _read_body(http: web.Request, session: TokenSession) -> Body:
    limit = max(_LEAST_BODY_BYTES, _BYTES_PER_TOKEN * session.max_row_tokens)
    # Most come whole with their headers: nothing is waited for.
    content = http.content.read_nowait() if http.content.is_eof() else await _awaited_body(http, limit)
    if len(content) > limit:
        raise _StatusError(413, f"the request has more than {limit} bytes")
    try:
        body = msgspec.json.decode(content)
    except msgspec.MsgspecError:
        # What is no text, as half of a pair of surrogates, comes from files that agents read.
        body = map_texts(json.loads(content), whole_text)
    if not isinstance(body, dict):
        raise _StatusError(400, "the request must be a JSON object")
    return cast("Body", body)


async def _awaited_body(http: web.Request, limit: int) -> bytearray:
    """Return the body, or what is known of one that is too long."""
    content = bytearray()
    try:
        async with asyncio.timeout(_READ_S):
            async for chunk in http.content.iter_any():
                content += chunk
                if len(content) > limit:
                    break
    except TimeoutError:
        raise _StatusError(408, f"the request was not there within {_READ_S:g} s") from None
    return content


def _is_retry(http: web.Request) -> bool:
    """Whether the client says that it sends the request again, as those of OpenAI and Anthropic do."""
    return http.headers.get("x-stainless-retry-count", "0") != "0"


def _made(calls: Sequence[Call]) -> tuple[AnsweredCall, ...]:
    unique = secrets.token_hex(6)
    return tuple(
        AnsweredCall(id=f"{call.id}_{unique}", name=call.name, arguments=json.dumps(dict(call.arguments)))
        for call in calls
    )
