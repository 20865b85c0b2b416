"""Episodes in the world: the package's own player, dialogue and environments; model, tools and servers say anything.

What is lost is counted by whoever loses it on purpose: no text and no number may lose an episode by itself.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, Literal, cast
from unittest import mock

import aiohttp
import httpx2
import numpy as np
import pydantic_core
from mcp import MCPError
from mcp.types import CONNECTION_CLOSED, CallToolResult, TextContent

from megarl.config.environment import ClassEnvironmentConfig
from megarl.data.tokenizer import Tokenizer
from megarl.episodes import mcp_environments
from megarl.episodes.admission import Admission
from megarl.episodes.class_environments import ClassEnvironments
from megarl.episodes.dialogue import Dialogue
from megarl.episodes.openenv_environments import OpenEnvEnvironments
from megarl.episodes.play import Player, Tools
from megarl.episodes.processes import EpisodeProcess
from megarl.episodes.protocol import ToolSchema
from megarl.errors import MegarlError, QuarantineError
from megarl.reward.protocol import check_result
from megarl.system.user_process import NoReplyError
from megarl.tokens import SampledTokens
from megarl.types import Rollout, TokenArray
from tests.episodes.templates import family_tokenizer, sum_prompt
from tests.simulation import hostile
from tests.simulation.world import Process, StuckError, World, WorldLoop

Kind = Literal["class", "openenv", "mcp"]
_TIMEOUT_S = 5.0
_WALL_S = 60.0
_LIMIT_S = 2000.0
_MAX_RESULT_TOKENS = 32
_MARK = re.compile(r"result of (\d+)")
SERIAL: dict[str, Any] = {"type": "object", "properties": {"serial": {"type": "integer"}}, "required": ["serial"]}
TOOL = ToolSchema(name="add", description="Add two numbers.", parameters=SERIAL)
STEP = ToolSchema(name="step", description="Take a step.", parameters=SERIAL)


@cache
def _tokenizer(name: str) -> Tokenizer:
    with TemporaryDirectory(prefix="megarl-world-") as folder:
        return family_tokenizer(Path(folder), "qwen2.5", tools=(STEP if name == "step" else TOOL,))


@cache
def _dialogue(name: str) -> Dialogue:
    """Return the dialogue of all talks with a tool, as all episodes of a run have one: it rehearses the template."""
    return Dialogue(_tokenizer(name), max_result_tokens=_MAX_RESULT_TOKENS)


@cache
def _controls(name: str) -> frozenset[int]:
    added = _tokenizer(name)._inner.added_tokens_decoder
    return frozenset(int(token_id) for token_id, token in added.items() if token.special)


@cache
def _controls_of_opening(name: str) -> int:
    """Return the number of control tokens of a chat with a plain opening."""
    tokenizer = _tokenizer(name)
    plain = [{"role": "user", "content": "3+4="}, {"role": "user", "content": "seven"}]
    (token_ids,) = tokenizer.encode([tokenizer.render_chat(plain)])
    return sum(int(each) in _controls(name) for each in token_ids)


@dataclass(frozen=True)
class TalkPlan:
    seed: int
    kind: Kind

    @classmethod
    def of(cls, seed: int) -> TalkPlan:
        return cls(seed=seed, kind=random.Random(f"talk {seed}").choice(("class", "openenv", "mcp")))

    def __str__(self) -> str:
        return f"talk {self.seed}: {self.kind}"


@dataclass(eq=False)
class Talk:
    """One prompt and the episodes of it."""

    plan: TalkPlan
    chance: random.Random = field(init=False)
    num_lost: int = 0
    """Attempts that were lost on purpose."""
    last_serial: int = 0
    broken: list[str] = field(default_factory=list)
    log: list[tuple[float, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.plan.seed)

    def happens(self, probability: float) -> bool:
        return self.chance.random() < probability

    def lose(self) -> None:
        self.num_lost += 1

    async def delay(self) -> None:
        """Take a moment, or longer than anyone waits."""
        if self.happens(0.02):
            self.lose()
            await asyncio.sleep(10 * _TIMEOUT_S)
        await asyncio.sleep(self.chance.random() * 0.5)

    def observed(self, arguments: object) -> str:
        """Return the result of a call: its number, and anything."""
        serial = arguments.get("serial") if isinstance(arguments, dict) else None
        return f"result of {serial} {hostile.text(self.chance)}"


@dataclass(eq=False)
class HostileModel:
    """A `Sampler` that writes responses of the grammar, and looks at what it is asked to continue."""

    talk: Talk
    tokenizer: Tokenizer
    tool: str
    controls: frozenset[int]
    row: int = 0
    called: int | None = None
    """The number of the call in the last response."""
    end: int = 0
    """Tokens up to the end of the last response."""

    async def sample(
        self, history: TokenArray, *, max_tokens: int, row: int, num_routed: int, heard: object = None
    ) -> SampledTokens:
        self._look(history, row)
        talk = self.talk
        await asyncio.sleep(talk.chance.random())
        talk.last_serial += 1
        text = hostile.response(talk.chance, self.tool, talk.last_serial)
        # A model writes bytes: what cannot be encoded comes out of it as an escape of JSON.
        ids = self.tokenizer.encode([text.encode(errors="replace").decode()])[0][: max_tokens - 1]
        whole = np.concatenate([ids, np.array(self.tokenizer.eos_ids[:1], np.int32)])
        self.called = talk.last_serial if f'"serial": {talk.last_serial}' in text else None
        self.end = len(history) + len(whole)
        return SampledTokens(
            token_ids=whole,
            logprobs=np.full(len(whole), -0.5, np.float32),
            versions=np.zeros(len(whole), np.int32),
            is_cut=len(ids) == max_tokens - 1,
        )

    def _look(self, history: TokenArray, row: int) -> None:
        """Check that what was given has the control tokens of the template alone, and answers the last call."""
        if self.called is None and row > self.row:
            self._look_at_opening(history)
        if row != self.row or self.called is None or self.end > len(history):
            self.row = row
            return
        given = history[self.end :]
        count = sum(int(each) in self.controls for each in given)
        # A result is a message of its own, in Qwen's template of the user, and the next turn begins: three marks.
        if count > 3:
            self.talk.broken.append(f"no foreign control token: {count} of them in the answer to a call")
        marks = _MARK.findall(self.tokenizer.decode(given))
        if marks and int(marks[0]) != self.called:
            self.talk.broken.append(f"an observation belongs to its call: {marks[0]} for {self.called}")

    def _look_at_opening(self, history: TokenArray) -> None:
        """Check the first history of a row: that of a chat with a plain opening has as many control tokens."""
        count, most = sum(int(each) in self.controls for each in history), _controls_of_opening(self.tool)
        if self.talk.last_serial == 0 and count > most:
            self.talk.broken.append(f"no foreign control token: {count - most} of them in the opening")


class HostileProcess:
    """A user's process (`UserProcess`) that replies with anything the worker's own checks let through."""

    is_whole = True

    def __init__(self, talk: Talk) -> None:
        self._talk = talk

    async def ask(self, request: Mapping[str, Any], *, timeout_s: float) -> dict[str, object]:
        talk = self._talk
        if talk.happens(0.03):
            talk.lose()
            raise NoReplyError("has ended")
        await asyncio.sleep(talk.chance.random())
        reply: dict[str, Any] = {}
        if request["does"] == "call":
            reply = {"text": talk.observed(request["arguments"]), "ended": talk.happens(0.1)}
        elif request["does"] == "score":
            names = ("score", "a", hostile.text(talk.chance))
            result = {name: hostile.number(talk.chance) for name in names}
            weights = {"a": 1e10, "score": 1.0} if talk.happens(0.3) else None
            reply = dict(check_result(result if talk.happens(0.8) else hostile.value(talk.chance), weights))
            if "error" in reply:
                talk.lose()
        return json.loads(json.dumps({"id": 1, **reply}))  # type: ignore[no-any-return]


class HostileSocket:
    """The connection of an OpenEnv server."""

    closed = False

    def __init__(self, talk: Talk) -> None:
        self._talk = talk
        self._asked: dict[str, Any] = {}

    async def send_json(self, message: dict[str, Any]) -> None:
        json.dumps(message).encode()
        self._asked = message

    async def receive(self) -> Any:
        talk, kind = self._talk, self._asked["type"]
        await talk.delay()
        if talk.happens(0.03):
            talk.lose()
            return SimpleNamespace(type=aiohttp.WSMsgType.CLOSED, data=None)
        data: dict[str, Any] = {"observation": {"text": talk.observed(self._asked.get("data"))}}
        if kind == "step":
            data["reward"] = hostile.number(talk.chance) if talk.happens(0.5) else 0.25
            data["done"] = talk.happens(0.2)
            if not _is_finite32(data["reward"]):
                talk.lose()  # a server's nonsense may lose the episode, never more
        elif kind == "state":
            data = {hostile.text(talk.chance)[:10]: hostile.value(talk.chance) for _ in range(2)}
        answer = {"type": "state" if kind == "state" else "observation", "data": data}
        return SimpleNamespace(type=aiohttp.WSMsgType.TEXT, data=json.dumps(answer))

    async def close(self) -> None:
        self.closed = True


def _is_finite32(number: float) -> bool:
    try:
        return bool(abs(float(number)) < 1e18)
    except OverflowError:
        return False


class HostileClient:
    """A client of the Model Context Protocol. Like the library's it closes the session where it cannot serialise."""

    talk: Talk

    def __init__(self, *_: object, **__: object) -> None:
        self._is_closed = False
        self._is_endless = self.talk.happens(0.05)

    async def __aenter__(self) -> HostileClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def list_tools(self, *, cursor: str | None) -> Any:
        await asyncio.sleep(0.05)
        tools = [SimpleNamespace(name=TOOL.name, description=TOOL.description, input_schema=SERIAL)]
        if self._is_endless:
            if cursor is None:
                self.talk.lose()
            return SimpleNamespace(tools=[], next_cursor="more")
        return SimpleNamespace(tools=tools, next_cursor=None)

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        try:
            pydantic_core.to_json(arguments)
        except ValueError:
            self._is_closed = True
        if self._is_closed:
            raise MCPError(CONNECTION_CLOSED, "Connection closed")
        await asyncio.sleep(self.talk.chance.random())
        content = [TextContent(type="text", text=self.talk.observed(arguments))]
        return CallToolResult(content=cast("Any", content), is_error=self.talk.happens(0.1))


