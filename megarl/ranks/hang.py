"""The explanation of a call that did not end in time: which ranks are missing, where the others wait, all stacks.

A rank captures its stacks in a thread of its own, so that this works while training hangs. A wait inside C++ shows as
the Python function that called it; for every collective that is a function of one of a few modules. Waits for NCCL do
not show so: `flight` finds them. `explain_hang` is pure; `write_report` writes the file that a person reads.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TypeAlias

import ray
import torch.distributed as dist
from ray.actor import ActorHandle

from megarl.cluster.remote_process import RemoteProcess, describe
from megarl.ranks.flight import GroupCalls, StalledCollective, ranks_at_fault

_STACKS_S = 2.0
_COLLECTIVES_S = 15.0
"""Time for a rank to write its record to a file system that all ranks write to."""
_MAX_STALLS = 3
"""Collectives in the first line of a report: one rank that is missing holds up many groups."""
_COLLECTIVES = "torch.distributed.distributed_c10d"
_TRANSFERS = ("megarl.weights.executors.group", "megarl.weights.executors.meeting")
_WAITS = (
    "megatron.core.pipeline_parallel.p2p_communication",
    "megatron.core.distributed.param_and_grad_buffer",
    "megatron.core.tensor_parallel.layers",
    *_TRANSFERS,
)
"""Modules that wait for a transfer under way: a running function of theirs is such a wait."""
_CALLERS = ("megatron.", "megarl.")
_PASSED_THROUGH = ("megarl.train.cpu", *_TRANSFERS)
_OWN_CALLS = ("watch", "stacks", "collectives", "process")
_DISPATCHERS = ("run", "run_share")
"""The functions of the host that run the method of a rank named by their argument `method`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A collective or a transfer that a rank waits in for other ranks."""

    operation: str
    """The name of the function, such as all_reduce."""
    caller: str
    """The nearest function of Megatron or megarl that called it."""
    ranks: tuple[int, ...]
    """The members; empty where they cannot be seen."""

    def __str__(self) -> str:
        among = f" of ranks {', '.join(map(str, self.ranks))}" if self.ranks else ""
        return f"{self.operation}{among} ({self.caller})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadStack:
    name: str
    lines: tuple[str, ...]
    """In the format of a traceback, the newest last."""
    place: str
    """Function, file and line of the newest frame."""
    method: str
    """The method of the rank that the thread runs; empty for a thread with another purpose."""
    wait: Wait | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStacks:
    threads: tuple[ThreadStack, ...]

    def running(self, method: str) -> ThreadStack | None:
        """Return the thread that runs the method; None before it has begun and after it is done."""
        return next((thread for thread in self.threads if thread.method == method), None)

    def wait_in(self, method: str) -> Wait | None:
        """Return the wait of the method; autograd may run backward passes and their collectives in other threads."""
        thread = self.running(method)
        if thread is None or thread.wait is not None:
            return None if thread is None else thread.wait
        waits = (thread.wait for thread in self.threads if not thread.method)
        return next((wait for wait in waits if wait is not None), None)


def capture(*homes: str) -> RankStacks:
    """Return the stacks of all threads that run no call of `_OWN_CALLS`. `homes` are the modules of the rank's host."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = (
        _stack(names.get(ident) or f"thread {ident}", frame, homes) for ident, frame in sys._current_frames().items()
    )
    return RankStacks(threads=tuple(stack for stack in stacks if stack.method not in _OWN_CALLS))


def _stack(name: str, frame: FrameType, homes: Collection[str]) -> ThreadStack:
    frames = list(_outwards(frame))
    calls = [each for each in frames if _module(each) in homes]
    return ThreadStack(
        name=name,
        lines=tuple(traceback.format_stack(frame)),
        place=_place(frame),
        method=_called(calls[-1]) if calls else "",
        wait=_wait(frames),
    )


def _called(frame: FrameType) -> str:
    name = frame.f_code.co_name
    return str(frame.f_locals["method"]) if name in _DISPATCHERS else name


def _wait(frames: list[FrameType]) -> Wait | None:
    for depth, frame in enumerate(frames):
        module = _module(frame)
        is_collective = module == _COLLECTIVES and not frame.f_code.co_name.startswith("_")
        if is_collective or (depth == 0 and module in _WAITS) or module in _TRANSFERS:
            outer = frames[depth + 1 :]
            caller = next((each for each in outer if _is_caller(_module(each))), frame)
            return Wait(operation=_operation(frame), caller=_place(caller), ranks=_ranks(frame))
    return None


def _is_caller(module: str) -> bool:
    return module.startswith(_CALLERS) and module not in _PASSED_THROUGH


def _operation(frame: FrameType) -> str:
    """Return the description that a transfer between peers carries, or the name of the collective's function."""
    variables = frame.f_locals
    what = variables.get("what") or getattr(variables.get("self"), "_what", None)
    return str(what) if _module(frame) in _TRANSFERS and what else frame.f_code.co_name


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """A rank that did not report its stacks."""

    reason: str
    """Why, as the end of a sentence."""


