"""The Python tool in the world: its frames and deadlines, with interpreters that are slow, die, and write frames.

The package's own worker calls the package's own tool. Simulated are the two pipes and the process behind them.
"""

from __future__ import annotations

import json
import random
import re
import selectors
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

from megarl.episodes import worker
from megarl.episodes.built_in import python as tool
from megarl.reward.sandbox import SandboxError
from megarl.types import JsonValue
from tests.simulation import hostile
from tests.simulation.world import Process, StuckError, World, calling_process

_CALLS = 6
_DEADLINE_S = 5.0
_LIMIT_S = 2000.0
_HEADER = struct.Struct("!IQ")
_GIVEN, _REPLIES = 0, 1
_MARK = re.compile(r"result of (\d+)")


@dataclass(eq=False)
class Interpreter:
    """A process of the sandbox: what it has been sent, and what it writes when."""

    bench: Bench
    pid: int
    sent: bytes = b""
    due: list[tuple[float, bytes]] = field(default_factory=list)
    """An empty part is the end of the process."""
    is_alive: bool = True

    def __post_init__(self) -> None:
        chance, now = self.bench.chance, self.bench.world.now
        self.stdin, self.stdout = (
            SimpleNamespace(fileno=lambda end=end: 2 * self.pid + end, close=bool) for end in (0, 1)
        )
        seconds = chance.choice((0.1, 0.5, 3.0, 9.0, 40.0))
        self.is_sound = not self.bench.happens(0.15)
        self.bench.is_disturbed |= not self.is_sound
        hello = _HEADER.pack(2, 0) + b"{}"
        self.due.append((now + seconds, hello if self.is_sound else b""))

    def wait(self) -> None:
        self.is_alive = False

    def write(self, content: bytes) -> int:
        """Take some of a request; answer it once it is whole."""
        taken = content[: self.bench.chance.choice((1, 7, len(content), len(content)))]
        self.sent += taken
        while len(self.sent) >= _HEADER.size:
            size, number = _HEADER.unpack(self.sent[: _HEADER.size])
            if len(self.sent) < _HEADER.size + size:
                break
            code, self.sent = self.sent[_HEADER.size : _HEADER.size + size], self.sent[_HEADER.size + size :]
            self._answer(code.decode(), number)
        return len(taken)

    def _answer(self, code: str, number: int) -> None:
        bench = self.bench
        seconds = bench.chance.choice((0.01, 0.2, 1.0, 4.0)) if not bench.happens(0.1) else 3 * _DEADLINE_S
        reply = {"text": f"result of {code} {hostile.text(bench.chance)}", "size": 10, "is_done": True}
        content = json.dumps(reply).encode()
        frame = _HEADER.pack(len(content), number) + content
        kind = bench.chance.randrange(12)
        bench.is_disturbed |= seconds > _DEADLINE_S or kind < 3
        if kind == 0:
            frame = b""
        elif kind == 1:  # code of the model found the pipe
            frame = _HEADER.pack(bench.chance.choice((2, 1 << 31)), number + 1) + b"{}" + frame
        elif kind == 2:
            frame = frame[: bench.chance.randrange(len(frame))] + b"\x00\xff"
        self.due.append((bench.world.now + seconds, frame))

    def read(self, num_bytes: int) -> bytes:
        when, content = self.due.pop(0)
        if len(content) > num_bytes:
            self.due.insert(0, (when, content[num_bytes:]))
        return content[:num_bytes]


@dataclass(eq=False)
class Bench:
    """One episode's tool and its calls."""

    seed: int
    world: World
    chance: random.Random = field(init=False)
    interpreters: list[Interpreter] = field(default_factory=list)
    alarm: float | None = None
    """When the call's deadline raises."""
    is_disturbed: bool = False
    """Whether something was done to the call that runs."""
    broken: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)

    def happens(self, probability: float) -> bool:
        return self.chance.random() < probability

    def start(self, _program: str) -> Interpreter:
        if self.happens(0.05):
            self.is_disturbed = True
            raise SandboxError("bwrap: no space")
        self.interpreters.append(Interpreter(self, len(self.interpreters) + 1))
        return self.interpreters[-1]

    def play(self) -> None:
        episode = worker._Surroundings(copy(_classes()))
        self._ask(episode, "open")
        for serial in range(1, _CALLS + 1):
            num_started, self.is_disturbed, began = len(self.interpreters), False, self.world.now
            reply = self._ask(episode, "call", code=str(serial))
            self._look(reply, serial, self.interpreters[num_started:], self.world.now - began)
            self.world.pause(self.chance.random())
        self._ask(episode, "close")
        left = [each.pid for each in self.interpreters if each.is_alive]
        if left:
            self.broken.append(f"nothing is left: interpreters {left} still run")

    def _ask(self, episode: worker._Surroundings, does: str, **arguments: str) -> dict[str, object]:
        return episode.reply({"does": does, "name": "python", "arguments": arguments}, cast("Any", None))

    def _look(self, reply: dict[str, object], serial: int, started: list[Interpreter], seconds: float) -> None:
        text = str(reply.get("text", ""))
        marks = _MARK.findall(text)
        if marks and int(marks[0]) != serial:
            self.broken.append(f"an observation belongs to its call: {marks[0]} for {serial}")
        has_failed = bool(started) and not started[-1].is_sound
        if has_failed and "lost" not in reply:
            self.broken.append(f"a machine's fault is no result: no interpreter came up, and the tool said {text!r}")
        if not marks and not has_failed and not self.is_disturbed:
            self.broken.append(f"no text loses a result: {reply}")
        if seconds > tool.START_TIMEOUT_S + 2 * _DEADLINE_S:
            self.broken.append(f"every wait ends: a call took {seconds:.0f} s")
        text.encode()