def _environments(talk: Talk) -> Any:
    if talk.plan.kind == "class":
        processes = SimpleNamespace(take=_taker(talk), most_open=None, close=lambda: None)
        return ClassEnvironments(cast("Any", processes), tools=(TOOL,), call_deadline_s=_TIMEOUT_S)
    if talk.plan.kind == "openenv":
        session = SimpleNamespace(ws_connect=_connector(talk), close=None)
        return OpenEnvEnvironments(cast("Any", session), "ws://sim/ws", tool=STEP, timeout_s=_TIMEOUT_S)
    return mcp_environments.McpEnvironments(
        {"sim": "http://sim/mcp"}, keys={}, by_server={"sim": (TOOL,)}, timeout_s=_TIMEOUT_S
    )


class _Timed:
    """Environments whose opening has to end."""

    def __init__(self, inner: Any, talk: Talk) -> None:
        self._inner, self._talk, self.tools = inner, talk, inner.tools

    async def open(self, row: Any) -> Any:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            return await self._inner.open(row)
        finally:
            seconds = loop.time() - began
            if seconds > 3 * _TIMEOUT_S:
                self._talk.broken.append(f"every wait ends: to open an environment took {seconds:.0f} s")

    async def close(self) -> None:
        pass


def _taker(talk: Talk) -> Any:
    async def take(_prompt: str) -> EpisodeProcess:
        return EpisodeProcess(HostileProcess(talk), give=lambda _: None)

    return take


