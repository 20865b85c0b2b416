"""The process that runs a reward function: `python -m megarl.reward.worker SOCKET TASK`.

Standard library only: a worker starts in the time that the user's own imports take. Whatever the user's code does, the
answer is a score or an error.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeAlias, cast

from megarl.reward.protocol import ARGUMENTS, CLASSIC, Answer, WorkerTask, check_result, type_name
from megarl.system.faults import reach
from megarl.system.user_code import describe_error, near_name
from megarl.system.user_worker import LoadedCode, Reply, UserError, finished, load_module, serve

_UserFunction: TypeAlias = Callable[..., object]


def _load(values: Mapping[str, object]) -> LoadedCode:
    task = cast("WorkerTask", values)
    path = Path(task["path"])
    function, names = _load_function(path, task)

    def reply(request: Mapping[str, object], runner: asyncio.Runner) -> Reply:
        samples = cast("list[dict[str, object]]", request["samples"])
        return {"answers": _answers(function, samples, task, runner)}

    return LoadedCode(files=(path,), report={"names": names}, reply=reply)


def _load_function(path: Path, task: WorkerTask) -> tuple[_UserFunction, list[str]]:
    """Return the function with its options, and the arguments that it takes."""
    module, name = load_module(path, name="megarl_user_reward"), task["name"]
    function: object = getattr(module, name, None)
    if function is None:
        raise UserError("name", f"{path} has no function {name}{near_name(module, name)}")
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


def _answers(
    function: _UserFunction, samples: list[dict[str, object]], task: WorkerTask, runner: asyncio.Runner
) -> list[Answer]:
    try:
        if task.get("scores_groups"):
            results = _as_list(_call(partial(function, samples), runner), len(samples))
        else:
            results = [_call(partial(function, **sample), runner) for sample in samples]
    except BaseException as error:  # noqa: BLE001 - the user's code may raise anything, SystemExit too
        failed: Answer = {"error": describe_error(error, Path(task["path"]), memory_key="reward.memory_gib")}
        if getattr(error, "is_machine_fault", False):
            failed["is_machine_fault"] = True
        return [failed for _ in samples]
    answers = [check_result(result, task["weights"]) for result in results]
    return [{"error": f"{each['error']} ({_place(function)})"} if "error" in each else each for each in answers]


def _call(call: Callable[[], object], runner: asyncio.Runner) -> object:
    return math.nan if reach("scoring") == "nan" else finished(call, runner)


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


if __name__ == "__main__":
    serve(_load)
