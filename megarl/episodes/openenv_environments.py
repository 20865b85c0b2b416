"""Environments behind OpenEnv's WebSocket: reset, step, state, close. One connection per episode.

A message is `{"type": ..., "data": {...}}`; an observation comes back with `reward` and `done`. `/schema` of the same
server describes an action.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from itertools import islice
from urllib.parse import urlsplit, urlunsplit

import aiohttp

from megarl.episodes.protocol import Call, Observation, Row, ToolSchema, Transcript
from megarl.errors import ConfigError, EnvironmentLostError, Problem
from megarl.system.foreign import finite32, image_in, one_line, read_json
from megarl.system.secret import Secret
from megarl.types import JsonValue, Score

STEP = "step"
_MAX_MESSAGE_BYTES = 16 << 20
_CLOSE_TIMEOUT_S = 5.0
_RESERVED = ("metadata", "reward", "done")
"""Fields of an action or an observation that are the protocol's own."""
_LOST = (aiohttp.ClientError, OSError, ValueError)
_MAX_SCHEMA_BYTES = 4 << 20
_MAX_NUMBERS = 64
"""Numbers of a state that are recorded."""


def schema_url(url: str) -> str:
    """Return where the server describes its actions: `ws://host/ws` has `http://host/schema`."""
    parts = urlsplit(url)
    scheme = {"ws": "http", "wss": "https"}.get(parts.scheme, parts.scheme)
    path = parts.path.rstrip("/").removesuffix("/ws")
    return urlunsplit((scheme, parts.netloc, f"{path}/schema", "", ""))


async def open_openenv(url: str, *, key: Secret | None, timeout_s: float) -> OpenEnvEnvironments:
    """Ask the server how an action looks; a ConfigError if it does not answer."""
    session = aiohttp.ClientSession(
        headers={} if key is None else {"Authorization": f"Bearer {key.reveal()}"},
        timeout=aiohttp.ClientTimeout(total=None, connect=timeout_s),
    )
    try:
        async with (
            asyncio.timeout(timeout_s),
            session.get(schema_url(url), headers={"Accept-Encoding": "identity"}) as reply,
        ):
            reply.raise_for_status()
            tool = step_tool(await _read(reply))
    except (*_LOST, TimeoutError) as error:
        await session.close()
        reason = one_line(error) or type(error).__name__
        message = f"{schema_url(url)} gives no schema of an action; is it an OpenEnv server? {reason}"
        raise ConfigError("recipe", (Problem(key="environment.url", message=message),)) from None
    return OpenEnvEnvironments(session, url, tool=tool, timeout_s=timeout_s)


async def _read(reply: aiohttp.ClientResponse) -> bytes:
    if reply.headers.get("Content-Encoding", "identity") != "identity":
        raise ValueError("it is compressed, which was not asked for")
    content = b""
    async for chunk in reply.content.iter_chunked(1 << 16):
        content += chunk
        if len(content) > _MAX_SCHEMA_BYTES:
            raise ValueError(f"it has more than {_MAX_SCHEMA_BYTES} bytes")
    return content


def step_tool(content: bytes) -> ToolSchema:
    """Return the tool that takes an action, by a server's description; a ValueError if that is none."""
    described = read_json(content)
    action = described.get("action") if isinstance(described, dict) else None
    if not isinstance(action, dict):
        raise ValueError("it describes no action")
    properties, required = action.get("properties"), action.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise ValueError("the schema of an action has no properties, or no list of the required ones")
    own: dict[str, JsonValue] = {name: each for name, each in properties.items() if name not in _RESERVED}
    parameters: dict[str, JsonValue] = {
        "type": "object",
        "properties": own,
        "required": [name for name in required if name in own],
    }
    if "$defs" in action:
        parameters["$defs"] = action["$defs"]
    text = str(action.get("description") or "Take an action in the environment.").strip()
    return ToolSchema(name=STEP, description=text, parameters=parameters)


class OpenEnvEnvironments:
    """`Environments` of one server."""

    def __init__(self, session: aiohttp.ClientSession, url: str, *, tool: ToolSchema, timeout_s: float) -> None:
        self._session = session
        self._url = url
        self._timeout_s = timeout_s
        self.tools = (tool,)

    async def open(self, row: Row) -> OpenEnvEnvironment:
        """Connect and reset with the row's `extra_info`."""
        try:
            async with asyncio.timeout(self._timeout_s):
                socket = await self._session.ws_connect(self._url, max_msg_size=_MAX_MESSAGE_BYTES)
        except (*_LOST, TimeoutError) as error:
            raise EnvironmentLostError(f"{self._url}: {str(error) or type(error).__name__}") from None
        environment = OpenEnvEnvironment(socket, self._url, tools=self.tools, timeout_s=self._timeout_s)
        try:
            await environment.reset(row)
        except BaseException:
            await environment.close()
            raise
        return environment

    async def close(self) -> None:
        await self._session.close()


