"""The requests of one agent in one episode, and the rows of tokens that they continue. Knows no HTTP.

A request whose messages go on after an answer continues the tokens of that answer, wherever it is in the episode:
agents shorten their histories, edit earlier messages, and have conversations beside each other. Where the answer is the
end of a row the row goes on; else a row begins with a copy of the tokens up to there. Messages are not kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import cast

import msgspec
import numpy as np

from megarl.data.tokenizer import Tokenizer
from megarl.episodes.dialogue import Dialogue
from megarl.episodes.protocol import ChatMessage, TokenRow, TokenSession
from megarl.episodes.wire.values import ModelAnswer, ModelRequest, RefusedError
from megarl.errors import MegarlError
from megarl.system.foreign import map_texts
from megarl.types import TokenArray

_ENCODER = msgspec.json.Encoder(order="deterministic")
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """The end of an answer in a row."""

    row: TokenRow
    num_tokens: int
    """The length of the row's history up to there."""
    num_sampled: int
    """The last of them are the answer."""

    @property
    def history(self) -> TokenArray:
        return self.row.token_ids[: self.num_tokens]

    @property
    def is_tip(self) -> bool:
        return len(self.row.token_ids) == self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request with the names of what it has, by which others are compared with it."""

    request: ModelRequest
    """With all messages."""
    names: tuple[bytes, ...]
    """One for each message, with the tools and all messages before it."""
    key: bytes
    """Names the whole request."""
    brought: tuple[ChatMessage, ...]
    """The messages that it brought itself."""

    @classmethod
    def of(cls, request: ModelRequest, *, brought: tuple[ChatMessage, ...]) -> Asked:
        name = _digest(_ENCODER.encode(request.tools)) if request.tools else b""
        names = []
        for message in request.messages:
            name = _next_name(name, message)
            names.append(name)
        what = request.prompt if request.prompt is not None else names[-1]
        key = _digest(_ENCODER.encode((what, request.max_tokens)))
        return cls(request=request, names=tuple(names), key=key, brought=brought)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlace:
    """Where the answer to a request is sampled."""

    row: TokenRow
    given: TokenArray | None = None
    """The tokens of the request that its row does not have yet."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.row.token_ids) + (0 if self.given is None else len(self.given))


