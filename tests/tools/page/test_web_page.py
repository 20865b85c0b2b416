"""The page over HTTP: what it answers, and whom it does not."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest

from megarl.errors import MachineError
from megarl.tools.page.web_page import PageServer
from tests.tools.page.runs import make_run, make_seen


def with_server(folder: Path, act: Callable[[PageServer, aiohttp.ClientSession], Awaitable[None]]) -> None:
    async def main() -> None:
        server = PageServer(folder, port=0)
        await server.start()
        try:
            # Unsafe is a jar that keeps cookies of addresses.
            jar = aiohttp.CookieJar(unsafe=True)
            async with aiohttp.ClientSession(base_url=server.url, cookie_jar=jar) as session:
                async with session.get(server.link) as response:
                    assert (response.status, str(response.url)) == (200, server.url)
                await act(server, session)
        finally:
            await server.close()

    asyncio.run(main())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


def test_page_scripts_and_data_are_there(folder: Path) -> None:
    async def act(_: PageServer, session: aiohttp.ClientSession) -> None:
        for path, kind in (("", "text/html"), ("static/page.css", "text/css"), ("static/page.js", "text/javascript")):
            async with session.get(path) as response:
                assert (response.status, response.content_type) == (200, kind)
                assert "default-src 'none'" in response.headers["Content-Security-Policy"]
        async with session.get("api/run") as response:
            assert (await response.json())["name"] == "sample"
            tag = response.headers["ETag"]
        async with session.get("api/run", headers={"If-None-Match": tag}) as response:
            assert response.status == 304
        async with session.get("api/rollouts", params={"sort": "score", "order": "descending"}) as response:
            assert (await response.json())["rows"][0]["score"] == 1.0
        async with session.get("api/rollout", params={"step": 1, "row": 2}) as response:
            assert (await response.json())["prompt"] == "1+1="

    with_server(folder, act)


@pytest.mark.parametrize(
    ("path", "status", "sentence"),
    [
        ("static/../run_data.py", 404, ""),
        ("static/..%2frun_data.py", 404, "no such file"),
        ("static/%2fetc%2fpasswd", 404, "no such file"),
        ("api/rollout?step=../../etc&row=0", 400, "step must be a number"),
        ("api/rollout?step=1", 400, "step and row are required"),
        ("api/rollout?step=1&row=999", 404, "has no row 999"),
        ("api/rollouts?sort=__class__", 400, "sort must be one of"),
        ("api/rollouts?offset=-1", 400, "offset must be a number"),
        ("events.jsonl", 404, ""),
        ("api/image", 404, "is no digest of an image"),
        ("api/image?digest=../../events.jsonl", 404, "is no digest of an image"),
        ("api/image?digest=%2fetc%2fpasswd", 404, "is no digest of an image"),
        (f"api/image?digest={'0' * 32}", 404, "cannot be read: No such file"),
        (f"api/image?digest={'0' * 31}%00", 404, "is no digest of an image"),
        (f"images/{'0' * 32}.png", 404, ""),
    ],
)
def test_bad_questions_get_a_sentence(folder: Path, path: str, status: int, sentence: str) -> None:
    async def act(server: PageServer, session: aiohttp.ClientSession) -> None:
        from yarl import URL

        async with session.get(URL(server.url + path, encoded=True)) as response:
            text = await response.text()
            assert response.status == status, text
            assert sentence in text

    with_server(folder, act)


def test_an_image_is_served_and_a_link_out_of_the_store_is_not(folder: Path) -> None:
    seen = make_seen(folder.parent / "seen")
    store = seen / "images"
    (store / f"{'1' * 32}.png").symlink_to("/etc/passwd")
    (store / f"{'2' * 32}.png").mkdir()
    os.mkfifo(store / f"{'3' * 32}.png")

    async def act(_: PageServer, session: aiohttp.ClientSession) -> None:
        for path in sorted(store.glob("*.png")):
            async with session.get("api/image", params={"digest": path.stem}) as response:
                is_image = path.is_file() and not path.is_symlink()
                assert response.status == (200 if is_image else 404)
                assert response.headers["X-Content-Type-Options"] == "nosniff"
                if is_image:
                    assert (response.content_type, await response.read()) == ("image/png", path.read_bytes())

    with_server(seen, act)


def test_somebody_elses_name_for_this_machine_is_refused(folder: Path) -> None:
    async def act(_: PageServer, session: aiohttp.ClientSession) -> None:
        async with session.get("api/run", headers={"Host": "example.org"}) as response:
            assert response.status == 403

    with_server(folder, act)


def test_other_users_of_the_machine_are_refused(folder: Path) -> None:
    """They reach the port, and have neither the address with the token nor the cookie."""

    async def act(server: PageServer, _: aiohttp.ClientSession) -> None:
        async with aiohttp.ClientSession(base_url=server.url) as stranger:
            for path in (
                "",
                "api/run",
                "api/rollouts",
                "static/page.js",
                "api/image",
                "?token=",
                "api/run?token=guess",
            ):
                async with stranger.get(path) as response:
                    assert response.status == 403, path
                    assert "megarl view" in await response.text()
            async with stranger.get("api/run", cookies={"megarl_view_1": "guess"}) as response:
                assert response.status == 403

    with_server(folder, act)


def test_a_port_that_is_taken_is_one_sentence(folder: Path) -> None:
    async def act(server: PageServer, _: aiohttp.ClientSession) -> None:
        port = int(server.url.rstrip("/").rpartition(":")[2])
        with pytest.raises(MachineError, match="choose another --port"):
            await PageServer(folder, port=port).start()

    with_server(folder, act)
