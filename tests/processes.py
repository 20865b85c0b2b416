"""Processes that are forked from a template, which has imported torch, Megatron and Ray once for all of them.

The template has done nothing else: what is forked is as clean as a new process, and seconds faster.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Generic, NoReturn, TypeVar

from megarl.env import LOCAL_RAY_ENVIRONMENT, RAY_ENVIRONMENT

Result = TypeVar("Result")

_NUMBER = struct.Struct("!i")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Words, variables and descriptors of a process that is forked on request."""

    words: list[str]
    environment: dict[str, str]
    folder: str
    descriptors: list[int]

    def enter(self, *standard: int) -> None:
        """In the new process: take over standard input, output and error, the variables and the folder."""
        for number, descriptor in enumerate(standard):
            os.dup2(descriptor, number)
        self.close()
        # No more than what differs: `setproctitle` finds the place of the command line by that of the first variable.
        for name in os.environ.keys() - self.environment.keys():
            del os.environ[name]
        os.environ.update(dict(self.environment.items() - os.environ.items()))
        os.chdir(self.folder)

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


def listening_socket() -> socket.socket:
    """Return a socket for requests whose name is no file: nothing is left of it."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")  # the system chooses
    listener.listen()
    return listener


def asked(
    address: bytes, words: Sequence[str], environment: Mapping[str, str], *, descriptors: list[int]
) -> socket.socket:
    """Ask the template at `address` for a process; return the connection, on which it answers with numbers."""
    request = pickle.dumps((list(words), dict(environment), str(Path.cwd())))
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    socket.send_fds(connection, [_NUMBER.pack(len(request))], descriptors)
    connection.sendall(request)
    return connection


def receive_request(connection: socket.socket) -> Request:
    content, descriptors, _, _ = socket.recv_fds(connection, _NUMBER.size, 3)
    with connection.makefile("rb") as file:
        words, environment, folder = pickle.loads(file.read(_NUMBER.unpack(content)[0]))
    return Request(words=words, environment=environment, folder=folder, descriptors=descriptors)


def send_number(connection: socket.socket, number: int) -> None:
    connection.sendall(_NUMBER.pack(number))


def receive_number(connection: socket.socket) -> int:
    content = connection.recv(_NUMBER.size)
    assert content, "the template, or the process that it forked, has ended"
    number: int = _NUMBER.unpack(content)[0]
    return number


def fork_for_each(listener: socket.socket, program: Callable[[socket.socket], int]) -> NoReturn:
    """Run a program in a forked process for each connection; nobody waits for these processes."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.freeze()
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            end_with(partial(program, connection))
        connection.close()


def end_with(program: Callable[[], int]) -> NoReturn:
    """Run a program in a forked process and end it as the interpreter would."""
    try:
        code = program()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:  # noqa: BLE001 - the end of a process
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
