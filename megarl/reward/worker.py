"""The process that runs a reward function: `python -m megarl.reward.worker SOCKET TASK`.

It sets its limits, imports the file, reports that, then answers requests one by one. Standard library only: a worker
starts in the time that the user's own imports take. Whatever the user's code does, the answer is a score or an error.
"""

from __future__ import annotations

import asyncio
import difflib
import hashlib
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
import traceback
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

from megarl.env import REWARD_WORKER
from megarl.reward.protocol import (
    ARGUMENTS,
    CLASSIC,
    LENGTH,
    Answer,
    Loaded,
    ScoringCall,
    ScoringReply,
    WorkerTask,
    check_result,
    type_name,
)
from megarl.system.faults import reach
from megarl.system.proc import kill_marked

_MODULE = "megarl_user_reward"

_UserFunction: TypeAlias = Callable[..., object]


def serve(channel: socket.socket, task: WorkerTask) -> None:
    """Answer requests until the other side closes the channel."""
    threading.Thread(target=_exit_with_parent, args=(channel,), daemon=True).start()
    if task["memory_bytes"] is not None:
        resource.setrlimit(resource.RLIMIT_AS, (task["memory_bytes"], resource.RLIM_INFINITY))
    path = Path(task["path"])
    try:
        function, names = _load(path, task)
    except UserError as error:
        _send(channel, {"key": error.key, "error": str(error)})
        return
    _send(channel, {"sources": dict(_sources(path)), "names": names})
    own = os.getpid()
    with asyncio.Runner() as runner:
        while (asked := _receive(channel)) is not None:
            _grant_cpu(task["cpu_s"])
            answers = _answers(function, asked["samples"], task, runner)
            if os.getpid() != own:
                # The function forked, and the child returned here too: the parent answers.
                os._exit(0)
            _send(channel, {"id": asked["id"], "answers": answers})


def _grant_cpu(cpu_s: int | None) -> None:
    """Set the CPU limit of one request: the kernel counts from the start of the process."""
    if cpu_s is not None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        limit = math.ceil(usage.ru_utime + usage.ru_stime) + cpu_s
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


def _sources(path: Path) -> Iterator[tuple[str, str]]:
    """Yield path and digest of the file and of its imports from the same folder, installed packages excepted."""
    files = {path}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.endswith(".py") or "site-packages" in file:
            continue
        if Path(file).is_relative_to(path.parent) and not Path(file).is_relative_to(sys.base_prefix):
            files.add(Path(file))
    for file in sorted(files):
        yield str(file), hashlib.sha256(file.read_bytes()).hexdigest()


class UserError(Exception):
    """The function cannot be loaded; `key` is the key of the recipe's `reward` section to change."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


def _load(path: Path, task: WorkerTask) -> tuple[_UserFunction, list[str]]:
    """Return the function with its options, and the arguments that it takes."""
    module, name = _import(path), task["name"]
    function: object = getattr(module, name, None)
    if function is None:
        near = difflib.get_close_matches(name, vars(module), n=1)
        raise UserError("name", f"{path} has no function {name}" + (f"; did you mean {near[0]}?" if near else ""))
    if not callable(function):
        raise UserError("name", f"{name} in {path} is a {type_name(function)}, not a function")
    bound = partial(function, **task["options"])
    if task.get("scores_groups"):
        if not _accepts(bound, None):
            raise UserError(
                "name", f"{name}{inspect.signature(function)} in {path} must take one list, the samples of a group"
            )
        return bound, list(ARGUMENTS)
    names = _named(bound)
    if names and _accepts(bound, **dict.fromkeys(names)):
        return bound, names
    raise UserError(
        "name",
        f"{name}{inspect.signature(function)} in {path} cannot be called: its arguments may be, by these names, "
        f"{', '.join(ARGUMENTS)}",
    )


def _named(function: _UserFunction) -> list[str]:
    """Return the arguments of a request that the function names, all that are sent by default for `**arguments`."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:
        # Some compiled callables have no signature; the first call will show.
        return list(CLASSIC)
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return [name for name in ARGUMENTS if name in parameters or (takes_any and name in CLASSIC)]


