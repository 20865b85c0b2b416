"""The run page over HTTP on loopback: reads one run's folder, changes nothing, answers nobody from elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from pathlib import Path

from aiohttp import web

from megarl.errors import DataError, MachineError
from megarl.system.network import LOOPBACK
from megarl.tools.page.document import STATIC_FILES, read_static, served_page, served_policy
from megarl.tools.page.run_data import MAX_ROWS, SORT_KEYS, RolloutQuery, RunFolder
from megarl.types import JsonValue

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class PageServer:
    """From `start` to `close`; `url` is where a browser finds it."""

    def __init__(self, folder: Path, *, port: int) -> None:
        self._run = RunFolder(folder)
        self._port = port
        self._reading = asyncio.Lock()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self._port}/"

    async def start(self) -> None:
        app = web.Application(middlewares=[self._guarded])
        app.router.add_get("/", _index)
        app.router.add_get("/static/{name}", _static)
        app.router.add_get("/api/run", self._overview)
        app.router.add_get("/api/rollouts", self._rollouts)
        app.router.add_get("/api/rollout", self._rollout)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, LOOPBACK, self._port)
        try:
            await site.start()
        except OSError as error:
            raise MachineError(f"cannot listen on {self.url}: {error.strerror}; choose another --port") from error
        self._port = self._runner.addresses[0][1]

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        # A page from elsewhere that has its own name point to loopback would ask under that name.
        if request.host not in (f"{LOOPBACK}:{self._port}", f"localhost:{self._port}"):
            return web.Response(status=HTTPStatus.FORBIDDEN, text="this page is served to this machine alone\n")
        try:
            response = await handler(request)
        except DataError as error:
            response = web.json_response({"error": str(error)}, status=HTTPStatus.NOT_FOUND)
        except ValueError as error:
            response = web.json_response({"error": str(error)}, status=HTTPStatus.BAD_REQUEST)
        response.headers["Content-Security-Policy"] = served_policy()
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "no-referrer"
        response.headers.setdefault("Cache-Control", "no-cache")
        if response.status == HTTPStatus.OK:
            response.enable_compression()
        return response

    async def _overview(self, request: web.Request) -> web.StreamResponse:
        async with self._reading:
            tag = f'"{self._run.stamp}"'
            if request.headers.get("If-None-Match") == tag:
                return web.Response(status=HTTPStatus.NOT_MODIFIED, headers={"ETag": tag})
            answer = await asyncio.to_thread(self._run.overview)
        return web.json_response(answer, headers={"ETag": tag})

    async def _rollouts(self, request: web.Request) -> web.StreamResponse:
        query = _query(request.query)
        async with self._reading:
            answer = await asyncio.to_thread(self._run.rollouts, query)
        return web.json_response(answer)

    async def _rollout(self, request: web.Request) -> web.StreamResponse:
        step, row = _number(request.query, "step"), _number(request.query, "row")
        if step is None or row is None:
            raise ValueError("step and row are needed")
        async with self._reading:
            answer: dict[str, JsonValue] = await asyncio.to_thread(self._run.rollout, step, row)
        return web.json_response(answer)


async def _index(_request: web.Request) -> web.StreamResponse:
    return web.Response(text=served_page(), content_type="text/html")


async def _static(request: web.Request) -> web.StreamResponse:
    name = request.match_info["name"]
    if name not in STATIC_FILES:
        raise DataError(f"there is no {name}")
    return web.Response(text=read_static(name), content_type=STATIC_FILES[name])


def _query(asked: Mapping[str, str]) -> RolloutQuery:
    sort = asked.get("sort", "step")
    if sort not in SORT_KEYS:
        raise ValueError(f"sort is one of {', '.join(SORT_KEYS)}")
    return RolloutQuery(
        step=_number(asked, "step"),
        source=asked.get("source") or None,
        text=asked.get("text", ""),
        sort=sort,
        is_descending=asked.get("order") == "descending",
        offset=_number(asked, "offset") or 0,
        limit=min(_number(asked, "limit") or MAX_ROWS, MAX_ROWS),
    )


def _number(asked: Mapping[str, str], name: str) -> int | None:
    text = asked.get(name, "")
    if not text:
        return None
    if not text.isdecimal():
        raise ValueError(f"{name} is a number, not {text[:20]!r}")
    return int(text)


async def serve(folder: Path, *, port: int, on_start: Callable[[str], None]) -> None:
    """Until cancelled; `on_start` gets the address."""
    server = PageServer(folder, port=port)
    await server.start()
    try:
        on_start(server.url)
        await asyncio.Event().wait()
    finally:
        await server.close()
