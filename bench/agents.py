"""The plane of agents: CPU of the endpoint, time of the first streamed token, and what an idle episode costs.

Engine and agents are processes of their own, which compute nothing and are not counted. Between them everything is as
in a rollout worker of a run: endpoint, sessions, player, generator and fleet.
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import resource
import statistics
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import aiohttp
import msgspec
import psutil
from aiohttp import web

from bench.dataplane import PlaneFigure, fleet_of, resident_bytes
from bench.episodes import CALCULATOR, output_of
from bench.instant_engine import serving
from megarl.config.environment import ChatEnvironmentConfig, ClassEnvironmentConfig
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.engine.batches import PARTIAL, Line
from megarl.episodes.admission import Admission
from megarl.episodes.build import build_dialogue, open_agents, open_environments
from megarl.episodes.chat_endpoint import Access, ChatEndpoint
from megarl.episodes.play import Agency, Player, Tools, tools_of
from megarl.episodes.processes import PROGRAM
from megarl.episodes.protocol import (
    Agents,
    Call,
    Environment,
    Environments,
    Observation,
    Row,
    TokenSession,
    ToolSchema,
    Transcript,
)
from megarl.episodes.session import Session
from megarl.observe.observer import Observer
from megarl.reward.scorer import ExactScorer
from megarl.rollout.task import RolloutTask, Sampling, Vocabulary
from megarl.rollout.worker import RolloutWorker
from megarl.system.network import LOOPBACK
from megarl.tools.quickstart.calculator import SHAPE, call_text
from megarl.tools.quickstart.tiny_model import write_config
from megarl.types import JsonValue, Prompt, Score

_CONTEXT_TOKENS = 1 << 16
_LETTER = "z"
"""The engine writes nothing else: the first one in a stream is the first token."""
_FIRST = b'"z'
_GROUP = 8
_PACE_S = 0.01
"""Time between two tokens of a stream."""
_LONG, _SHORT = 4096, 8
"""Tokens of answers; their difference gives the cost of one."""
_FAR = 4096
"""Open files of a process beside those of its episodes."""
_CLASS = '''
import asyncio

class Calculator:
    def __init__(self, ground_truth: str, **_row):
        self.truth = ground_truth
    async def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        await asyncio.sleep(3600)
        return str(a + b)
    async def score(self, transcript) -> float:
        return float(transcript.last_text.strip() == self.truth)
'''
_AGENT = """
import asyncio, httpx

client, places = httpx.AsyncClient(timeout=None), asyncio.Semaphore(64)

async def run(task, base_url, api_key):
    chat = [{"role": "user", "content": task["prompt"]}]
    async with places:
        reply = await client.post(
            f"{base_url}/chat/completions", json={"messages": chat, "max_tokens": 64},
            headers={"Authorization": f"Bearer {api_key}"})
    text = reply.json()["choices"][0]["message"]["content"]
    await asyncio.sleep(3600)
    return float(text == task["ground_truth"])
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """Requests of the agents' process: one conversation each, or several turns of one."""

    path: str
    is_streamed: bool
    num_tokens: int
    count: int
    """Requests of each episode, one after the other."""

    def body(self, number: int) -> bytes:
        """Return a request; all agents ask the same at a time, as those of a group do."""
        text = f"Say it {number}."
        chat: list[JsonValue] = [{"role": "user", "content": text}]
        limit = {"/v1/responses": "max_output_tokens"}.get(self.path, "max_tokens")
        asked: dict[str, JsonValue] = {"model": "policy", limit: self.num_tokens, "stream": self.is_streamed}
        match self.path:
            case "/v1/completions":
                asked["prompt"] = text
            case "/v1/responses":
                asked["input"] = chat
            case _:
                asked["messages"] = chat
        return json.dumps(asked).encode()


DIALECTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