StacksOrSilence: TypeAlias = RankStacks | Silence


async def fetch_stacks(worker: ActorHandle, process: RemoteProcess | None) -> StacksOrSilence:
    """Return the stacks of a rank; `process` is None before its process has started."""
    try:
        async with asyncio.timeout(_STACKS_S):
            stacks: RankStacks = await worker.stacks.remote()
            return stacks
    except TimeoutError:
        if process is None:
            return Silence(reason="its process has not started")
        return Silence(reason=f"it does not answer; {await describe(process)} (pid {process.pid})")
    except ray.exceptions.RayActorError:
        return Silence(reason="it is dead")


async def fetch_collectives(worker: ActorHandle, path: Path) -> Sequence[GroupCalls] | None:
    """Return the collectives that a rank has called, which it also writes to `path`; None if it does not answer."""
    try:
        async with asyncio.timeout(_COLLECTIVES_S):
            calls: Sequence[GroupCalls] = await worker.collectives.remote(path)
            return calls
    except (TimeoutError, ray.exceptions.RayActorError, ray.exceptions.RayTaskError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class HangReport:
    missing: Mapping[int, str]
    """By rank: where it is instead of in the call."""
    waiting: Mapping[int, Wait]
    silent: frozenset[int] = frozenset()
    """The missing ranks that did not report their stacks."""
    stalls: Sequence[StalledCollective] = ()
    """The collectives that do not end, by torch's recorder."""

    @property
    def at_fault(self) -> tuple[int, ...]:
        """The ranks that hang alone; empty where all are merely slow, or wait for each other."""
        by_stacks = tuple(self.missing) if self.waiting else ()
        return tuple(sorted(self.silent)) or ranks_at_fault(self.stalls) or by_stacks

    def __str__(self) -> str:
        # Without a wait in the stacks of any rank, all are "missing" there: only the recorder tells who is.
        told = set(self.missing) if self.waiting or not self.stalls else set(self.at_fault)
        parts = [f"rank {rank} is missing: {doing}" for rank, doing in self.missing.items() if rank in told]
        by_wait: dict[str, list[int]] = {}
        for rank, wait in self.waiting.items():
            by_wait.setdefault(str(wait), []).append(rank)
        parts += [f"{_named(ranks)} in {wait}" for wait, ranks in by_wait.items()]
        parts += [str(stall) for stall in self.stalls[:_MAX_STALLS]]
        return "; ".join(parts)


def explain_hang(
    ranks: Sequence[StacksOrSilence], *, method: str, late: Sequence[int], stalls: Sequence[StalledCollective] = ()
) -> HangReport:
    """Divide the late ranks into those that wait for others and those that the others wait for."""
    missing: dict[int, str] = {}
    waiting: dict[int, Wait] = {}
    for rank in late:
        stacks = ranks[rank]
        if isinstance(stacks, Silence):
            missing[rank] = stacks.reason
            continue
        wait = stacks.wait_in(method)
        if wait is not None:
            waiting[rank] = wait
            continue
        thread = stacks.running(method)
        missing[rank] = f"it is in {thread.place}" if thread else f"it has not begun with {method}"
    silent = frozenset(rank for rank in late if isinstance(ranks[rank], Silence))
    return HangReport(missing=missing, waiting=waiting, silent=silent, stalls=stalls)


def write_report(folder: Path, role: str, method: str, headline: str, ranks: Sequence[StacksOrSilence]) -> str:
    """Write the stacks of all ranks; return where they are, or why they could not be written."""
    now = datetime.now(UTC)
    path = folder / f"hang_{now:%Y%m%dT%H%M%S}_{role}_{method}.txt"
    lines = [headline, f"written {now:%Y-%m-%d %H:%M:%S} UTC", ""]
    for rank, stacks in enumerate(ranks):
        lines += [f"==== {role} rank {rank} ====", *_describe(stacks, method), ""]
    try:
        path.write_text("\n".join(lines))
    except OSError as error:
        return f"its stacks are lost: {path} cannot be written: {error.strerror}"
    return f"all stacks are in {path}"


def _describe(stacks: StacksOrSilence, method: str) -> list[str]:
    if isinstance(stacks, Silence):
        return [f"no answer: {stacks.reason}"]
    lines = []
    # The method's own thread comes first.
    for thread in sorted(stacks.threads, key=lambda thread: (thread.method != method, not thread.method)):
        state = f"waits in {thread.wait}" if thread.wait else f"is in {thread.place}"
        lines += [f"-- thread {thread.name}{f' ({thread.method})' if thread.method else ''} {state}"]
        lines += "".join(thread.lines).splitlines()
    return lines


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} waits" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} wait"