class _Selector:
    """`selectors.DefaultSelector` over the pipes of interpreters, in virtual time."""

    def __init__(self) -> None:
        self._watched: set[int] = set()

    def __enter__(self) -> _Selector:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def register(self, descriptor: int, _events: int) -> None:
        self._watched.add(descriptor)

    def unregister(self, descriptor: int) -> None:
        self._watched.discard(descriptor)

    def select(self, timeout: float) -> list[tuple[Any, int]]:
        bench = _bench()
        now, ready = bench.world.now, []
        until = now + timeout if bench.alarm is None else min(now + timeout, bench.alarm)
        for descriptor in sorted(self._watched):
            due = _interpreter(descriptor).due
            if descriptor % 2 == _GIVEN or (due and due[0][0] <= now):
                ready.append((SimpleNamespace(fd=descriptor), 0))
            elif due:
                until = min(until, due[0][0])
        if not ready:
            bench.world.pause(max(until - now, 1e-6))
            if bench.alarm is not None and bench.world.now >= bench.alarm:
                raise TimeoutError
        return ready


def _bench() -> Bench:
    found: Bench = calling_process().values["bench"]
    return found


def _interpreter(descriptor: int) -> Interpreter:
    return _bench().interpreters[descriptor // 2 - 1]


def _killed(pid: int, _number: int) -> None:
    _bench().interpreters[pid - 1].is_alive = False


@contextmanager
def _limited_time(seconds: float) -> Iterator[None]:
    """Stand for the alarm of a worker, which raises wherever its code waits."""
    bench = _bench()
    bench.alarm = bench.world.now + seconds
    try:
        yield
    finally:
        bench.alarm = None


_OS = SimpleNamespace(
    read=lambda descriptor, num_bytes: _interpreter(descriptor).read(num_bytes),
    write=lambda descriptor, content: _interpreter(descriptor).write(bytes(content)),
    set_blocking=lambda *_: None,
    killpg=_killed,
)
_SELECTORS = SimpleNamespace(
    DefaultSelector=_Selector, EVENT_READ=selectors.EVENT_READ, EVENT_WRITE=selectors.EVENT_WRITE
)


@cache
def _classes() -> worker._Classes:
    options: dict[str, JsonValue] = {
        "sandbox": "process",
        "memory_gib": 1.0,
        "disk_mib": 16,
        "max_processes": 4,
        "python": None,
    }
    task: worker.EnvironmentTask = {
        "classes": [{"path": "python.py", "name": "Python", "options": {**options, "deadline_s": _DEADLINE_S}}],
        "has_user_class": False,
        "memory_bytes": None,
        "cpu_s": None,
        "call_deadline_s": 2 * _DEADLINE_S,
    }
    with mock.patch.object(worker, "_load_class", return_value=tool.Python):
        return worker._Classes(task)


@contextmanager
def simulated_interpreters() -> Iterator[None]:
    with ExitStack() as stack:
        for place, name, value in (
            (tool, "os", _OS),
            (tool, "selectors", _SELECTORS),
            (tool, "_sandbox", lambda *_: SimpleNamespace(start=_bench().start)),
            (tool, "tree_resident_bytes", lambda _pid: 0),
            (tool, "resume_tree", lambda _pid: None),
            (tool, "stop_tree", lambda _pid: True),
            (worker, "limited_time", _limited_time),
        ):
            stack.enter_context(mock.patch.object(place, name, value))
        yield


def run_bench(seed: int) -> Bench:
    """Return the calls of one episode with what they broke."""
    world = World(seed, limit_s=_LIMIT_S)
    bench = Bench(seed, world)
    process = Process(world, "worker", host="worker")
    process.values["bench"] = bench

    def work() -> None:
        try:
            bench.play()
        except Exception as error:  # noqa: BLE001 - what would end the worker
            bench.broken.append(f"no exit 70: {type(error).__name__}: {error}")

    process.spawn(work)
    with simulated_interpreters():
        try:
            world.run()
        except StuckError as error:
            bench.broken.append(f"every wait ends: {error}")
    return bench
