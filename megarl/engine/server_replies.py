"""SGLang's replies as clients here read them: numbers in arrays, a line for each of several requests, no secrets.

SGLang returns a JSON list of three items per output token, half of the cost of a reply on both sides. A hook replaces
it by two arrays in base64 where a request asks for flat log-probabilities. A server without the hook ignores the wish
for output tokens, and the client reads both.
"""

from __future__ import annotations

import asyncio
import logging
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Sequence
from hmac import compare_digest
from http import HTTPStatus
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np
import orjson

from megarl.engine.batches import PARTIAL, Line
from megarl.engine.image_requests import READ_IMAGES

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)


class _Request(Protocol):
    stream: bool


class _State(Protocol):
    """The fields of SGLang's request state that are used."""

    obj: _Request
    input_token_logprobs_val: list[float | None]
    input_token_logprobs_idx: list[int]
    output_token_logprobs_val: list[float]
    output_token_logprobs_idx: list[int]


def add_flat_logprobs(
    add: Callable[..., None],
    manager: object,
    meta_info: dict[str, object],
    state: _State,
    top_logprobs_num: int,
    token_ids_logprob: list[int] | None,
    return_text_in_logprobs: bool,
) -> None:
    """Write the log-probabilities of the output into `meta_info`, once, when the response is complete."""
    request = state.obj
    if (images := getattr(request, READ_IMAGES, None)) is not None:
        meta_info[READ_IMAGES] = images
    is_plain = not top_logprobs_num and token_ids_logprob is None and not return_text_in_logprobs
    is_flat = getattr(request, "return_flat_raw_top_logprobs_b64", False)  # not in every release
    if is_flat and request.stream and meta_info["finish_reason"] is None:
        return  # the log-probabilities of a stream come with its end, as those of other requests
    if is_flat and state.input_token_logprobs_val and token_ids_logprob is None and not return_text_in_logprobs:
        _add_flat_input(add, manager, meta_info, state, top_logprobs_num)
    elif not is_plain or not is_flat or state.input_token_logprobs_val:
        add(manager, meta_info, state, top_logprobs_num, token_ids_logprob, return_text_in_logprobs)
    elif meta_info["finish_reason"] is not None:
        meta_info["output_token_logprobs"] = {
            "logprobs": _encode(np.array(state.output_token_logprobs_val, dtype="<f4")),
            "token_ids": _encode(np.array(state.output_token_logprobs_idx, dtype="<i4")),
        }


def _add_flat_input(
    add: Callable[..., None], manager: object, meta_info: dict[str, object], state: _State, top_logprobs_num: int
) -> None:
    """Write the log-probabilities of given tokens as arrays, and leave the likeliest tokens to SGLang."""
    logprobs = state.input_token_logprobs_val
    state.input_token_logprobs_val = []
    try:
        add(manager, meta_info, state, top_logprobs_num, None, False)
    finally:
        state.input_token_logprobs_val = logprobs
    if meta_info["finish_reason"] is not None:
        meta_info["input_token_logprobs"] = {
            "logprobs": _encode(np.array(logprobs, dtype="<f4")),  # None becomes a NaN
            "token_ids": _encode(np.array(state.input_token_logprobs_idx, dtype="<i4")),
        }


def _encode(array: np.ndarray[tuple[int], np.dtype[np.generic]]) -> str:
    return b64encode(array.tobytes()).decode()


def has_key(scope: Scope, key: bytes) -> bool:
    """Whether a request carries this key."""
    return compare_digest(dict(scope["headers"]).get(b"authorization", b""), b"Bearer " + key)


class MaskedReplies:
    """ASGI middleware: replies to GET have stars in place of secrets."""

    def __init__(self, app: ASGIApp, *, secrets: Sequence[bytes]) -> None:
        self._app = app
        self._secrets = secrets

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_masked(message: Message) -> None:
            body = message.get("body", b"")
            for secret in self._secrets:
                # As long as the secret: the length of the reply has been sent.
                body = body.replace(secret, b"*" * len(secret))
            await send({**message, "body": body} if body else message)

        await self._app(scope, receive, send_masked if scope.get("method") == "GET" else send)


