"""Headless Chromium, driven over its debugging protocol, for tests and benchmarks of the page."""

from __future__ import annotations

import asyncio
import re
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Any, Literal

import aiohttp

from megarl.errors import MachineError

_OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-port=0")
_ADDRESS = re.compile(rb"DevTools listening on (ws://\S+)")
_START_TIMEOUT_S = 60.0


class Page:
    """One tab; `complaints` has the errors of its scripts."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, session_id: str) -> None:
        self.complaints: list[str] = []
        self._socket = socket
        self._session_id = session_id
        self._numbers = count(1000)

    async def call(self, method: str, **parameters: object) -> Any:
        number = next(self._numbers)
        await self._socket.send_json(
            {"id": number, "method": method, "params": parameters, "sessionId": self._session_id}
        )
        while True:
            message = await self._socket.receive_json()
            self._listen(message)
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]

    def _listen(self, message: dict[str, Any]) -> None:
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.complaints.append(str(message["params"]["exceptionDetails"]))
            case "Log.entryAdded" if message["params"]["entry"]["level"] == "error":
                self.complaints.append(message["params"]["entry"]["text"])

    async def open(self, url: str, *, width: int = 1280, height: int = 800) -> None:
        for domain in ("Runtime", "Log", "Page"):
            await self.call(f"{domain}.enable")
        await self.show_in("light")
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        await self.call("Page.navigate", url=url)

    async def show_in(self, colours: Literal["light", "dark"]) -> None:
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": colours}])

    async def evaluate(self, expression: str) -> Any:
        answer = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, expression: str, *, timeout_s: float = 20.0) -> Any:
        """Return the value of the expression as soon as it is true."""
        try:
            async with asyncio.timeout(timeout_s):
                while not (value := await self.evaluate(expression)):
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise MachineError(f"not within {timeout_s:.0f} s: {expression}; {self.complaints}") from None
        return value


@asynccontextmanager
async def open_browser() -> AsyncIterator[Page]:
    """Yield one tab of a new browser, which ends afterwards."""
    chromium = shutil.which("chromium")
    if chromium is None:
        raise MachineError("chromium is not installed: run scripts/install_debian_packages.sh")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            chromium,
            *_OPTIONS,
            f"--user-data-dir={profile}",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                address = await _address(process)
            async with aiohttp.ClientSession() as session, session.ws_connect(address, max_msg_size=0) as socket:
                await socket.send_json({"id": 1, "method": "Target.createTarget", "params": {"url": "about:blank"}})
                target = (await _reply(socket, 1))["targetId"]
                attach = {"targetId": target, "flatten": True}
                await socket.send_json({"id": 2, "method": "Target.attachToTarget", "params": attach})
                page = Page(socket, (await _reply(socket, 2))["sessionId"])
                yield page
        finally:
            with suppress(ProcessLookupError):
                process.terminate()
            await process.wait()


async def _address(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    async for line in process.stderr:
        match = _ADDRESS.search(line)
        if match:
            return match.group(1).decode()
    raise MachineError("chromium ended before it opened its debugging port")


async def _reply(socket: aiohttp.ClientWebSocketResponse, number: int) -> Any:
    while True:
        message = await socket.receive_json()
        if message.get("id") == number:
            return message["result"]
