"""The inside of a `UserProcess`: its channel, its limits, and the loop that replies. Standard library only.

A program of user code is `serve(load)`: `load` imports the code, and what it returns replies to requests, whatever the
user's code does.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import resource
import select
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from megarl.env import USER_WORKER
from megarl.system.proc import kill_marked
from megarl.system.user_code import describe_error, import_file, sources
from megarl.system.user_process import LENGTH

Reply = dict[str, object]


class UserError(Exception):
    """The user's code cannot be loaded; `key` is the key of the recipe's section to change."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCode:
    """The user's code, imported."""

    files: Sequence[Path]
    report: Mapping[str, object]
    """Facts about the code for the process that started this one."""
    reply: Callable[[Mapping[str, object], asyncio.Runner], Reply]
    """Returns the reply to a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedWorker:
    """A worker that has loaded and reported its code."""

    channel: WorkerChannel
    task: Mapping[str, object]
    code: LoadedCode


def start(load: Callable[[Mapping[str, object]], LoadedCode]) -> StartedWorker | None:
    """Read the command line `SOCKET TASK`, load the code and report it; None if that cannot be done.

    A task has `memory_bytes` and `cpu_s`, the limit of each request, or None for them.
    """
    descriptor, text = sys.argv[1:]
    task: dict[str, object] = json.loads(text)
    channel = WorkerChannel(int(descriptor))
    _limit_memory(task["memory_bytes"])
    try:
        code = load(task)
    except UserError as error:
        channel.send({"key": error.key, "error": str(error)})
        return None
    digests = {path: digest for file in code.files for path, digest in sources(file)}
    channel.send({"sources": digests, **code.report})
    return StartedWorker(channel=channel, task=task, code=code)


def serve(load: Callable[[Mapping[str, object]], LoadedCode]) -> None:
    """Load the code, and reply to one request after the other until the other side closes the channel."""
    started = start(load)
    if started is not None:
        serve_in_turn(started)


def serve_in_turn(started: StartedWorker) -> None:
    channel, own = started.channel, os.getpid()
    with asyncio.Runner() as runner:
        while (request := channel.receive()) is not None:
            _grant_cpu(started.task["cpu_s"])
            reply = started.code.reply(request, runner)
            if os.getpid() != own:
                # The user's code forked, and the child returned here too: the parent replies.
                os._exit(0)
            channel.send({"id": request["id"], **reply})


def load_module(path: Path, *, name: str) -> ModuleType:
    """Return the user's module; a UserError with the key `path` if importing it fails."""
    try:
        return import_file(path, name=name)
    except BaseException as error:
        # The user's code may raise anything, SystemExit too.
        raise UserError("path", f"importing it {describe_error(error, path, memory_key='memory_gib')}") from error


def finished(call: Callable[[], object], runner: asyncio.Runner) -> object:
    """Return the result of a function that may be async."""
    value = call()
    return runner.run(_finish(value)) if inspect.isawaitable(value) else value


async def _finish(value: Awaitable[object]) -> object:
    return await value


class WorkerChannel:
    """The messages with the process that started this one."""

    def __init__(self, descriptor: int) -> None:
        self.socket = socket.socket(fileno=descriptor)
        # Processes that the user's code starts must not inherit the channel.
        self.socket.set_inheritable(False)
        threading.Thread(target=_exit_with_parent, args=(self.socket,), daemon=True).start()

    def send(self, message: Mapping[str, object]) -> None:
        payload = json.dumps(message).encode()
        self.socket.sendall(LENGTH.pack(len(payload)) + payload)

    def receive(self) -> dict[str, object] | None:
        """Return the next message; None if the other side has closed the channel."""
        header = self.socket.recv(LENGTH.size, socket.MSG_WAITALL)
        if len(header) < LENGTH.size:
            return None
        (size,) = LENGTH.unpack(header)
        message: dict[str, object] = json.loads(self.socket.recv(size, socket.MSG_WAITALL))
        return message


def _exit_with_parent(channel: socket.socket) -> None:
    """Kill all that this worker has started, and itself, when the parent closes the channel.

    A worker that computes would not notice.
    """
    poll = select.poll()
    poll.register(channel, select.POLLRDHUP)
    poll.poll()
    kill_marked(USER_WORKER.name, USER_WORKER.read())
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _limit_memory(num_bytes: object) -> None:
    if isinstance(num_bytes, int):
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, resource.RLIM_INFINITY))


def _grant_cpu(cpu_s: object) -> None:
    """Set the CPU limit of one request: the kernel counts from the start of the process."""
    if isinstance(cpu_s, int):
        usage = resource.getrusage(resource.RUSAGE_SELF)
        limit = math.ceil(usage.ru_utime + usage.ru_stime) + cpu_s
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