class OpenEnvEnvironment:
    """The connection of one episode."""

    def __init__(
        self,
        socket: aiohttp.ClientWebSocketResponse,
        url: str,
        *,
        tools: tuple[ToolSchema, ...],
        timeout_s: float,
    ) -> None:
        self.tools = tools
        self.opening: str | None = None
        self._socket = socket
        self._url = url
        self._timeout_s = timeout_s
        self._rewards: list[float] = []
        self._last_reward = 0.0

    async def reset(self, row: Row) -> None:
        extra = row.get("extra_info")
        kind, data = await self._ask("reset", extra if isinstance(extra, dict) else {})
        if kind == "error":
            raise EnvironmentLostError(f"{self._url}: reset: {one_line(data.get('message', data))}")
        self.opening = self._text(data)

    async def call(self, call: Call) -> Observation:
        if call.name != STEP:
            return Observation(text=f"error: there is no tool {call.name[:100]}; there is: {STEP}", is_error=True)
        kind, data = await self._ask("step", call.arguments)
        if kind == "error":
            return Observation(text=f"error: {data.get('message', data)}", is_error=True)
        given = data.get("reward")
        reward = finite32(given)
        if given is not None and reward is None:
            raise EnvironmentLostError(f"{self._url}: a reward of it is not finite in 32 bits")
        if reward is not None:
            self._rewards.append(reward)
        text, is_done = self._text(data), data.get("done") is True
        if is_done:
            self._last_reward = reward or 0.0
        return Observation(text=text, ended=is_done, reward=None if is_done else reward)

    async def score(self, transcript: Transcript) -> Score | None:
        """Return the reward of the step that ended the episode; those before it belong to their turns.

        The numbers of the environment's state are components. None where the environment gave no reward, so that the
        recipe's scores.
        """
        if not self._rewards:
            return None
        return Score(value=self._last_reward, components={**await self._state(), "return": sum(self._rewards)})

    async def _state(self) -> dict[str, float]:
        """Return the numbers of the state, such as its count of steps; nothing from a server that does not tell it."""
        try:
            kind, data = await self._ask("state", {})
        except EnvironmentLostError:
            return {}  # the episode is over, and its rewards are known
        if kind != "state":
            return {}
        found = ((one_line(name, max_characters=60), finite32(each)) for name, each in data.items())
        return dict(islice(((name, number) for name, number in found if number is not None), _MAX_NUMBERS))

    async def close(self) -> None:
        if self._socket.closed:
            return
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._socket.send_json({"type": "close"})
                await self._socket.close()
        except (*_LOST, TimeoutError):
            pass  # the server is gone, and with it the episode's state

    def _text(self, data: Mapping[str, JsonValue]) -> str:
        """Return the only text of an observation, or all its fields as JSON."""
        observation = data.get("observation")
        if (kind := image_in(observation)) is not None:
            raise EnvironmentLostError(f"{self._url}: an observation is or has {kind}, and observations are text alone")
        if isinstance(observation, str):
            return observation
        own: JsonValue = observation
        if isinstance(observation, dict):
            own = {name: each for name, each in observation.items() if name not in _RESERVED}
            values = list(own.values())
            if len(values) == 1 and isinstance(values[0], str):
                return values[0]
        try:
            return json.dumps(own, ensure_ascii=False)
        except RecursionError:
            raise EnvironmentLostError(f"{self._url}: an observation is nested too deeply") from None

    async def _ask(self, kind: str, data: Mapping[str, JsonValue]) -> tuple[str, Mapping[str, JsonValue]]:
        """Return the type and the data of the answer; an EnvironmentLostError if there is none."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._socket.send_json({"type": kind, "data": dict(data)})
                message = await self._socket.receive()
            if message.type is not aiohttp.WSMsgType.TEXT:
                raise EnvironmentLostError(f"{self._url}: the server closed the connection during {kind}")
            answer = json.loads(message.data)
            if not isinstance(answer, dict) or not isinstance(answer.get("data"), dict):
                raise EnvironmentLostError(f"{self._url}: the answer to {kind} is not one of OpenEnv's messages")
        except TimeoutError:
            # An answer that comes later would be taken for that of the next step.
            raise EnvironmentLostError(f"{self._url}: no answer to {kind} within {self._timeout_s:g} s") from None
        except (*_LOST, RecursionError) as error:
            raise EnvironmentLostError(f"{self._url}: {type(error).__name__}: {error}") from None
        return str(answer.get("type")), answer["data"]
