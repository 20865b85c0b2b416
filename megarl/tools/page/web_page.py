"""The run page: one HTML document with its data inside, or served on loopback while the run goes on.

The server reads one run's folder, changes nothing, and answers only this machine, and there only who has its token.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import random
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from importlib.resources import files
from pathlib import Path
from typing import Any

from aiohttp import web

from megarl.errors import DataError, MachineError
from megarl.system.network import LOOPBACK
from megarl.tools.page.run_data import MAX_ROWS, SORT_KEYS, RolloutQuery, RunFolder, compare_overviews
from megarl.types import JsonValue

STYLE = "page.css"
SCRIPTS = ("source.js", "elements.js", "charts.js", "timeline.js", "rollouts.js", "page.js")
"""In the order they are loaded: each uses only those before it."""
STATIC_FILES = {STYLE: "text/css", **dict.fromkeys(SCRIPTS, "text/javascript")}
MAX_IMAGE_BYTES = 16 * 2**20
"""Images in a report, in all; a rollout of which one is left out has its name."""
MAX_INLINED = 400
"""Rollouts in a report; from a longer run a random choice, the same each time."""
_PARAMETER = "token"
"""Names the token in the address."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def read_static(name: str) -> str:
    return (files("megarl.tools.page") / "static" / name).read_text(encoding="utf-8")


def served_page() -> str:
    links = f'<link rel="stylesheet" href="static/{STYLE}">'
    scripts = "\n".join(f'<script defer src="static/{name}"></script>' for name in SCRIPTS)
    return read_static("index.html").replace("<!-- head -->", f"{links}\n{scripts}")


