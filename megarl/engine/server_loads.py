"""Loads of weights inside an SGLang server: one request for all that a load takes, while other requests wait.

Over SGLang's own endpoints a load is up to five requests one after the other: pause, begin, update, end, continue. Each
takes a millisecond or two of the requests that wait, more than a small adapter needs to arrive. Here the server makes
the calls itself. It continues whatever becomes of the load, and also where the driver that asked for it is gone.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Protocol

import msgspec

from megarl.engine.server_replies import has_key

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

_PATH = "/load_weights"


class LoadRequest(msgspec.Struct, frozen=True, kw_only=True):
    payloads: list[str]
    """One for each TP rank."""
    load_format: str
    version: str | None
    """The engine reports it afterwards; None changes nothing."""
    is_for_draft: bool
    holds_requests: bool
    """Whether requests wait between two tokens meanwhile. Else the load waits until none runs, unless it is paused."""


class _Manager(Protocol):
    """The methods of SGLang's manager of requests that are used."""

    async def pause_generation(self, request: object) -> None: ...

    async def continue_generation(self, request: object) -> None: ...

    async def update_weights_from_tensor(self, request: object) -> tuple[bool, str]: ...

    async def begin_weight_update(self, request: object) -> tuple[bool, str]: ...  # from 0.5.21, which needs both

    async def end_weight_update(self, request: object) -> tuple[bool, str]: ...


class _Structs(Protocol):
    """The requests to SGLang's manager that are used, by their classes in its module."""

    PauseGenerationReqInput: Callable[..., object]
    ContinueGenerationReqInput: Callable[..., object]
    UpdateWeightsFromTensorReqInput: Callable[..., object]
    BeginWeightUpdateReqInput: Callable[..., object]
    EndWeightUpdateReqInput: Callable[..., object]


class DirectLoads:
    """ASGI application: a `LoadRequest` goes to SGLang's manager of requests, all others to its own application."""

    def __init__(self, app: ASGIApp, *, key: bytes) -> None:
        self._app = app
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("path") != _PATH or not has_key(scope, self._key):
            await self._app(scope, receive, send)
            return
        from sglang.srt.entrypoints.http_server import get_global_state  # noqa: PLC0415 - only in the server
        from sglang.srt.managers import io_struct  # noqa: PLC0415
        from starlette.requests import Request  # noqa: PLC0415
        from starlette.responses import Response  # noqa: PLC0415

        try:
            asked = msgspec.json.decode(await Request(scope, receive).body(), type=LoadRequest)
            is_loaded, message = await load(get_global_state().tokenizer_manager, io_struct, asked)
        except (msgspec.MsgspecError, ValueError) as error:
            is_loaded, message = False, str(error)
        status_code = HTTPStatus.OK if is_loaded else HTTPStatus.BAD_REQUEST
        await Response(message, status_code=status_code)(scope, receive, send)


async def load(manager: _Manager, structs: _Structs, asked: LoadRequest) -> tuple[bool, str]:
    """Return whether SGLang has called the loader, and its message."""
    if not asked.holds_requests:
        return await _update(manager, structs, asked)
    await manager.pause_generation(structs.PauseGenerationReqInput(mode="in_place"))
    try:
        return await _update(manager, structs, asked)
    finally:
        await manager.continue_generation(structs.ContinueGenerationReqInput(torch_empty_cache=False))


async def _update(manager: _Manager, structs: _Structs, asked: LoadRequest) -> tuple[bool, str]:
    update = partial(
        structs.UpdateWeightsFromTensorReqInput,
        serialized_named_tensors=[b64decode(each) for each in asked.payloads],
        load_format=asked.load_format,
        # Flushing here ends the server if a request is running; `flush_cache` only refuses.
        flush_cache=False,
        weight_version=asked.version,
    )
    if not hasattr(manager, "begin_weight_update"):  # before 0.5.21
        return await manager.update_weights_from_tensor(update(disable_draft_model=not asked.is_for_draft))
    selector = "draft" if asked.is_for_draft else "target"
    has_begun, reason = await manager.begin_weight_update(structs.BeginWeightUpdateReqInput(selector=selector))
    if not has_begun:
        return False, reason
    try:
        is_loaded, message = await manager.update_weights_from_tensor(update(selector=selector))
    finally:
        has_ended, reason = await manager.end_weight_update(structs.EndWeightUpdateReqInput())
    return (is_loaded, message) if has_ended or not is_loaded else (False, reason)