def _connector(talk: Talk) -> Any:
    async def connect(_url: str, **_: object) -> HostileSocket:
        await asyncio.sleep(0.1)
        return HostileSocket(talk)

    return connect


async def _play(talk: Talk) -> None:
    tool = "step" if talk.plan.kind == "openenv" else "add"
    tokenizer = _tokenizer(tool)
    config = ClassEnvironmentConfig(kind="class", max_turns=5, max_result_tokens=_MAX_RESULT_TOKENS, wall_s=_WALL_S)
    retried: list[str] = []
    player = Player(
        Tools(_Timed(_environments(talk), talk), _dialogue(tool), config),
        config,
        admission=Admission(max_running=2, max_open=2),
        decode=tokenizer.decode_response,
        retried=retried.append,
    )
    model = HostileModel(talk, tokenizer, tool, _controls(tool))
    try:
        rollout = await player.rollout(sum_prompt(tokenizer), model, max_tokens=600)
        num_lost = rollout.episode.num_retries
        talk.broken += _numbers(rollout)
    except QuarantineError as error:
        num_lost = config.max_attempts
        talk.log.append((0.0, str(error)))
    if num_lost > talk.num_lost:
        talk.broken.append(f"no text loses an episode: {num_lost} were lost, {talk.num_lost} of them on purpose")


def _numbers(rollout: Rollout) -> Iterator[str]:
    score = rollout.score
    numbers = [turn.reward for turn in rollout.episode.turns]
    if score is not None:
        numbers += [score.value, *score.components.values(), *(score.turns or ())]
    for number in numbers:
        with np.errstate(over="ignore"):
            if not np.isfinite(np.float32(number)):
                yield f"numbers are finite: {number!r}"


@contextmanager
def no_network() -> Iterator[None]:
    """Let sessions have the hostile client, and none of the library's own, which takes longer than an episode."""
    transport = mock.patch.object(mcp_environments, "_BoundedTransport", _nothing)
    http = mock.patch.object(httpx2, "AsyncClient", _nothing)
    with transport, http, mock.patch.object(mcp_environments, "Client", HostileClient):
        yield


def _nothing(*_: object, **__: object) -> Any:
    return nullcontext()


def run_talk(plan: TalkPlan) -> Talk:
    """Return an episode with what it broke."""
    talk = Talk(plan)
    world = World(plan.seed, limit_s=_LIMIT_S)
    process = Process(world, "worker", host="worker")

    def work() -> None:
        try:
            WorldLoop(process).run(lambda: _play(talk))
        except MegarlError as error:
            talk.broken.append(f"one episode ends no run: {type(error).__name__}: {error}")
        except Exception as error:  # noqa: BLE001 - what a user would see as exit code 70
            talk.broken.append(f"no exit 70: {type(error).__name__}: {error}")

    process.spawn(work)
    HostileClient.talk = talk
    with no_network():
        try:
            world.run()
        except StuckError as error:
            talk.broken.append(f"every wait ends: {error}")
    talk.log += world.log
    return talk
