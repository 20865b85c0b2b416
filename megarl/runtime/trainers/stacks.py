"""Where the threads of a rank are, and which collective they wait in: read from the frames that are running.

A rank answers this from a thread of its own, so that it works while training hangs. A wait inside C++ shows as the
Python function that called it, which for every collective is a function of one of a few modules.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch.distributed as dist

_COLLECTIVES = "torch.distributed.distributed_c10d"
_WAITS = (
    "megatron.core.pipeline_parallel.p2p_communication",
    "megatron.core.distributed.param_and_grad_buffer",
    "megatron.core.tensor_parallel.layers",
    "megarl.weights.executors.group",
)
"""Modules that wait for a transfer that is under way: a function of theirs that is running itself is such a wait."""
_CALLERS = ("megatron.", "megarl.")
_PASSED_THROUGH = ("megarl.train.cpu", "megarl.weights.executors.group")
_OWN_CALLS = ("watch", "stacks", "whereabouts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """In a collective or a transfer, for other ranks."""

    operation: str
    """Such as all_reduce."""
    caller: str
    """Who wants it: the nearest function of Megatron or megarl."""
    ranks: tuple[int, ...]
    """Who takes part; empty where that cannot be seen."""

    def __str__(self) -> str:
        among = f" of ranks {', '.join(map(str, self.ranks))}" if self.ranks else ""
        return f"{self.operation}{among} ({self.caller})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadStack:
    name: str
    lines: tuple[str, ...]
    """As a traceback has them, the newest last."""
    place: str
    """The newest frame of all, as file:line and function."""
    method: str
    """What of a rank's methods it carries out; empty for a thread that has another purpose."""
    wait: Wait | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStacks:
    threads: tuple[ThreadStack, ...]

    def carrying_out(self, method: str) -> ThreadStack | None:
        """The thread that does what the driver asked for; None when it is done, or has not begun."""
        return next((thread for thread in self.threads if thread.method == method), None)

    def wait_in(self, method: str) -> Wait | None:
        """Autograd may run backward passes, and their collectives, in threads of its own."""
        doing = self.carrying_out(method)
        if doing is None or doing.wait is not None:
            return None if doing is None else doing.wait
        waits = (thread.wait for thread in self.threads if not thread.method)
        return next((wait for wait in waits if wait is not None), None)


def capture(home: str) -> RankStacks:
    """Every thread but those that wait for questions like this one. `home` is the module of the rank's methods."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = (
        _stack(names.get(ident) or f"thread {ident}", frame, home) for ident, frame in sys._current_frames().items()
    )
    return RankStacks(threads=tuple(stack for stack in stacks if stack.method not in _OWN_CALLS))


def _stack(name: str, frame: FrameType, home: str) -> ThreadStack:
    frames = list(_outwards(frame))
    methods = [each.f_code.co_name for each in frames if _module(each) == home]
    return ThreadStack(
        name=name,
        lines=tuple(traceback.format_stack(frame)),
        place=_place(frame),
        method=methods[-1] if methods else "",
        wait=_wait(frames),
    )


def _wait(frames: list[FrameType]) -> Wait | None:
    for depth, frame in enumerate(frames):
        module = _module(frame)
        is_collective = module == _COLLECTIVES and not frame.f_code.co_name.startswith("_")
        if is_collective or (depth == 0 and module in _WAITS) or module == _WAITS[-1]:
            outer = frames[depth + 1 :]
            caller = next((each for each in outer if _is_caller(_module(each))), frame)
            return Wait(operation=_operation(frame), caller=_place(caller), ranks=_ranks(frame))
    return None


def _is_caller(module: str) -> bool:
    return module.startswith(_CALLERS) and module not in _PASSED_THROUGH


def _operation(frame: FrameType) -> str:
    """Transfers between peers say what they are; a collective is the function's name."""
    inside = frame.f_locals
    what = inside.get("what") or getattr(inside.get("self"), "_what", None)
    return str(what) if _module(frame) == _WAITS[-1] and what else frame.f_code.co_name


def _ranks(frame: FrameType) -> tuple[int, ...]:
    if _module(frame) != _COLLECTIVES or not dist.is_initialized():
        return ()
    group = frame.f_locals.get("group")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        return ()
    return tuple(dist.get_process_group_ranks(group))


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _place(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return f"{frame.f_code.co_name}, {'/'.join(path.parts[-2:])}:{frame.f_lineno}"
