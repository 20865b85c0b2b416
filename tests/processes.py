"""Processes that are forked from a template, which has imported torch, Megatron and Ray once for all of them.

The template has done nothing else: what is forked is as clean as a new process, and seconds faster.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Generic, TypeVar

from megarl.env import LOCAL_RAY_ENVIRONMENT, RAY_ENVIRONMENT

Result = TypeVar("Result")

_IMPORTED = ("hypothesis", "megarl.run.run", "megarl.tools.check_sync", "tests.train.jobs")


def template() -> ForkServerContext:
    """The context whose processes are forked. There is one per session: its first process starts the template."""
    # Ray reads its environment when it is imported.
    os.environ.update({**RAY_ENVIRONMENT, **LOCAL_RAY_ENVIRONMENT})
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_IMPORTED))
    return context


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(Generic[Result]):
    """What one process returned, or the error it ended with; neither, if it died."""

    value: Result | None = None
    error: BaseException | None = None
    seconds: float = 0.0
    """From the moment all processes ran to this one's end."""

    def get(self) -> Result:
        if self.error is not None:
            raise self.error
        assert self.value is not None, "the process died"
        return self.value


def run_processes(
    calls: Sequence[tuple[Callable[..., Result], tuple[object, ...]]], *, timeout_s: float = 600
) -> list[Outcome[Result]]:
    """Run each function with its arguments in a process of its own, at the same time. None outlives the call."""
    context = template()
    pipes = [context.Pipe(duplex=False) for _ in calls]
    processes = [
        context.Process(target=_call, args=(pipe[1], function, arguments), daemon=True)
        for pipe, (function, arguments) in zip(pipes, calls, strict=True)
    ]
    deadline = time.monotonic() + timeout_s
    try:
        for process, (_, child_end) in zip(processes, pipes, strict=True):
            process.start()
            child_end.close()
        return [_outcome(parent_end, deadline) for parent_end, _ in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _outcome(parent_end: Connection, deadline: float) -> Outcome[Result]:
    try:
        assert parent_end.poll(max(0.0, deadline - time.monotonic())), "a process did not end in time"
        outcome = pickle.loads(parent_end.recv_bytes())
        assert isinstance(outcome, Outcome)
        return outcome
    except EOFError:
        return Outcome()


def _call(child_end: Connection, function: Callable[..., Result], arguments: tuple[object, ...]) -> None:
    start = time.monotonic()
    try:
        outcome = Outcome(value=function(*arguments), seconds=time.monotonic() - start)
    except Exception as error:  # noqa: BLE001 - whatever it was, the test that waits for it shall see it
        traceback.print_exc()
        outcome = Outcome(error=error, seconds=time.monotonic() - start)
    # Plain pickle: multiprocessing's own would share the memory of tensors, which ends with this process.
    child_end.send_bytes(pickle.dumps(outcome))
