"""The process that runs the user's reward function: `python -m megarl.reward.worker SOCKET FILE FUNCTION`.

Imports the file, says so, then answers one request after the other. Standard library only: a worker starts in the
time the user's own imports take. Whatever the user's code does, the answer is a score or a sentence about it.
"""

from __future__ import annotations

import asyncio
import difflib
import inspect
import json
import math
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

from megarl.reward.protocol import LENGTH, Answer, Request

_MODULE = "megarl_user_reward"
_REQUIRED = ("data_source", "solution_str", "ground_truth")
_OPTIONAL = "extra_info"
_PREDICTION = "prediction"

_UserFunction: TypeAlias = Callable[..., object]


def serve(channel: socket.socket, path: Path, name: str) -> None:
    """Answer until the other side hangs up."""
    threading.Thread(target=_die_with_parent, args=(channel,), daemon=True).start()
    try:
        function = _load(path, name)
    except UserError as error:
        _send(channel, {"key": error.key, "error": str(error)})
        return
    _send(channel, {})
    with asyncio.Runner() as runner:
        while (request := _receive(channel)) is not None:
            _send(channel, _answer(function, request, path, runner))


class UserError(Exception):
    """The function cannot be had; `key` is the one of the recipe's `reward` section that leads to it."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


def _load(path: Path, name: str) -> _UserFunction:
    module = _import(path)
    function: object = getattr(module, name, None)
    if function is None:
        near = difflib.get_close_matches(name, vars(module), n=1)
        raise UserError("name", f"{path} has no function {name}" + (f"; did you mean {near[0]}?" if near else ""))
    if not callable(function):
        raise UserError("name", f"{name} in {path} is a {_type_name(function)}, not a function")
    if _takes(function, *_REQUIRED, _OPTIONAL):
        return function
    if _takes(function, *_REQUIRED):
        return lambda **arguments: function(**{key: arguments[key] for key in _REQUIRED})
    raise UserError(
        "name",
        f"{name}{inspect.signature(function)} in {path} cannot be called with the keywords "
        f"{', '.join(_REQUIRED)} and, if it likes, {_OPTIONAL}",
    )


def _takes(function: _UserFunction, *names: str) -> bool:
    try:
        inspect.signature(function).bind(**dict.fromkeys(names))
    except TypeError:
        return False
    except ValueError:
        # Some compiled callables do not say what they take: the first call will.
        return True
    return True


def _import(path: Path) -> ModuleType:
    # Last, so that a file beside the user's can be imported but hides nothing that is installed.
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


def _answer(function: _UserFunction, request: Request, path: Path, runner: asyncio.Runner) -> Answer:
    try:
        value = function(**request)
        if inspect.isawaitable(value):
            value = runner.run(_finish(value))
    except BaseException as error:  # noqa: BLE001 - the user's code may raise anything, SystemExit too
        return {"error": _describe(error, path)}
    return _checked(value)


async def _finish(value: Awaitable[object]) -> object:
    return await value


def _checked(value: object) -> Answer:
    """The result as numbers. Of a dict, `score` counts, other numbers are components, what is no number is left out.

    `prediction` is not a component: it is the answer found in the response, as text, and None where there is none.
    """
    results: dict[str, object] = {"score": value}
    prediction: object = None
    if isinstance(value, Mapping):
        if "score" not in value:
            return {"error": f"returned a dict without score; it has {', '.join(map(str, value)) or 'no keys'}"}
        results = {str(key): item for key, item in value.items() if key == "score" or isinstance(item, Real)}
        results.pop(_PREDICTION, None)
        prediction = value.get(_PREDICTION)
    numbers: dict[str, float] = {}
    for name, item in results.items():
        if not isinstance(item, Real):
            return {"error": f"returned a {_type_name(item)} for {name}; it must be a float, or a dict with score"}
        if not math.isfinite(item):
            return {"error": f"returned {float(item)} for {name}; it must be finite"}
        numbers[name] = float(item)
    answer: Answer = {"score": numbers.pop("score"), "components": numbers}
    match prediction:
        case None:
            return answer
        case str() | Real():
            return {**answer, "prediction": str(prediction).strip()}
        case _:
            return {"error": f"returned a {_type_name(prediction)} for {_PREDICTION}; it must be text, or None"}


def _describe(error: BaseException, path: Path) -> str:
    """What was raised, and the last line of the user's file on the way there."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        frames.append((error.filename or "", error.lineno))
    own = [frame for frame in frames if frame[0] == str(path)]
    file, line = (own or frames)[-1]
    message = str(error).strip().partition("\n")[0][:500]
    return f"raised {type(error).__name__}{f': {message}' if message else ''} ({file}:{line})"


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _send(channel: socket.socket, message: Answer) -> None:
    payload = json.dumps(message).encode()
    channel.sendall(LENGTH.pack(len(payload)) + payload)


def _receive(channel: socket.socket) -> Request | None:
    """The next request; None when the other side has hung up."""
    header = channel.recv(LENGTH.size, socket.MSG_WAITALL)
    if len(header) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(header)
    payload = channel.recv(size, socket.MSG_WAITALL)
    request: Request = json.loads(payload)
    return request


def _die_with_parent(channel: socket.socket) -> None:
    """A worker that computes does not read: this thread notices that nobody waits for it any more."""
    poll = select.poll()
    poll.register(channel, select.POLLRDHUP)
    poll.poll()
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main() -> None:
    descriptor, path, name = sys.argv[1:]
    channel = socket.socket(fileno=int(descriptor))
    # What the user's code starts must not keep the channel open.
    channel.set_inheritable(False)
    serve(channel, Path(path), name)


if __name__ == "__main__":
    main()
