"""Requests for tokens to one engine: those of one moment are sent as one, and each is answered when it is done.

An HTTP request costs the engine's server more than the tokens of a small model cost its GPU. A group's rollouts begin
in one moment, so they travel together. The caller sees single requests: each has its own reply, failure and end. The
reply of `/generate` to a list of requests is one `Line` for each, which the server sends when its response is done.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from megarl.engine.http import MAX_REPLY_BYTES, EngineHttp, HttpError, HttpReply
from megarl.errors import EngineError
from megarl.types import JsonValue

logger = logging.getLogger(__name__)

_CUT_GRACE_S = 30.0
"""Time for an engine to return the tokens of a late request."""
_IDS_DECODER = msgspec.json.Decoder(list[int])
_MAX_TOGETHER = 64
"""Requests in one: the server reads a body at once, and hands out no tokens meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """A reply to one request as it came; `reply` decodes and checks it."""

    content: bytes
    is_cut: bool
    """The request was late and was aborted: the reply has its tokens until then, or all of them."""


@dataclass(slots=True, eq=False)
class _Asked:
    rid: str
    fields: Mapping[str, JsonValue]
    prompt: Hashable
    answer: asyncio.Future[Generated]
    heard: Callable[[Sequence[int]], None] | None = None
    token_ids: list[int] = field(default_factory=list)
    """The response so far, for `heard`."""
    batch: _Batch | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class _Batch:
    """Requests that were sent together."""

    asked: Sequence[_Asked]
    lines: LineReader = field(default_factory=lambda: LineReader(max_bytes=MAX_REPLY_BYTES))
    sending: asyncio.Task[None] | None = None
    is_cut: bool = False
    unwanted: list[_Asked] = field(default_factory=list)
    """Requests whose callers were cancelled a moment ago."""

    @property
    def open(self) -> list[_Asked]:
        return [asked for asked in self.asked if not asked.answer.done()]


