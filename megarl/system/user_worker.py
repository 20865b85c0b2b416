"""The inside of a `UserProcess`: its channel, its limits, the user's file. Standard library only.

A worker starts in the time that the user's own imports take.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import resource
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

from megarl.env import USER_WORKER
from megarl.system.proc import kill_marked
from megarl.system.user_process import LENGTH


class UserError(Exception):
    """The user's code cannot be loaded; `key` is the key of the recipe's section to change."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


class WorkerChannel:
    """The messages with the process that started this one, from the command line `SOCKET TASK`."""

    def __init__(self) -> None:
        descriptor, task = sys.argv[1:]
        self.task: dict[str, object] = json.loads(task)
        self._socket = socket.socket(fileno=int(descriptor))
        # Processes that the user's code starts must not inherit the channel.
        self._socket.set_inheritable(False)
        threading.Thread(target=_exit_with_parent, args=(self._socket,), daemon=True).start()

    def send(self, message: Mapping[str, object]) -> None:
        payload = json.dumps(message).encode()
        self._socket.sendall(LENGTH.pack(len(payload)) + payload)

    def receive(self) -> dict[str, object] | None:
        """Return the next message; None if the other side has closed the channel."""
        header = self._socket.recv(LENGTH.size, socket.MSG_WAITALL)
        if len(header) < LENGTH.size:
            return None
        (size,) = LENGTH.unpack(header)
        asked: dict[str, object] = json.loads(self._socket.recv(size, socket.MSG_WAITALL))
        return asked


def _exit_with_parent(channel: socket.socket) -> None:
    """Kill all that this worker has started, and itself, when the parent closes the channel.

    A worker that computes would not notice.
    """
    poll = select.poll()
    poll.register(channel, select.POLLRDHUP)
    poll.poll()
    kill_marked(USER_WORKER.name, USER_WORKER.read())
    os.killpg(os.getpgrp(), signal.SIGKILL)


def limit_memory(num_bytes: int | None) -> None:
    if num_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, resource.RLIM_INFINITY))


def grant_cpu(cpu_s: int | None) -> None:
    """Set the CPU limit of one request: the kernel counts from the start of the process."""
    if cpu_s is not None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        limit = math.ceil(usage.ru_utime + usage.ru_stime) + cpu_s
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


def import_file(path: Path, *, name: str) -> ModuleType:
    """Return the user's module; a UserError with the key `path` if importing it fails."""
    # Last: files in the user's folder can be imported but do not hide installed packages.
    sys.path.append(str(path.parent))
    loader = SourceFileLoader(name, str(path))
    spec = spec_from_loader(name, loader)
    assert spec is not None, f"no module spec for {path}"
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except BaseException as error:
        # The user's code may raise anything, SystemExit too.
        raise UserError("path", f"importing it {describe(error, path)}") from error
    return module


def sources(path: Path) -> Iterator[tuple[str, str]]:
    """Yield path and digest of the file and of its imports from the same folder, installed packages excepted."""
    files = {path}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.endswith(".py") or "site-packages" in file:
            continue
        if Path(file).is_relative_to(path.parent) and not Path(file).is_relative_to(sys.base_prefix):
            files.add(Path(file))
    for file in sorted(files):
        yield str(file), hashlib.sha256(file.read_bytes()).hexdigest()


def describe(error: BaseException, path: Path, *, memory_key: str = "memory_gib") -> str:
    """Return the error and the last line of the user's file in its traceback."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        frames.append((error.filename or "", error.lineno))
    own = [frame for frame in frames if frame[0] == str(path)]
    file, line = (own or frames)[-1]
    message = str(error).strip().partition("\n")[0][:500]
    if isinstance(error, MemoryError):
        message = message or f"the limit is {memory_key}"
    return f"raised {type(error).__name__}{f': {message}' if message else ''} ({file}:{line})"
