"""Engines that are forked from a template, which has imported SGLang and its stand-ins once for all of them.

The import takes most of an engine's start. The template (this module, executed) forks a guard (`megarl.system.guard`)
for each request, and the guard forks its server instead of executing it: sessions, pipes, signals and deaths are those
of an executed engine. Executed engines are those of `test_an_engine_does_not_outlive_its_parent` and of whole runs
whose processes a test counts.
"""

from __future__ import annotations

import importlib
import logging
import os
import pkgutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import IO, NoReturn

from megarl.env import engine_environment
from megarl.system import guard
from megarl.system.guard import GuardLease, die_with_parent
from tests.processes import (
    Request,
    asked,
    end_with,
    fork_for_each,
    listening_socket,
    receive_number,
    receive_request,
    send_number,
)
from tests.repository import ROOT

_SERVER = ["-m", "megarl.engine.cpu"]
_executed = guard.start_guarded


class ForkedEngines:
    """Asks a template for engines; `start_guarded` is in place of that of `megarl.system.guard`."""

    def __init__(self, address: bytes) -> None:
        self.address = address

    def start_guarded(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        output: IO[bytes] | int,
        lease: GuardLease | None = None,
    ) -> subprocess.Popen[bytes] | ForkedGuard:
        if list(command[1:3]) != _SERVER or output != subprocess.PIPE:
            return _executed(command, environment=environment, output=output, lease=lease)
        self._prepare()
        guard_stdin, our_stdin = os.pipe()
        our_stdout, guard_stdout = os.pipe()
        status = asked(self.address, command[3:], environment, descriptors=[guard_stdin, guard_stdout])
        os.close(guard_stdin)
        os.close(guard_stdout)
        return ForkedGuard(
            stdin=os.fdopen(our_stdin, "wb", buffering=0), stdout=os.fdopen(our_stdout, "rb"), status=status
        )

    def _prepare(self) -> None:
        pass


class EngineTemplate(ForkedEngines):
    """The template, which begins with its first engine, or with `start`."""

    def __init__(self, refuse: Callable[[str], None]) -> None:
        super().__init__(b"")
        self._refuse = refuse
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        if self._process is not None:
            return
        with listening_socket() as listener:
            self.address = listener.getsockname()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.engine.template", str(listener.fileno())],
                cwd=ROOT,
                env=engine_environment(device="cpu", tensor=1, interface=None),
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _prepare(self) -> None:
        self._refuse("an engine")
        self.start()


class ForkedGuard:
    """A guard that the template has forked, with the methods of `subprocess.Popen` that its users call."""

    def __init__(self, *, stdin: IO[bytes], stdout: IO[bytes], status: socket.socket) -> None:
        self.stdin = stdin
        self.stdout = stdout
        self.returncode: int | None = None
        self._status = status
        self.pid = receive_number(status)

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(timeout=0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._status.settimeout(timeout)
            try:
                self.returncode = receive_number(self._status)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired("a forked guard", timeout or 0) from None
            self._status.close()
        return self.returncode

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


def _serve(listener: socket.socket) -> NoReturn:
    """The template: import everything, then fork a guard for each connection."""
    die_with_parent(os.getppid())
    _import_engine()
    # It finds at its first call where the command line is, by the place of the variables that are there now.
    _name_process(sys.argv)
    fork_for_each(listener, _wait_for_guard)


def _import_engine() -> None:
    """Import what a server and its workers import, except for what depends on the environment at that time."""
    logging.disable()  # SGLang names each model that cannot be imported here
    importlib.import_module(_SERVER[-1]).install()
    for name in ("sglang.srt.entrypoints.http_server", "sglang.launch_server"):
        importlib.import_module(name)
    models = importlib.import_module("sglang.srt.models")
    for module in pkgutil.iter_modules(models.__path__, f"{models.__name__}."):
        # Some lack a library; SGLang tries them all as well.
        with suppress(Exception):
            importlib.import_module(module.name)
    logging.disable(logging.NOTSET)
    # It reads SGLANG_EXTERNAL_MODEL_PACKAGE.
    del sys.modules["sglang.srt.models.registry"], models.registry
    del sys.modules["sglang.launch_server"]  # the server runs it as its main module


def _wait_for_guard(connection: socket.socket) -> int:
    """Fork a guard and send its process id, and its exit code when it has ended."""
    request = receive_request(connection)
    pid = os.fork()
    if pid == 0:
        connection.close()
        end_with(partial(_guard, request))
    request.close()
    send_number(connection, pid)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    # Whoever asked may have ended.
    with suppress(OSError):
        send_number(connection, code)
    return 0


def _guard(request: Request) -> int:
    """Be the guard of a server that is forked."""
    os.setsid()
    stdin, stdout = request.descriptors
    request.enter(stdin, stdout, stdout)
    arguments = request.words
    _name_process(["-m", guard.__name__, sys.executable, *_SERVER, *arguments])
    vars(guard)["subprocess"] = SimpleNamespace(Popen=_ForkedServer, DEVNULL=subprocess.DEVNULL)
    return guard.main(arguments)


class _ForkedServer:
    """The server, for its guard."""

    def __init__(self, arguments: list[str], *, stdin: int, preexec_fn: Callable[[], None]) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            assert stdin == subprocess.DEVNULL
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            preexec_fn()
            sys.argv = [_SERVER[-1], *arguments]
            _name_process([*_SERVER, *arguments])
            end_with(_run_server)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)


def _name_process(words: list[str]) -> None:
    """Give this process the command line that it would have if it had been executed."""
    from setproctitle import setproctitle

    setproctitle(" ".join([sys.executable, *words]))


def _run_server() -> int:
    import numpy as np

    from megarl.engine.server import run

    np.random.seed()  # all servers would have the template's state
    run()
    return 0


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