def served_policy(host: str) -> str:
    """Return a policy that lets the browser load the files and images of this server and nothing else."""
    return (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        f"img-src http://{host}/api/image; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def report_page(run: RunFolder) -> str:
    """Return one HTML document that needs no server and may load nothing."""
    return _document({"run": run.overview(), **_chosen_rollouts(run)})


def comparison_page(runs: Mapping[str, RunFolder], tables: Sequence[JsonValue] = ()) -> str:
    """Return the same document with the curves of several runs in each chart, and the rollouts of the first.

    A table is `{title, header, rows}`; the first stands above the curves, the others below.
    """
    first = next(iter(runs.values()))
    return _document({"run": {**compare_overviews(runs), "tables": list(tables)}, **_chosen_rollouts(first)})


def _document(content: Mapping[str, JsonValue]) -> str:
    style, script = read_static(STYLE), "\n".join(read_static(name) for name in SCRIPTS)
    data = _inlined(json.dumps(content, allow_nan=False))
    policy = f"default-src 'none'; script-src {_hash(script)} {_hash(data)}; style-src {_hash(style)}; img-src data:"
    head = "\n".join(
        (
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            f"<style>{style}</style>",
            f'<script type="application/json" id="data">{data}</script>',
        )
    )
    page = read_static("index.html").replace("<!-- head -->", head)
    # At the end: an inline script cannot be deferred.
    return page.replace("</body>", f"<script>{script}</script>\n</body>")


def _chosen_rollouts(run: RunFolder) -> dict[str, JsonValue]:
    rows = _all_rows(run)
    chosen = sorted(random.Random(0).sample(range(len(rows)), min(MAX_INLINED, len(rows))))  # noqa: S311 - a choice
    inlined = [rows[place] for place in chosen]
    details = [run.rollout(row["step"], row["row"]) for row in inlined]
    return {
        "num_rollouts": len(rows),
        "rows": list(inlined),
        "rollouts": list(details),
        "images": _images(run, details),
    }


def _images(run: RunFolder, rollouts: Sequence[Mapping[str, Any]]) -> dict[str, JsonValue]:
    """Return the images of rollouts as text, by digest, as far as there is room."""
    images, num_bytes = dict[str, JsonValue](), 0
    for digest in dict.fromkeys(digest for rollout in rollouts for digest in rollout.get("images") or ()):
        try:
            image = run.image(digest)
        except DataError:
            continue  # the page says so where it would be
        num_bytes += len(image)
        if num_bytes > MAX_IMAGE_BYTES:
            break
        images[digest] = base64.b64encode(image).decode()
    return images


def _all_rows(run: RunFolder) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    while True:
        page: Mapping[str, Any] = run.rollouts(RolloutQuery(offset=len(rows)))
        rows += page["rows"]
        if len(page["rows"]) < MAX_ROWS:
            return rows


def _inlined(text: str) -> str:
    """Escape JSON so that it cannot end the element it is in."""
    return text.replace("<", "\\u003c")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


class PageServer:
    """Serves from `start` to `close` at `url`."""

    def __init__(self, folder: Path, *, port: int) -> None:
        self._run = RunFolder(folder)
        self._port = port
        self._token = secrets.token_urlsafe(24)
        self._reading = asyncio.Lock()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self._port}/"

    @property
    def link(self) -> str:
        """The address for its first visit, which leaves a cookie: other users of the machine have neither."""
        return f"{self.url}?{_PARAMETER}={self._token}"

    async def start(self) -> None:
        app = web.Application(middlewares=[self._guarded])
        app.router.add_get("/", _index)
        app.router.add_get("/static/{name}", _static)
        app.router.add_get("/api/run", self._overview)
        app.router.add_get("/api/rollouts", self._rollouts)
        app.router.add_get("/api/rollout", self._rollout)
        app.router.add_get("/api/image", self._image)
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
        # A foreign page whose name resolves to loopback would send that name.
        if request.host not in (f"{LOOPBACK}:{self._port}", f"localhost:{self._port}"):
            return web.Response(status=HTTPStatus.FORBIDDEN, text="this page is served only to this machine\n")
        # Cookies are of a host, whatever its port.
        cookie = f"megarl_view_{self._port}"
        given = request.query.get(_PARAMETER) or request.cookies.get(cookie, "")
        if not secrets.compare_digest(given.encode(errors="replace"), self._token.encode()):
            return web.Response(status=HTTPStatus.FORBIDDEN, text="open the address that `megarl view` printed\n")
        if _PARAMETER in request.query and request.path == "/":
            found = web.Response(status=HTTPStatus.SEE_OTHER, headers={"Location": "/"})
            found.set_cookie(cookie, self._token, httponly=True, samesite="Strict")
            return found
        try:
            response = await handler(request)
        except DataError as error:
            response = web.json_response({"error": str(error)}, status=HTTPStatus.NOT_FOUND)
        except ValueError as error:
            response = web.json_response({"error": str(error)}, status=HTTPStatus.BAD_REQUEST)
        response.headers["Content-Security-Policy"] = served_policy(request.host)
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
            raise ValueError("step and row are required")
        async with self._reading:
            answer: dict[str, JsonValue] = await asyncio.to_thread(self._run.rollout, step, row)
        return web.json_response(answer)

    async def _image(self, request: web.Request) -> web.StreamResponse:
        image = await asyncio.to_thread(self._run.image, request.query.get("digest", ""))
        return web.Response(body=image, content_type="image/png")


async def _index(_request: web.Request) -> web.StreamResponse:
    return web.Response(text=served_page(), content_type="text/html")


async def _static(request: web.Request) -> web.StreamResponse:
    name = request.match_info["name"]
    if name not in STATIC_FILES:
        raise DataError(f"no such file: {name}")
    return web.Response(text=read_static(name), content_type=STATIC_FILES[name])


def _query(asked: Mapping[str, str]) -> RolloutQuery:
    sort = asked.get("sort", "step")
    if sort not in SORT_KEYS:
        raise ValueError(f"sort must be one of {', '.join(SORT_KEYS)}")
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
        raise ValueError(f"{name} must be a number, not {text[:20]!r}")
    return int(text)


async def serve(folder: Path, *, port: int, on_start: Callable[[str], None]) -> None:
    """Serve until cancelled; `on_start` receives the address."""
    server = PageServer(folder, port=port)
    await server.start()
    try:
        on_start(server.link)
        await asyncio.Event().wait()
    finally:
        await server.close()
