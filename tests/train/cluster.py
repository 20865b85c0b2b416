"""Four processes that act as trainer ranks, forked from one that has imported Megatron.

A job is a module-level function `job(rank, world, port, *arguments)`; the first `world` processes run it together.
"""

from __future__ import annotations

import gc
import random
import socket
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Generic, TypeVar

import psutil

from megarl.system.network import LOOPBACK
from megarl.tokens import SampleColumn, assemble
from megarl.types import FloatArray, TrainBatch
from tests.processes import template
from tests.schedule import WATCH

Result = TypeVar("Result")

NUM_PROCESSES = 4
_START_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 60.0
_MAX_THREADS = 200
"""Threads of a process before all are replaced: some process groups are never freed, and each has threads of its own.
Each wakes up a hundred times a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The error of a job."""

    error: BaseException
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Done(Generic[Result]):
    value: Result


class Shares(tuple[TrainBatch, ...]):
    """A step's share of each data-parallel rank, as an argument of a job: each rank gets its own."""

    ranks_per_share: int
    """Consecutive ranks that get the same share."""

    @classmethod
    def of(cls, batches: Iterable[TrainBatch], *, ranks_per_share: int) -> Shares:
        shares = cls(batches)
        shares.ranks_per_share = ranks_per_share
        return shares


def assembled(parts: Iterable[SampleColumn | None], *, data_parallel: int | None = None) -> tuple[FloatArray, ...]:
    """Return the numbers of all samples from what the ranks returned; one rank per model replica returns some."""
    found = [part for part in parts if part is not None]
    assert data_parallel is None or len(found) == data_parallel, f"{len(found)} ranks answered, not {data_parallel}"
    return assemble(found)


class Cluster:
    def __init__(self) -> None:
        self._processes: list[ForkServerProcess] = []
        self._pipes: list[Connection] = []

    def run(self, world: int, job: Callable[..., Result], *arguments: object, timeout_s: float = 600.0) -> list[Result]:
        """Results in rank order; the first rank's error is raised here."""
        if any(num_threads(process) > _MAX_THREADS for process in self._processes):
            self.stop()
        if not self._processes:
            self._start()
        port = _free_port()
        for rank, pipe in enumerate(self._pipes[:world]):
            pipe.send((job, rank, world, port, [_own(argument, rank) for argument in arguments]))
        deadline = time.monotonic() + timeout_s
        results = []
        for rank, pipe in enumerate(self._pipes[:world]):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                self.stop()
                raise TimeoutError(f"rank {rank} did not finish {job.__name__} within {timeout_s:g} s")
            try:
                answer = pipe.recv()
            except EOFError:
                self.stop()
                raise AssertionError(f"rank {rank} died during {job.__name__}") from None
            if isinstance(answer, Failure):
                # The other ranks may be waiting for this one.
                self.stop()
                answer.error.add_note(f"in rank {rank}:\n{answer.text}")
                raise answer.error
            results.append(answer.value)
        return results

    def stop(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(_STOP_TIMEOUT_S)
            if process.is_alive():
                process.kill()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        WATCH.refuse("ranks")
        context = template()
        for _ in range(NUM_PROCESSES):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self._processes.append(process)
            self._pipes.append(ours)
        for pipe in self._pipes:
            assert pipe.poll(_START_TIMEOUT_S), f"a rank process did not start within {_START_TIMEOUT_S:g} s"
            assert pipe.recv() == "ready"


def num_threads(process: ForkServerProcess) -> int:
    return psutil.Process(process.pid).num_threads() if process.is_alive() else 0


def _own(argument: object, rank: int) -> object:
    if isinstance(argument, Shares):
        return argument[rank // argument.ranks_per_share % len(argument)]
    if isinstance(argument, list):
        return [_own(each, rank) for each in argument]
    return argument


def _serve(pipe: Connection) -> None:
    gc.freeze()  # what was imported is no garbage to look for after each job
    pipe.send("ready")
    while True:
        job, rank, world, port, arguments = pipe.recv()
        try:
            pipe.send(_Done(value=job(rank, world, port, *arguments)))
        except BaseException as error:  # noqa: BLE001 - whatever it was, the test should see it
            pipe.send(Failure(error=error, text=traceback.format_exc()))
        # Models and optimizers are in reference cycles and hold process groups, each with threads of its own.
        gc.collect()


def _free_port() -> int:
    """Return a free port below those that the system gives to connections: another test cannot get it meanwhile."""
    while True:
        port = random.randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server((LOOPBACK, port)):
            return port