@dataclass(slots=True)
class AgentConversation:
    """All requests of one episode."""

    session: TokenSession
    tasks: set[asyncio.Task[object]] = field(default_factory=set)
    """Requests under way."""
    error: MegarlError | None = None
    """The failure of a request that is not the agent's."""
    _points: dict[bytes, _Point] = field(default_factory=dict)
    _busy: list[TokenRow] = field(default_factory=list)
    _own: dict[bytes, str] = field(default_factory=dict)
    """The texts that the model wrote, by the messages that the agent got."""
    _text_points: dict[int, bytes] = field(default_factory=dict)
    """The names of prompts that are texts, with their answers, by their lengths."""
    _undelivered: dict[bytes, ModelAnswer] = field(default_factory=dict)
    _delivered: dict[bytes, ModelAnswer] = field(default_factory=dict)
    _followed: dict[str, tuple[str | None, tuple[ChatMessage, ...]]] = field(default_factory=dict)
    """By the id of an answer: that of the answer that it followed, and the messages after that one."""

    def asked(self, request: ModelRequest) -> Asked:
        """Return a request with the messages before the answer that it names."""
        if request.after is None:
            return Asked.of(request, brought=request.messages)
        num_system = int(request.messages[0]["role"] == "system")
        parts: list[Sequence[ChatMessage]] = [request.messages[num_system:]]
        answer_id: str | None = request.after
        while answer_id is not None:
            if answer_id not in self._followed:
                raise RefusedError("previous_response_id is of no response of this episode")
            answer_id, messages = self._followed[answer_id]
            # As in OpenAI's API, instructions hold for their own request.
            parts.append([each for each in messages if each["role"] != "system"])
        parts.append(request.messages[:num_system])
        whole = tuple(each for part in reversed(parts) for each in part)
        return Asked.of(replace(request, messages=whole), brought=request.messages)

    def recorded(self, asked: Asked, *, is_retry: bool) -> ModelAnswer | None:
        """Return the answer to the same request if its client did not get it, or says that it did not."""
        return self._undelivered.get(asked.key) or (self._delivered.get(asked.key) if is_retry else None)

    def deliver(self, asked: Asked) -> None:
        """Record that a client has got the answer to a request."""
        if asked.key in self._undelivered:
            self._delivered[asked.key] = self._undelivered.pop(asked.key)

    @asynccontextmanager
    async def place(self, asked: Asked, dialogue: Dialogue, tokenizer: Tokenizer) -> AsyncIterator[RowPlace]:
        """Find the place of a request, and keep its row from other requests meanwhile."""
        prompt = asked.request.prompt
        place = await (
            self._place_messages(asked, dialogue, tokenizer) if prompt is None else self._place_text(prompt, tokenizer)
        )
        self._busy.append(place.row)
        try:
            yield place
        finally:
            self._busy.remove(place.row)

    def note(self, asked: Asked, place: RowPlace, answer: ModelAnswer, written: str) -> None:
        """Record an answer whose tokens are the end of its row; `written` is all that the model wrote."""
        self._undelivered[asked.key] = answer
        prompt = asked.request.prompt
        if prompt is None:
            name = _next_name(asked.names[-1], answer.message)
            self._own[_essence(answer.message)] = written
            self._followed[answer.id] = asked.request.after, (*asked.brought, answer.message)
        elif isinstance(prompt, str):
            text = prompt + written
            self._text_points[len(text)] = name = _digest(text.encode())
        else:
            return
        num_tokens = len(place.row.token_ids)
        self._points[name] = _Point(row=place.row, num_tokens=num_tokens, num_sampled=answer.num_sampled)

    async def _place_messages(self, asked: Asked, dialogue: Dialogue, tokenizer: Tokenizer) -> RowPlace:
        messages = asked.request.messages
        last = max((at for at, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
        point = self._points.get(asked.names[last]) if 0 <= last < len(messages) - 1 else None
        if point is not None:
            shown = [self._shown(message, tokenizer) for message in messages[last + 1 :]]
            suffix = await dialogue.suffix(point.history[-point.num_sampled :], shown)
            if suffix is not None:
                return self._after(point, suffix)

        def shown_all() -> list[ChatMessage]:
            return [self._shown(message, tokenizer) for message in messages]

        if last < 0:
            # Nothing in it is this episode's own.
            history = await dialogue.first(_digest(_ENCODER.encode(messages)), shown_all)
        else:
            history = await dialogue.whole(shown_all())
        return RowPlace(row=self.session.open_row(history))

    def _after(self, point: _Point, suffix: TokenArray) -> RowPlace:
        if point.is_tip and not any(row is point.row for row in self._busy):
            return RowPlace(row=point.row, given=suffix)
        return RowPlace(row=self.session.open_row(np.concatenate([point.history, suffix])))

    async def _place_text(self, prompt: str | tuple[int, ...], tokenizer: Tokenizer) -> RowPlace:
        if not isinstance(prompt, str):
            if not all(0 <= each < tokenizer.vocab for each in prompt):
                raise RefusedError(f"prompt has ids of tokens outside of the vocabulary of {tokenizer.vocab}")
            return RowPlace(row=self.session.open_row(np.array(prompt, np.int32)))
        known = self._longest_known(prompt)
        if known is None:
            return RowPlace(row=self.session.open_row(await tokenizer.encode_aside(prompt)))
        length, point = known
        rest = prompt[length:]
        last = int(point.history[-1])
        if last in tokenizer.eos_ids:
            end = tokenizer.decode(point.history[-1:])
            if not rest.startswith(end):
                # The agent goes on where the model ended: its text has no end token there.
                cut = np.concatenate([point.history[:-1], await tokenizer.encode_aside(rest)])
                return RowPlace(row=self.session.open_row(cut))
            rest = rest.removeprefix(end)
        return self._after(point, await tokenizer.encode_aside(rest))

    def _longest_known(self, prompt: str) -> tuple[int, _Point] | None:
        """Return the longest beginning of a text that is a prompt with its answer."""
        digest, done, found = blake2b(digest_size=_DIGEST_BYTES), 0, None
        for length in sorted(self._text_points):
            if length >= len(prompt):
                break
            digest.update(prompt[done:length].encode())
            done = length
            if digest.digest() == self._text_points[length]:
                found = length, self._points[self._text_points[length]]
        return found

    def _shown(self, message: ChatMessage, tokenizer: Tokenizer) -> ChatMessage:
        """Return a message of an agent as text alone, but for the texts that the model wrote itself.

        Other texts under the model's name keep the marks of thoughts and calls, which are no control tokens.
        """
        if message["role"] != "assistant":
            return cast("ChatMessage", map_texts(message, tokenizer.plain))
        if (written := self._own.get(_essence(message))) is not None:
            return {"role": "assistant", "content": written}
        return cast("ChatMessage", map_texts(message, tokenizer.without_control))


def _essence(message: ChatMessage) -> bytes:
    """Return a name of what tells one message from another, without the fields that client libraries add."""
    fields = (message["role"], message["content"], message.get("tool_call_id"), message.get("tool_calls"))
    return _digest(_ENCODER.encode(fields))


def _next_name(name: bytes, message: ChatMessage) -> bytes:
    return _digest(name + _essence(message))


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=_DIGEST_BYTES).digest()
