"""The state and the end of a process on any node, known by pid and start time.

Ray ends an actor by a message, which a frozen one does not receive. With the start time, a pid that the system has
given to another process is not mistaken for the old one.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar, cast

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.system.proc import ZOMBIE, read_stat

Result = TypeVar("Result")

_POLL_S = 0.02
_PLACING_S = 30.0
"""Time for Ray to start a task on the node of the process."""
_STATES = {
    "R": "it is running native code and does not release the interpreter",
    "S": "it is waiting in native code and does not release the interpreter",
    "D": "it is waiting for a disk or a device",
    "T": "it is stopped (SIGSTOP)",
    "t": "it is stopped by a debugger",
    ZOMBIE: "it is dead",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteProcess:
    node: str
    """Ray's id of the node."""
    pid: int
    started: int
    """Clock ticks since the node was booted."""


def this_process() -> RemoteProcess:
    pid = os.getpid()
    return RemoteProcess(node=_own_node(), pid=pid, started=read_stat(pid).started)


async def describe(where: RemoteProcess) -> str:
    """Return the state of a process that does not answer, as the end of a sentence."""
    state = await _on_its_node(where, _state)
    return "it is gone" if state is None else _STATES.get(state, f"its state is {state}")


async def end(where: RemoteProcess, *, grace_s: float, timeout_s: float) -> bool:
    """Kill the process unless it ends within `grace_s`; return whether it is gone."""
    return await _on_its_node(where, _end, grace_s, timeout_s)


async def _on_its_node(where: RemoteProcess, function: Callable[..., Result], *arguments: object) -> Result:
    if where.node == _own_node():
        return await asyncio.to_thread(function, where, *arguments)
    task = ray.remote(num_cpus=0, max_retries=0)(function)
    strategy = NodeAffinitySchedulingStrategy(where.node, soft=False)
    reference = task.options(scheduling_strategy=strategy).remote(where, *arguments)
    async with asyncio.timeout(_PLACING_S):
        return cast("Result", await reference)


def _own_node() -> str:
    return str(ray.get_runtime_context().get_node_id())


def _end(where: RemoteProcess, grace_s: float, timeout_s: float) -> bool:
    if _is_gone_within(where, grace_s):
        return True
    with suppress(ProcessLookupError):
        os.kill(where.pid, signal.SIGKILL)
    return _is_gone_within(where, timeout_s)


def _is_gone_within(where: RemoteProcess, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while _state(where) not in (None, ZOMBIE):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _state(where: RemoteProcess) -> str | None:
    """Return the letter of the process's state; None when the process is gone."""
    try:
        process = read_stat(where.pid)
    except (FileNotFoundError, ProcessLookupError):
        return None
    return process.state if process.started == where.started else None
