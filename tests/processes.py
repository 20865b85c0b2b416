"""Processes that are forked from a template, which has imported what they need once for all of them.

A template has done nothing else: what is forked is as clean as a new process, and seconds faster. `run_processes` and
drivers are forked from the fork server of `multiprocessing`. `ForkedCommands` are under a guard
(`megarl.system.guard`): their template forks a guard for each request, and the guard forks its command instead of
executing it. Sessions, pipes, signals and deaths are those of an executed command, and so is the mount namespace, which
is that of whoever asked. All processes of a test session share these templates (`TEMPLATES`).
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import multiprocessing
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Generic, NoReturn, TypeVar

import psutil

from megarl.env import LOCAL_RAY_ENVIRONMENT, RAY_ENVIRONMENT, engine_environment
from megarl.system import guard
from megarl.system.guard import GuardLease, die_with_parent
from tests.repository import ROOT

Result = TypeVar("Result")

_NUMBER = struct.Struct("!i")
_MOUNTS = "/proc/self/ns/mnt"
_executed = guard.start_guarded
_FORK_SERVER = "multiprocessing.forkserver"
_IMPORTED = (
    "hypothesis",
    "megarl.run.run",
    "megarl.observe.report",
    "megarl.tools.check_sync",
    "tests.train.jobs",
    "tests.checkpoint.local_run",
)
_SERVE_FORKS = """
import importlib, warnings
from multiprocessing.forkserver import main
with warnings.catch_warnings(action="ignore"):  # libraries say what they lack
    for module in {modules}:
        importlib.import_module(module)
main(*{descriptors}, [])
"""


def template() -> ForkServerContext:
    """The context whose processes are forked, from one server for all processes of tests."""
    join_fork_server()
    return multiprocessing.get_context("forkserver")


@cache
def join_fork_server() -> None:
    """Let `multiprocessing` in this process fork from the shared server, also where the product asks it to."""
    server = vars(forkserver)["_forkserver"]
    server._forkserver_address = template_address(_FORK_SERVER)
    server._forkserver_alive_fd = os.pipe()[1]  # the server's own is with the process that started it
    server.ensure_running = resource_tracker.ensure_running


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
        # Not printed: it may be what the test waits for. Else it is shown where `get` raises it.
        error.add_note(f"in a process of its own:\n{traceback.format_exc()}")
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
    mounts = os.open(_MOUNTS, os.O_RDONLY)
    socket.send_fds(connection, [_NUMBER.pack(len(request))], [mounts, *descriptors])
    os.close(mounts)
    connection.sendall(request)
    return connection


def receive_request(connection: socket.socket) -> Request:
    """Receive what the process shall be; this one enters the mount namespace of whoever asked."""
    content, (mounts, *descriptors), _, _ = socket.recv_fds(connection, _NUMBER.size, 4)
    if os.fstat(mounts).st_ino != Path(_MOUNTS).stat().st_ino:
        assert ctypes.CDLL(None).setns(mounts, 0) == 0
    os.close(mounts)
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


class ForkedCommands:
    """Asks the template at `address` for commands under a guard; `start_guarded` is in place of that of `guard`.

    `refuse` raises where a test must not start one.
    """

    def __init__(self, address: bytes, module: str, refuse: Callable[[str], None] = lambda _: None) -> None:
        self.address = address
        self._module = module
        self._refuse = refuse

    def start_guarded(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        output: IO[bytes] | int,
        lease: GuardLease | None = None,
    ) -> subprocess.Popen[bytes] | ForkedGuard:
        if list(command[1:3]) != ["-m", self._module]:
            return _executed(command, environment=environment, output=output, lease=lease)
        self._refuse(self._module)
        words = [] if lease is None else ["--lease", str(lease.folder), str(lease.seconds)]
        guard_stdin, our_stdin = os.pipe()
        our_stdout, guard_stdout = os.pipe() if output == subprocess.PIPE else (None, _descriptor(output))
        descriptors = [guard_stdin, guard_stdout]
        status = asked(self.address, [*words, *command[3:]], environment, descriptors=descriptors)
        os.close(guard_stdin)
        stdout = None
        if our_stdout is not None:
            os.close(guard_stdout)
            stdout = os.fdopen(our_stdout, "rb")
        return ForkedGuard(stdin=os.fdopen(our_stdin, "wb", buffering=0), stdout=stdout, status=status)


def _descriptor(output: IO[bytes] | int) -> int:
    return output if isinstance(output, int) else output.fileno()


TEMPLATES: dict[str, str] = {}
"""Addresses of the templates that this process shares with others, in hexadecimal digits, by their script.