class DirectGeneration:
    """ASGI application: requests for tokens go to SGLang's manager of requests, all others to its own application.

    FastAPI compares each request with a hundred routes, twice, and builds and checks it field by field: half of the
    server's time of a request, in the one thread that also hands out tokens. An engine of a small model waits for it.
    A list of requests is answered by a line for each: see `lines`.
    """

    def __init__(self, app: ASGIApp, *, key: bytes) -> None:
        self._app = app
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("path") != "/generate" or not has_key(scope, self._key):
            await self._app(scope, receive, send)
            return
        from starlette.requests import Request  # noqa: PLC0415 - only in the server
        from starlette.responses import Response  # noqa: PLC0415

        request = Request(scope, receive)
        try:
            asked = msgspec.json.decode(await request.body())
            if isinstance(asked, list) and asked:
                await answer_each(asked, receive, send)
                return
            reply = await _answer_one(asked, request)
        except (msgspec.MsgspecError, TypeError, ValueError) as error:
            reply = Response(str(error), status_code=HTTPStatus.BAD_REQUEST)
        await reply(scope, receive, send)


async def _answer_one(fields: dict[str, object], request: Request) -> Response:
    from sglang.srt.entrypoints import http_server  # noqa: PLC0415 - only in the server
    from sglang.srt.managers.io_struct import GenerateReqInput  # noqa: PLC0415

    reply: Response = await http_server.generate_request(GenerateReqInput(**fields), request)
    return reply


class _GoneError(Exception):
    """The client has closed the connection."""


async def answer_each(requests: Sequence[dict[str, object]], receive: Receive, send: Send) -> None:
    """Send the line of each request when it is done. All end when the client is gone: SGLang aborts cancelled ones."""
    lines: list[bytes] = []
    is_new = asyncio.Event()
    num_left = len(requests)

    async def answer(place: int, fields: dict[str, object]) -> None:
        nonlocal num_left
        async for status_code, content in _generated(fields):
            lines.append(Line(place=place, status_code=status_code, content=content).encode())
            is_new.set()
        num_left -= 1
        is_new.set()

    try:
        async with asyncio.TaskGroup() as tasks:
            for place, fields in enumerate(requests):
                tasks.create_task(answer(place, fields))
            watching = tasks.create_task(_watch(receive))
            await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": []})
            while num_left:
                await is_new.wait()
                is_new.clear()
                if num_left and lines:
                    done = b"".join(lines)
                    lines.clear()
                    await send({"type": "http.response.body", "body": done, "more_body": True})
            await send({"type": "http.response.body", "body": b"".join(lines), "more_body": False})
            watching.cancel()
    except* _GoneError:
        pass


async def _watch(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise _GoneError


async def _generated(fields: dict[str, object]) -> AsyncIterator[tuple[int, bytes]]:
    """Yield the status and the content of the reply to one request; before it, those of new tokens where it streams."""
    from fastapi import HTTPException  # noqa: PLC0415 - only in the server
    from sglang.srt.entrypoints.http_server import get_global_state  # noqa: PLC0415
    from sglang.srt.managers.io_struct import GenerateReqInput  # noqa: PLC0415

    manager = get_global_state().tokenizer_manager
    num_told = 0
    try:
        # Without its HTTP request, which SGLang would ask time and again whether the client is there.
        async for reply in manager.generate_request(GenerateReqInput(**fields)):
            if reply["meta_info"]["finish_reason"] is None:
                yield PARTIAL, orjson.dumps(reply["output_ids"][num_told:])
                num_told = len(reply["output_ids"])
            else:
                yield HTTPStatus.OK, orjson.dumps(reply, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)
    except HTTPException as error:
        yield error.status_code, str(error.detail).encode()
    except (TypeError, ValueError) as error:
        yield HTTPStatus.BAD_REQUEST, str(error).encode()
    except Exception as error:  # one request fails, as behind uvicorn; those that came with it go on
        logger.exception("request failed")
        yield HTTPStatus.INTERNAL_SERVER_ERROR, repr(error).encode()
