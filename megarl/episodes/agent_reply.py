"""The reply to one request of an agent: whole when it is complete, or as a stream while it is sampled. Knows HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from secrets import token_hex

import msgspec
import numpy as np
from aiohttp import web

from megarl.episodes.conversation import RowPlace
from megarl.episodes.protocol import SampledTurn
from megarl.episodes.wire.values import AnswerStream, Dialect, ModelAnswer, ModelRequest
from megarl.types import TokenArray

WRITE_S = 60.0
"""Time for a client to take what is sent."""
_WAKE_S = 10.0
"""A stream without news has a comment so often: proxies close silent ones, and a client that is gone is noticed."""
_GATHER_S = 0.05
"""Tokens that come within this time of others are sent together: an event for each would cost more than all else."""
_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_UNFINISHED = "\ufffd"
"""The text of bytes that are not a whole character yet."""


class LostStreamError(Exception):
    """The answer is not the one that was begun; it is recorded, and the same request gets it whole."""


class AgentReply:
    def __init__(self, http: web.Request, dialect: Dialect, request: ModelRequest) -> None:
        self._http = http
        self._dialect = dialect
        self._request = request
        self._response: web.StreamResponse | None = None
        self._stream: AnswerStream | None = None
        self._said = ""
        self.answer_id = token_hex(12)

    async def sample(
        self, place: RowPlace, *, decode: Callable[[TokenArray], str], spoken: Callable[[str], str]
    ) -> SampledTurn:
        """Return the turn; meanwhile stream, if that was asked for, what `spoken` leaves of its text."""
        given, max_tokens = place.given, self._request.max_tokens
        if not self._request.is_streamed:
            return await place.row.sample(given=given, max_tokens=max_tokens)
        await self._begin(self.answer_id, place.num_prompt_tokens)
        is_new, text = asyncio.Event(), GrowingText(decode)
        so_far: Callable[[], TokenArray] | None = None

        def hear(heard: Callable[[], TokenArray]) -> None:
            nonlocal so_far
            so_far = heard
            is_new.set()

        turn = asyncio.create_task(place.row.sample(given=given, max_tokens=max_tokens, heard=hear))
        turn.add_done_callback(lambda _: is_new.set())
        try:
            while not turn.done():
                try:
                    async with asyncio.timeout(_WAKE_S):
                        await is_new.wait()
                except TimeoutError:
                    await self._write(b": waiting\n\n")
                    continue
                is_new.clear()
                if so_far is not None and await self._say(spoken(text.grow(so_far()))):
                    await asyncio.wait([turn], timeout=_GATHER_S)
            return await turn
        finally:
            turn.cancel()
            await asyncio.wait([turn])

    async def end(self, answer: ModelAnswer) -> web.StreamResponse:
        """Send the answer, or the rest of it; return when the client's side has it."""
        if not self._request.is_streamed:
            content = msgspec.json.encode(self._dialect.whole(self._request, answer))
            response = web.Response(body=content, content_type="application/json")
            await self._within_time(self._sent(response))
            return response
        if self._stream is None:
            await self._begin(answer.id, answer.num_prompt_tokens)
        if not answer.text.startswith(self._said):
            raise LostStreamError("an engine was lost during the stream; send the request again")
        assert self._stream is not None, "it was begun"
        rest = answer.text[len(self._said) :]
        return await self._finish((self._stream.text(rest) if rest else b"") + self._stream.end(answer))

    async def _sent(self, response: web.Response) -> None:
        await response.prepare(self._http)
        await response.write_eof()

    async def fail(self, status: int, message: str) -> web.StreamResponse:
        """Send an error."""
        if self._stream is not None:
            return await self._finish(self._stream.error(message))
        return web.json_response(self._dialect.error(status, message), status=status)

    async def _begin(self, answer_id: str, num_prompt_tokens: int) -> None:
        self._response = web.StreamResponse(headers=_HEADERS)
        await self._within_time(self._response.prepare(self._http))
        self._stream = self._dialect.stream(self._request, answer_id=answer_id, num_prompt_tokens=num_prompt_tokens)
        await self._write(self._stream.begin())

    async def _say(self, text: str) -> bool:
        """Send what the text has more than was sent; return whether it has."""
        assert self._stream is not None, "it was begun"
        piece = text[len(self._said) :]
        if not piece or not text.startswith(self._said):
            return False
        self._said = text
        await self._write(self._stream.text(piece))
        return True

    async def _finish(self, events: bytes) -> web.StreamResponse:
        """Send the last events with the end of the reply: each part for itself costs as much as all."""
        assert self._response is not None, "it was begun"
        await self._within_time(self._response.write_eof(events))
        return self._response

    async def _write(self, events: bytes) -> None:
        assert self._response is not None, "it was begun"
        if events:
            await self._within_time(self._response.write(events))

    async def _within_time(self, sending: Awaitable[object]) -> None:
        try:
            async with asyncio.timeout(WRITE_S):
                await sending
        except TimeoutError:
            if self._http.transport is not None:
                self._http.transport.abort()
            raise ConnectionResetError(f"the client took nothing for {WRITE_S:g} s") from None


class GrowingText:
    """The text of tokens that come one after the other, by decoding only the last ones."""

    def __init__(self, decode: Callable[[TokenArray], str]) -> None:
        self._decode = decode
        self._token_ids: TokenArray = np.empty(0, np.int32)
        self._text = ""
        self._first = 0
        """Tokens before it are not decoded again."""

    def grow(self, token_ids: TokenArray) -> str:
        """Return the text of all tokens, without a character whose last bytes are still to come."""
        known = len(self._token_ids)
        if not np.array_equal(token_ids[:known], self._token_ids):
            self._token_ids, self._text, self._first, known = token_ids[:0], "", 0, 0
        # A token's text may depend on the one before it.
        before, after = self._decode(token_ids[self._first : known]), self._decode(token_ids[self._first :])
        if len(after) > len(before) and not after.endswith(_UNFINISHED):
            self._text += after[len(before) :]
            self._first, self._token_ids = known, token_ids
        return self._text