A script calls `serve_guards`, or is the fork server. Empty until the first address is asked for, unless another process
has started them."""


def template_address(script: str) -> bytes:
    """Return where the template with a script answers."""
    if not TEMPLATES:
        listen_for_templates()
    return bytes.fromhex(TEMPLATES[script])


def listen_for_templates() -> None:
    """Let each template begin with its first request, and end with this process."""
    environments = {
        "tests.engine.template": engine_environment(device="cpu", tensor=1, interface=None),
        "tests.cluster.worker_setup": {**os.environ, "PYTHONPATH": path_of(os.environ)},
        # Ray reads its environment when it is imported.
        _FORK_SERVER: {**os.environ, **RAY_ENVIRONMENT, **LOCAL_RAY_ENVIRONMENT, "PYTHONPATH": path_of(os.environ)},
    }
    listeners = {listening_socket(): script for script in environments}
    TEMPLATES.update({script: listener.getsockname().hex() for listener, script in listeners.items()})
    alive, _ = os.pipe()  # the fork server ends when the other end is closed, with this process

    def start_when_asked() -> NoReturn:
        # This thread does not end: a template ends with the thread that started it.
        begun = []
        while True:
            for listener in select.select(list(listeners), [], [])[0]:
                script = listeners.pop(listener)
                with listener:
                    descriptors, words = [listener.fileno()], ["-m", script, "serve", str(listener.fileno())]
                    if script == _FORK_SERVER:
                        descriptors.append(alive)
                        words = ["-c", _SERVE_FORKS.format(modules=_IMPORTED, descriptors=descriptors)]
                    process = subprocess.Popen(
                        [sys.executable, *words],
                        cwd=ROOT,
                        env=environments[script],
                        pass_fds=descriptors,
                        start_new_session=True,
                    )
                begun.append(process)

    threading.Thread(target=start_when_asked, daemon=True).start()


def path_of(environment: Mapping[str, str]) -> str:
    """Return the variable PYTHONPATH of processes that import tests."""
    return os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])


class ForkedGuard:
    """A guard that a template has forked, with the methods of `subprocess.Popen` that its users call."""

    def __init__(self, *, stdin: IO[bytes], stdout: IO[bytes] | None, status: socket.socket) -> None:
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


def serve_guards(module: str, *, load: Callable[[], None], program: Callable[[], int]) -> NoReturn:
    """Be a template: import everything, then fork a guard for each connection, which forks the program."""
    die_with_parent(os.getppid())
    listener = socket.socket(fileno=int(sys.argv[2]))
    shown = warnings.showwarning
    vars(warnings)["showwarning"] = lambda *_, **__: None  # libraries say what they lack
    load()
    vars(warnings)["showwarning"] = shown
    # It finds at its first call where the command line is, by the place of the variables that are there now.
    name_process(sys.argv)
    fork_for_each(listener, partial(_wait_for_guard, module, program))


def _wait_for_guard(module: str, program: Callable[[], int], connection: socket.socket) -> int:
    """Fork a guard and send its process id, and its exit code when it has ended."""
    request = receive_request(connection)
    pid = os.fork()
    if pid == 0:
        connection.close()
        end_with(partial(_guard, request, module, program))
    request.close()
    send_number(connection, pid)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    # Whoever asked may have ended.
    with suppress(OSError):
        send_number(connection, code)
    return 0


def _guard(request: Request, module: str, program: Callable[[], int]) -> int:
    """Be the guard of a command that is forked."""
    os.setsid()
    stdin, stdout = request.descriptors
    request.enter(stdin, stdout, stdout)
    name_process(["-m", guard.__name__, sys.executable, "-m", module, *request.words])
    vars(guard)["subprocess"] = SimpleNamespace(
        Popen=partial(_ForkedCommand, module, program), DEVNULL=subprocess.DEVNULL
    )
    return guard.main(request.words)


class _ForkedCommand:
    """The command, for its guard."""

    def __init__(
        self,
        module: str,
        program: Callable[[], int],
        arguments: list[str],
        *,
        stdin: int,
        preexec_fn: Callable[[], None],
    ) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            assert stdin == subprocess.DEVNULL
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            preexec_fn()
            vars(guard)["subprocess"] = subprocess  # what it starts is executed
            sys.argv = [module, *arguments]
            name_process(["-m", module, *arguments])
            end_with(program)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)


def command_of(process: psutil.Process) -> str:
    """The command line of a process that was found; nothing, if it has ended since then."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def name_process(words: list[str]) -> None:
    """Give this process the command line that it would have if it had been executed."""
    from setproctitle import setproctitle

    setproctitle(" ".join([sys.executable, *words]))