def _accepts(function: _UserFunction, *arguments: object, **named: object) -> bool:
    try:
        inspect.signature(function).bind(*arguments, **named)
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def _import(path: Path) -> ModuleType:
    # Last: files in the user's folder can be imported but do not hide installed packages.
    sys.path.append(str(path.parent))
    loader = SourceFileLoader(_MODULE, str(path))
    spec = spec_from_loader(_MODULE, loader)
    assert spec is not None, f"no module spec for {path}"
    module = module_from_spec(spec)
    sys.modules[_MODULE] = module
    try:
        loader.exec_module(module)
    except BaseException as error:
        # The user's code may raise anything, SystemExit too.
        raise UserError("path", f"importing it {_describe(error, path)}") from error
    return module


def _answers(
    function: _UserFunction, samples: list[dict[str, object]], task: WorkerTask, runner: asyncio.Runner
) -> list[Answer]:
    try:
        if task.get("scores_groups"):
            results = _as_list(_call(partial(function, samples), runner), len(samples))
        else:
            results = [_call(partial(function, **sample), runner) for sample in samples]
    except BaseException as error:  # noqa: BLE001 - the user's code may raise anything, SystemExit too
        failed: Answer = {"error": _describe(error, Path(task["path"]))}
        if getattr(error, "is_machine_fault", False):
            failed["is_machine_fault"] = True
        return [failed for _ in samples]
    answers = [check_result(result, task["weights"]) for result in results]
    return [{"error": f"{each['error']} ({_place(function)})"} if "error" in each else each for each in answers]


def _call(call: Callable[[], object], runner: asyncio.Runner) -> object:
    value = math.nan if reach("scoring") == "nan" else call()
    return runner.run(_finish(value)) if inspect.isawaitable(value) else value


def _as_list(value: object, num_samples: int) -> list[object]:
    if not isinstance(value, list | tuple) or len(value) != num_samples:
        given = f"{len(value)} results" if isinstance(value, list | tuple) else f"a {type_name(value)}"
        raise TypeError(f"returned {given} for {num_samples} samples; return a list of one result per sample")
    return [*value]


def _place(function: _UserFunction) -> str:
    """Return file and line of the function inside partials and decorators."""
    while isinstance(function, partial):
        function = function.func
    inner = inspect.unwrap(function)
    code = getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else str(inner)


async def _finish(value: Awaitable[object]) -> object:
    return await value


def _describe(error: BaseException, path: Path) -> str:
    """Return the error and the last line of the user's file in its traceback."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        frames.append((error.filename or "", error.lineno))
    own = [frame for frame in frames if frame[0] == str(path)]
    file, line = (own or frames)[-1]
    message = str(error).strip().partition("\n")[0][:500]
    if isinstance(error, MemoryError):
        message = message or "the limit is reward.memory_gib"
    return f"raised {type(error).__name__}{f': {message}' if message else ''} ({file}:{line})"


def _send(channel: socket.socket, message: Loaded | ScoringReply) -> None:
    payload = json.dumps(message).encode()
    channel.sendall(LENGTH.pack(len(payload)) + payload)


def _receive(channel: socket.socket) -> ScoringCall | None:
    """Return the next request; None if the other side has closed the channel."""
    header = channel.recv(LENGTH.size, socket.MSG_WAITALL)
    if len(header) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(header)
    payload = channel.recv(size, socket.MSG_WAITALL)
    asked: ScoringCall = json.loads(payload)
    return asked


def _exit_with_parent(channel: socket.socket) -> None:
    """Kill all that this worker has started, and itself, when the parent closes the channel.

    A worker that computes would not notice.
    """
    poll = select.poll()
    poll.register(channel, select.POLLRDHUP)
    poll.poll()
    kill_marked(REWARD_WORKER.name, REWARD_WORKER.read())
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main() -> None:
    descriptor, task = sys.argv[1:]
    channel = socket.socket(fileno=int(descriptor))
    # Processes that the user's code starts must not inherit the channel.
    channel.set_inheritable(False)
    serve(channel, json.loads(task))


if __name__ == "__main__":
    main()