def measure_agents(*, num_requests: int = 512, num_idle: int = 10_000) -> list[PlaneFigure]:
    """`num_idle` episodes wait for their tools at once."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with tempfile.TemporaryDirectory(prefix="megarl-bench-") as name, _agents_process() as pool:
            folder = Path(name)
            write_config(folder, SHAPE)
            return asyncio.run(_measure(folder, pool, num_requests=num_requests, num_idle=min(num_idle, hard - _FAR)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def _measure(folder: Path, pool: ProcessPoolExecutor, *, num_requests: int, num_idle: int) -> list[PlaneFigure]:
    path = folder / "calculator.py"
    path.write_text(_CLASS)
    config = ClassEnvironmentConfig(
        kind="class", path=path, call_format="llama", max_turns=1 << 20, wall_s=3600, call_deadline_s=3600
    )
    tools = await asyncio.to_thread(tools_of, config)
    tokenizer = load_tokenizer(folder, vocab=SHAPE.vocab, tools=[tool.as_function for tool in tools])
    letter, (end_id, *_) = int(tokenizer.encode([_LETTER])[0][0]), tokenizer.eos_ids
    call_ids = [*tokenizer.encode([call_text((123, 456))])[0].tolist(), end_id]
    figures: list[PlaneFigure] = []
    gc.collect()
    before = resident_bytes()  # what a part frees is not given back: each is compared with the beginning
    with _engine(letter, pace_s=_PACE_S) as port:
        figures += await _overheads(tokenizer, port, pool, num_requests=num_requests)
        figures += await _first_tokens(tokenizer, port, pool)
        figures += await _idle_agents(tokenizer, port, pool, before, num_idle=num_idle)
        figures += await _idle_functions(tokenizer, port, folder, before, num_idle=num_idle)
    with _engine(letter, pace_s=0.0, said=call_ids) as port:
        figures += await _idle_environments(tokenizer, port, config, tools, before, num_idle=num_idle)
    return [*figures, await _own_process(config)]


# The endpoint's own cost.


async def _overheads(
    tokenizer: Tokenizer, port: int, pool: ProcessPoolExecutor, *, num_requests: int
) -> list[PlaneFigure]:
    echo_s = await _cpu_of_echo(pool, num_requests=num_requests)
    sizes = (_SHORT, num_requests // _GROUP), (_LONG, 4)
    turn_s, long_turn_s = [await _cpu_of_turn(tokenizer, port, num_tokens, count) for num_tokens, count in sizes]
    figures = [
        PlaneFigure(name="a bare echo: a request", value=1e3 * echo_s, unit="ms CPU"),
        PlaneFigure(name="a turn without the endpoint", value=1e3 * turn_s, unit="ms CPU"),
    ]
    for path in DIALECTS:
        for is_streamed in (False, True):
            # A stream has its pace: few long ones.
            asked = [
                Asking(path=path, is_streamed=is_streamed, num_tokens=num_tokens, count=count)
                for num_tokens, count in (sizes[0], (512, 4) if is_streamed else sizes[1])
            ]
            short_s, long_s = [await _cpu_of_request(tokenizer, port, pool, each) for each in asked]
            name = f"{path}{', streamed' if is_streamed else ''}"
            token_s = (long_s - short_s) / (asked[1].num_tokens - asked[0].num_tokens)
            figures += [
                PlaneFigure(name=f"{name}: a request", value=1e3 * short_s, unit="ms CPU"),
                PlaneFigure(name=f"{name}: a request in echoes", value=short_s / echo_s, unit="x"),
                PlaneFigure(
                    name=f"{name}: the endpoint's part of a request",
                    value=1e3 * (short_s - turn_s),
                    unit="ms CPU",
                    goal=1.0,
                ),
                PlaneFigure(name=f"{name}: a token", value=1e6 * token_s, unit="us CPU"),
            ]
            if not is_streamed:
                part_s = token_s - (long_turn_s - turn_s) / (_LONG - _SHORT)
                part = PlaneFigure(
                    name=f"{name}: the endpoint's part of a token", value=1e6 * part_s, unit="us CPU", goal=0.25
                )
                figures.append(part)
    return figures


async def _cpu_of_echo(pool: ProcessPoolExecutor, *, num_requests: int) -> float:
    """Measure the least server that there is in asyncio, with the same client: this machine's measure."""
    server = await asyncio.get_running_loop().create_server(_Echo, LOOPBACK, 0)
    port = server.sockets[0].getsockname()[1]
    accesses = [Access(url=f"http://{LOOPBACK}:{port}", key=str(number)) for number in range(_GROUP)]
    asking = Asking(path=DIALECTS[0], is_streamed=False, num_tokens=_SHORT, count=num_requests // _GROUP)
    await _asked(pool, accesses, asking)
    began = time.process_time()
    await _asked(pool, accesses, asking)
    seconds = time.process_time() - began
    server.close()
    return seconds / (_GROUP * asking.count)


class _Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._received = b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        _, end, body = self._received.partition(b"\r\n\r\n")
        if body.endswith(b"}"):  # the end of a request
            self._received = b""
            said = body + _FIRST
            self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d%b%b" % (len(said), end, said))


async def _cpu_of_turn(tokenizer: Tokenizer, port: int, num_tokens: int, count: int) -> float:
    """Measure what sampling costs every episode, without an endpoint: rows of the same sessions and lengths."""

    async def take_turns(session: Session, number: int) -> None:
        (token_ids,) = tokenizer.encode([f"Say it {number}."])
        for _ in range(number):
            await session.open_row(token_ids).sample(max_tokens=num_tokens)

    async with _remote_agents(tokenizer, port, num_groups=1) as remote:
        await remote.all_open(_GROUP)
        await asyncio.gather(*(take_turns(session, 2) for session in remote.sessions))
        gc.collect()
        began = time.process_time()
        await asyncio.gather(*(take_turns(session, count) for session in remote.sessions))
        return (time.process_time() - began) / (_GROUP * count)


async def _cpu_of_request(tokenizer: Tokenizer, port: int, pool: ProcessPoolExecutor, asking: Asking) -> float:
    async with _remote_agents(tokenizer, port, num_groups=1) as remote:
        accesses = await remote.all_open(_GROUP)
        # The first requests open connections and compile templates.
        first = Asking(path=asking.path, is_streamed=asking.is_streamed, num_tokens=_SHORT, count=2)
        await _asked(pool, accesses, first)
        gc.collect()
        began = time.process_time()
        await _asked(pool, accesses, asking)
        return (time.process_time() - began) / (_GROUP * asking.count)


async def _first_tokens(
    tokenizer: Tokenizer, port: int, pool: ProcessPoolExecutor, *, count: int = 40
) -> list[PlaneFigure]:
    """Compare the time at which the engine sent the first token of a stream with that at which the agent got it."""
    figures = []
    for path in DIALECTS:
        async with _remote_agents(tokenizer, port, num_groups=1) as remote:
            accesses = (await remote.all_open(_GROUP))[:1]
            asking = Asking(path=path, is_streamed=True, num_tokens=_SHORT, count=count)
            await _asked(pool, accesses, asking)
            before = len(await _told(port))
            heard = await _asked(pool, accesses, asking)
            told = (await _told(port))[before:]
        assert len(heard) == len(told) == count, f"{len(heard)} of {len(told)} first tokens"
        late_s = [got - sent for got, sent in zip(heard, told, strict=True)]
        name = f"{path}: first streamed token after the engine's"
        figures.append(PlaneFigure(name=name, value=1e3 * statistics.median(late_s), unit="ms", goal=10.0))
    return figures


# Episodes that wait for their tools.


async def _idle_agents(
    tokenizer: Tokenizer, port: int, pool: ProcessPoolExecutor, before: int, *, num_idle: int
) -> list[PlaneFigure]:
    """Agents have had a turn and keep their connections; what they do meanwhile costs the worker nothing."""
    async with _remote_agents(tokenizer, port, num_groups=num_idle // _GROUP) as remote:
        accesses = await remote.all_open(num_idle)
        asking = Asking(path=DIALECTS[0], is_streamed=False, num_tokens=64, count=1)
        loop = asyncio.get_running_loop()
        with multiprocessing.get_context("spawn").Manager() as manager:
            is_over = manager.Event()
            asked = loop.run_in_executor(pool, _idle_client, accesses, asking, is_over)
            while remote.num_turns < num_idle:
                await asyncio.sleep(0.1)
            held = await _held(before)
            is_over.set()
            await asked
    return _idle_figures("agent that talks to the endpoint", held, num_idle)


async def _idle_environments(
    tokenizer: Tokenizer,
    port: int,
    config: ClassEnvironmentConfig,
    tools: Sequence[ToolSchema],
    before: int,
    *,
    num_idle: int,
) -> list[PlaneFigure]:
    """Each episode has called a tool that does not answer."""
    environments = _CountedEnvironments(await open_environments(config), tools)
    player = _player(Tools(environments, build_dialogue(config, tokenizer), config), config, tokenizer)
    async with _playing(tokenizer, port, player, num_groups=num_idle // _GROUP):
        while environments.num_called < num_idle // _GROUP * _GROUP:
            await asyncio.sleep(0.1)
        held = await _held(before)
    return _idle_figures("episode of an async class that waits for its tool", held, num_idle)


async def _idle_functions(
    tokenizer: Tokenizer, port: int, folder: Path, before: int, *, num_idle: int
) -> list[PlaneFigure]:
    """Each agent, an async function, has had a turn and waits."""
    path = folder / "agent.py"
    path.write_text(_AGENT)
    config = ChatEnvironmentConfig(kind="chat", path=path, max_turns=1 << 20, wall_s=3600, memory_gib=None)
    agents = _CountedAgents(await open_agents(config, tokenizer.with_tools(())))
    player = _player(Agency(agents, max_turns=config.max_turns), config, tokenizer)
    async with _playing(tokenizer, port, player, num_groups=num_idle // _GROUP):
        while agents.num_turns < num_idle // _GROUP * _GROUP:
            await asyncio.sleep(0.1)
        held = await _held(before)
    return _idle_figures("async agent of `chat` that waits", held, num_idle)


async def _own_process(config: ClassEnvironmentConfig, *, count: int = 8) -> PlaneFigure:
    """Return the memory of a process of one episode."""
    environments = await open_environments(config.model_copy(update={"episodes_per_process": 1}))
    try:
        row: Row = {"ground_truth": "7"}
        opened = [await environments.open(row) for _ in range(count)]
        num_bytes = sum(_memory_of(each) for each in _workers()) / count
        for each in opened:
            await each.close()
    finally:
        await environments.close()
    return PlaneFigure(name="process of one episode", value=num_bytes / 1e6, unit="MB")


def _workers() -> list[psutil.Process]:
    """Return the processes that run classes and agents."""
    return [each for each in psutil.Process().children() if PROGRAM in " ".join(each.cmdline())]


def _memory_of(process: psutil.Process) -> int:
    """Return its memory, shared pages divided by those that share them."""
    return int(process.memory_full_info().pss)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    num_bytes: int
    cpu_share: float
    """Of one core, while nothing happens."""


async def _held(before: int, *, window_s: float = 10.0) -> _Held:
    """Measure this process and those of classes and agents, once what was asked for is done."""
    busy_s = window_s
    while busy_s > 0.1:
        began_cpu = _cpu_s()
        await asyncio.sleep(1.0)
        busy_s = _cpu_s() - began_cpu
    gc.collect()
    num_bytes = resident_bytes() - before + sum(map(_memory_of, _workers()))
    began_cpu, began = _cpu_s(), time.monotonic()
    await asyncio.sleep(window_s)
    return _Held(num_bytes=num_bytes, cpu_share=(_cpu_s() - began_cpu) / (time.monotonic() - began))


def _cpu_s() -> float:
    times = [each.cpu_times() for each in _workers()]
    return time.process_time() + float(sum(each.user + each.system for each in times))


def _idle_figures(name: str, held: _Held, num_idle: int) -> list[PlaneFigure]:
    return [
        PlaneFigure(name=f"{name}: memory of {num_idle} idle", value=held.num_bytes / 1e9, unit="GB", goal=2.0),
        PlaneFigure(name=f"{name}: memory of one", value=held.num_bytes / num_idle / 1e3, unit="KB"),
        PlaneFigure(name=f"{name}: CPU of {num_idle} idle", value=100 * held.cpu_share, unit="% of a core"),
    ]


class _CountedEnvironments:
    """Environments that count the calls."""

    def __init__(self, inner: Environments, tools: Sequence[ToolSchema]) -> None:
        self._inner = inner
        self.tools = tools
        self.num_called = 0

    async def open(self, row: Row) -> Environment:
        environment = await self._inner.open(row)
        return _CountedEnvironment(environment, self)

    async def close(self) -> None:
        await self._inner.close()


class _CountedEnvironment:
    opening = None

    def __init__(self, inner: Environment, counted: _CountedEnvironments) -> None:
        self._inner = inner
        self._counted = counted
        self.tools = counted.tools

    async def call(self, call: Call) -> Observation:
        self._counted.num_called += 1
        return await self._inner.call(call)

    async def score(self, transcript: Transcript) -> Score | None:
        raise AssertionError("no episode is over")

    async def close(self) -> None:
        await self._inner.close()


class _CountedAgents:
    """Agents that keep the sessions."""

    def __init__(self, inner: Agents) -> None:
        self._inner = inner
        self._sessions: list[TokenSession] = []

    async def run(self, row: Row, session: TokenSession) -> Score | None:
        self._sessions.append(session)
        return await self._inner.run(row, session)

    @property
    def num_turns(self) -> int:
        return sum(session.num_sampled for session in self._sessions)

    async def close(self) -> None:
        await self._inner.close()


# The worker.


class _RemoteAgents:
    """`Agents` of another process: each episode is open until `is_over`."""

    def __init__(self, endpoint: ChatEndpoint) -> None:
        self._endpoint = endpoint
        self.sessions: list[Session] = []
        self._accesses: list[Access] = []
        self.is_over = asyncio.Event()

    async def run(self, row: Row, session: TokenSession) -> Score:
        assert isinstance(session, Session)
        async with self._endpoint.episode(session) as access:
            self.sessions.append(session)
            self._accesses.append(access)
            await self.is_over.wait()
        return Score(value=0.0, components={})

    async def all_open(self, count: int) -> list[Access]:
        while len(self._accesses) < count // _GROUP * _GROUP:
            await asyncio.sleep(0.01)
        return list(self._accesses)

    @property
    def num_turns(self) -> int:
        return sum(session.num_sampled for session in self.sessions)

    async def close(self) -> None:
        await self._endpoint.close()


@asynccontextmanager
async def _remote_agents(tokenizer: Tokenizer, port: int, *, num_groups: int) -> AsyncIterator[_RemoteAgents]:
    """Open so many groups of episodes, whose agents are elsewhere."""
    config = ChatEnvironmentConfig(kind="chat", path=CALCULATOR, max_turns=1 << 20)
    endpoint = ChatEndpoint(tokenizer.with_tools(()), call_format="llama")
    await endpoint.start()
    remote = _RemoteAgents(endpoint)
    player = _player(Agency(remote, max_turns=config.max_turns), config, tokenizer)
    async with _playing(tokenizer, port, player, num_groups=num_groups) as answering:
        yield remote
        remote.is_over.set()
        await answering


def _player(
    surroundings: Tools | Agency, config: ChatEnvironmentConfig | ClassEnvironmentConfig, tokenizer: Tokenizer
) -> Player:
    return Player(
        surroundings,
        config,
        admission=Admission(max_running=1 << 20, max_open=1 << 20),
        decode=tokenizer.decode_response,
        retried=lambda _cause: None,
    )


@asynccontextmanager
async def _playing(
    tokenizer: Tokenizer, port: int, player: Player, *, num_groups: int
) -> AsyncIterator[Awaitable[object]]:
    """Let a rollout worker answer prompts inside of the block; what is left then is given up."""

    async def open_player() -> Player:
        return player

    async with AsyncExitStack() as stack:
        fleet = fleet_of([port], max_outstanding=256)
        stack.push_async_callback(fleet.close)
        worker = RolloutWorker(
            fleet,
            vocabulary=Vocabulary(
                size=SHAPE.vocab,
                eos_ids=tokenizer.eos_ids,
                max_context_tokens=2 * _CONTEXT_TOKENS,
                decode=tokenizer.decode_response,
            ),
            scorer=ExactScorer(Observer(())),
            max_attempts=3,
            open_player=open_player,
        )
        stack.push_async_callback(worker.close)
        answering = asyncio.gather(*(_answer(worker, tokenizer, number) for number in range(num_groups)))
        try:
            yield answering
        finally:
            answering.cancel()
            with suppress(asyncio.CancelledError):
                await answering


async def _answer(worker: RolloutWorker, tokenizer: Tokenizer, number: int) -> None:
    messages = ({"role": "user", "content": "123+456="},)
    (token_ids,) = tokenizer.encode([tokenizer.render_chat(messages)])
    prompt = Prompt(
        uid=str(number),
        position=number,
        epoch=0,
        token_ids=token_ids,
        data_source="",
        ground_truth="579",
        extra_info={},
        messages=messages,
    )
    sampling = Sampling(
        num_rollouts=_GROUP, temperature=1.0, top_p=1.0, top_k=None, max_response_tokens=_CONTEXT_TOKENS
    )
    await worker.answer(prompt, RolloutTask(sampling=sampling, seed=1))


# The agents' process.


@contextmanager
def _agents_process() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


async def _asked(pool: ProcessPoolExecutor, accesses: Sequence[Access], asking: Asking) -> list[float]:
    """Let every episode's agent ask; return when the first token of each answer came."""
    return await asyncio.get_running_loop().run_in_executor(pool, _client, list(accesses), asking)


def _client(accesses: Sequence[Access], asking: Asking) -> list[float]:
    async def ask_all() -> list[float]:
        async with _session() as http:
            heard = await asyncio.gather(*(_ask(http, access, asking) for access in accesses))
        return [each for of_agent in heard for each in of_agent]

    return asyncio.run(ask_all())


def _idle_client(accesses: Sequence[Access], asking: Asking, is_over: threading.Event) -> None:
    async def ask_and_wait() -> None:
        async with _session() as http:
            places = asyncio.Semaphore(256)

            async def ask(access: Access) -> None:
                async with places:
                    await _ask(http, access, asking)

            await asyncio.gather(*map(ask, accesses))
            await asyncio.to_thread(is_over.wait)

    asyncio.run(ask_and_wait())


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3600), timeout=aiohttp.ClientTimeout(total=None)
    )


async def _ask(http: aiohttp.ClientSession, access: Access, asking: Asking) -> list[float]:
    headers = {"Authorization": f"Bearer {access.key}", "Content-Type": "application/json"}
    heard = []
    for number in range(asking.count):
        first = None
        async with http.post(access.url + asking.path, data=asking.body(number), headers=headers) as reply:
            async for piece in reply.content.iter_any():
                if first is None and _FIRST in piece:
                    first = time.monotonic()
            assert reply.status == 200, f"status {reply.status}"
        assert first is not None, "an answer without a token"
        heard.append(first)
    return heard


# The engine's process.


@contextmanager
def _engine(letter: int, *, pace_s: float, said: Sequence[int] | None = None) -> Iterator[int]:
    """Run a server that writes letters up to the limit, or always says the same; yields its port."""
    with serving(_serve, letter, pace_s, said) as port:
        yield port


async def _told(port: int) -> list[float]:
    """Return when the engine sent the first token of each stream."""
    async with aiohttp.ClientSession() as http, http.get(f"http://{LOOPBACK}:{port}/told") as reply:
        told: list[float] = await reply.json()
        return told


def _serve(letter: int, pace_s: float, said: Sequence[int] | None, started: Connection) -> None:
    told: list[float] = []

    def line(place: int, fields: Mapping[str, object]) -> bytes:
        sampling = fields["sampling_params"]
        assert isinstance(sampling, dict)
        output, meta = output_of([letter] * sampling["max_new_tokens"] if said is None else list(said))
        if said is None:
            meta["finish_reason"] = {"type": "length", "length": len(output)}
        reply = {"output_ids": output, "meta_info": meta, "prompt_token_ids": fields["input_ids"]}
        return Line(place=place, status_code=200, content=msgspec.json.encode(reply)).encode()

    async def generate(http: web.Request) -> web.StreamResponse:
        asked = msgspec.json.decode(await http.read())
        response = web.StreamResponse()
        await response.prepare(http)

        async def stream(place: int, fields: Mapping[str, object]) -> None:
            sampling = fields["sampling_params"]
            assert isinstance(sampling, dict)
            told.append(time.monotonic())
            for _ in range(1, sampling["max_new_tokens"]):
                await response.write(Line(place=place, status_code=PARTIAL, content=b"[%d]" % letter).encode())
                await asyncio.sleep(pace_s)

        streams = [stream(place, fields) for place, fields in enumerate(asked) if fields.get("stream")]
        await asyncio.gather(*streams)
        await response.write(b"".join(line(place, fields) for place, fields in enumerate(asked)))
        await response.write_eof()
        return response

    async def tell(_request: web.Request) -> web.Response:
        return web.json_response(told)

    async def serve() -> None:
        app = web.Application(client_max_size=1 << 28)
        app.add_routes([web.post("/generate", generate), web.get("/told", tell)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, LOOPBACK, 0).start()
        started.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(serve())
