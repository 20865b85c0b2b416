"""Processes that Ray has placed somewhere, as the operating system of their node knows them.

Ray ends an actor by asking it to, which a frozen one does not hear. A number that the system has given to another
process since is not mistaken for the old one.
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
"""For Ray to start a process on another node that looks, or kills, there."""
_STATES = {
    "R": "it computes, and does not let Python run",
    "S": "it waits, and does not let Python run",
    "D": "it waits for a disk or a device that does not answer",
    "T": "it is stopped (SIGSTOP)",
    "t": "it is stopped by a debugger",
    ZOMBIE: "it is dead",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteProcess:
    node: str
    """Ray's name for it."""
    pid: int
    started: int
    """In clock ticks since the node was started: with the number, a name that is never given again."""


def this_process() -> RemoteProcess:
    pid = os.getpid()
    return RemoteProcess(node=_own_node(), pid=pid, started=read_stat(pid).started)


async def describe(where: RemoteProcess) -> str:
    """What the system says of a process that does not answer, as the end of a sentence."""
    state = await _on_its_node(where, _state)
    return "it is gone" if state is None else _STATES.get(state, f"its state is {state}")


async def end(where: RemoteProcess, *, grace_s: float, timeout_s: float) -> bool:
    """Kill it unless it leaves within `grace_s`; whether it is gone then."""
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
    """The letter of the process's state; None when there is no such process any more."""
    try:
        process = read_stat(where.pid)
    except (FileNotFoundError, ProcessLookupError):
        return None
    return process.state if process.started == where.started else None