class RequestBatches:
    """All requests for tokens to one engine."""

    def __init__(
        self,
        http: EngineHttp,
        *,
        key: str,
        timeout_s: float,
        abort: Callable[[str], Awaitable[None]],
        failed: Callable[[str], EngineError],
    ) -> None:
        """`abort` ends one request in the engine, `failed` makes the error of one from its reason."""
        self._http = http
        self._key = key
        self._timeout_s = timeout_s
        self._abort = abort
        self._failed = failed
        self._unsent: list[_Asked] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def ask(
        self,
        rid: str,
        fields: Mapping[str, JsonValue],
        *,
        prompt: Hashable,
        heard: Callable[[Sequence[int]], None] | None = None,
    ) -> Generated:
        """Return the reply, or the tokens so far when it is late. Cancelling this ends the request in the engine.

        Requests with the same `prompt` have their tokens in common. `heard` is called with all tokens so far.
        """
        loop = asyncio.get_running_loop()
        fields = fields if heard is None else {**fields, "stream": True}
        asked = _Asked(rid, fields, prompt, loop.create_future(), heard)
        if not self._unsent:
            loop.call_soon(self._send_unsent)
        self._unsent.append(asked)
        try:
            return await asked.answer
        except asyncio.CancelledError:
            if asked.batch is not None:
                self._give_up(asked, asked.batch)
            raise

    def _send_unsent(self) -> None:
        asked = _one_of_each_first([each for each in self._unsent if not each.answer.done()])
        self._unsent.clear()
        for start in range(0, len(asked), _MAX_TOGETHER):
            batch = _Batch(asked=asked[start : start + _MAX_TOGETHER])
            for each in batch.asked:
                each.batch = batch
            batch.sending = self._begin(self._send(batch))

    async def _send(self, batch: _Batch) -> None:
        grace_s = min(_CUT_GRACE_S, self._timeout_s)
        timer = asyncio.get_running_loop().call_later(self._timeout_s, self._cut, batch)
        reason = "the client was closed"
        try:
            reply = await self._http.exchange(
                "POST",
                "/generate",
                [each.fields for each in batch.asked],
                self._key,
                self._timeout_s + grace_s,
                read=lambda piece: self._read(piece, batch),
            )
            reason = reply.refusal or "the reply ended before its line"
        except HttpError as error:
            reason = str(error)
        finally:
            timer.cancel()
            for each in batch.open:
                each.answer.set_exception(self._failed(reason))

    def _read(self, piece: bytes, batch: _Batch) -> None:
        try:
            for line in batch.lines.lines(piece):
                asked = batch.asked[line.place]
                answer = asked.answer
                if answer.done():
                    continue  # its caller was cancelled
                if line.status_code == PARTIAL:
                    self._hear(asked, line.content)
                    continue
                refusal = HttpReply(status_code=line.status_code, content=line.content).refusal
                if refusal is None:
                    answer.set_result(Generated(content=line.content, is_cut=batch.is_cut))
                else:
                    answer.set_exception(self._failed(refusal))
        except (ValueError, IndexError, msgspec.MsgspecError) as error:
            raise HttpError(str(error)) from error

    def _hear(self, asked: _Asked, content: bytes) -> None:
        asked.token_ids += _IDS_DECODER.decode(content)
        if asked.heard is not None:
            asked.heard(asked.token_ids)

    def _cut(self, batch: _Batch) -> None:
        """Ask for the tokens so far of requests that are late."""
        batch.is_cut = True
        for each in batch.open:
            self._begin(self._end(each.rid))

    def _give_up(self, asked: _Asked, batch: _Batch) -> None:
        if not batch.unwanted:
            # Requests of a lost engine or of a run that ends are cancelled together: with the last one the rest goes.
            asyncio.get_running_loop().call_soon(self._end_unwanted, batch)
        batch.unwanted.append(asked)

    def _end_unwanted(self, batch: _Batch) -> None:
        unwanted, batch.unwanted = batch.unwanted, []
        assert batch.sending is not None, "only requests that were sent are given up"
        if not batch.open:
            batch.sending.cancel()  # the server ends the requests of a connection that is closed
            return
        for each in unwanted:
            self._begin(self._end(each.rid))

    async def _end(self, rid: str) -> None:
        try:
            await self._abort(rid)
        except EngineError as error:
            logger.info("request cannot be ended: %s", error)

    def _begin(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        assert isinstance(task, asyncio.Task)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _one_of_each_first(asked: Sequence[_Asked]) -> list[_Asked]:
    """Return the first request of each prompt, then all others.

    An engine computes requests in the order they came, many at once. One that is computed beside another of its prompt
    computes the prompt again; one that is computed later finds it in the cache.
    """
    prompts: set[Hashable] = set()
    first: list[_Asked] = []
    others: list[_Asked] = []
    for each in asked:
        (others if each.prompt in prompts else first).append(each)
        prompts.add(each.prompt)
    return [*first, *others]


PARTIAL = 100
"""The status of lines before that of the reply to a request with `stream`: the ids of new tokens, as a JSON list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    place: int
    """The request's index in the list."""
    status_code: int
    """The status of a reply to this request alone."""
    content: bytes

    def encode(self) -> bytes:
        # A line break in JSON is white space, and in a message it can be.
        return b"%d %d %b\n" % (self.place, self.status_code, self.content.replace(b"\n", b" "))


class LineReader:
    """Puts lines together from pieces that end anywhere."""

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._pieces: list[bytes] = []
        self._num_bytes = 0

    def lines(self, piece: bytes) -> Iterator[Line]:
        """Yield the lines that end in this piece. Raises ValueError for one that is none or is too long."""
        start = 0
        while (end := piece.find(b"\n", start)) >= 0:
            self._keep(piece[start:end])
            yield _decode(b"".join(self._pieces))
            self._pieces.clear()
            self._num_bytes = 0
            start = end + 1
        self._keep(piece[start:])

    def _keep(self, piece: bytes) -> None:
        self._num_bytes += len(piece)
        if self._num_bytes > self._max_bytes:
            raise ValueError(f"the reply has more than {self._max_bytes} bytes")
        self._pieces.append(piece)


def _decode(line: bytes) -> Line:
    try:
        place, status_code, content = line.split(b" ", 2)
        return Line(place=int(place), status_code=int(status_code), content=content)
    except ValueError:
        raise ValueError(f"{len(line)} bytes that are no reply: {line[:40]!r}") from None
