"""Processes that run a user's code: started with limits, sent requests in JSON, killed with all that they have started.

This is the side that starts them; `user_worker` is the other one. A message is its length and a JSON object in UTF-8.
The worker sends the first one: `sources`, the digests of the files that it imported, and facts about the code, or `key`
and `error` of code that cannot be loaded. After that one reply follows each request and repeats its id: a reply to
another request is not taken for its own. Each process has a mark in its environment, by which all that the user's code
has started is found and killed with it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO
from uuid import uuid4

from megarl.env import USER_WORKER, current_environment
from megarl.errors import Problem, RewardError
from megarl.system.proc import kill_marked, read_stat

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""Limit on the user's imports; requests have their own deadline in the recipe."""
LENGTH = struct.Struct("!I")
MAX_MESSAGE_BYTES = 16 << 20
MAX_LOG_BYTES = 64 << 20
"""Limit of the log of the workers on a node: half of it in the file, the half before in another one, `.1`."""
_LOG_CHUNK_BYTES = 1 << 16
_READ_BYTES = 1 << 16  # most messages are read at once, with their length
_KILL_TIMEOUT_S = 10.0
_STDERR = 2
_log_lock = threading.Lock()
"""Held while a chunk is written: workers share a log."""


class UserLoadError(Exception):
    """The user's code cannot be loaded."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


class NoReplyError(Exception):
    """A process did not reply, and is of no further use; the message is a predicate."""


class LateReplyError(NoReplyError):
    """The deadline passed; `cpu_s` is the time that the process computed until then."""

    def __init__(self, message: str, *, cpu_s: float) -> None:
        super().__init__(message)
        self.cpu_s = cpu_s


class CpuLimitError(NoReplyError):
    """The kernel ended the process at its limit of CPU time."""


class ForeignReplyError(NoReplyError):
    """The process sent something that is no reply to the request."""

    def __init__(self, reason: object) -> None:
        super().__init__(
            f"got an answer that is not its own ({reason}): the code forks, or writes to its worker's channel"
        )


class UserProcess:
    """One process of `python -m module SOCKET TASK`. `load` is called first."""

    def __init__(
        self,
        module: str,
        task: Mapping[str, object],
        *,
        log_path: Path | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.report: dict[str, object] = {}
        """The first message of a worker that has loaded the code."""
        self.num_uses = 0
        self.is_whole = True
        """Every request so far got its reply: the process may be used again."""
        self._num_requests = 0
        self._channel, theirs = socket.socketpair()
        self._channel.setblocking(False)
        self._received = b""
        self._mark = uuid4().hex
        # -u: the output is in the log even if the worker is killed.
        arguments = (str(theirs.fileno()), json.dumps(task))
        self._process = subprocess.Popen(  # noqa: S603 - our own module, no shell
            [sys.executable, "-u", "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=_STDERR if log_path is None else subprocess.PIPE,
            stderr=_STDERR if log_path is None else subprocess.STDOUT,
            pass_fds=(theirs.fileno(), *pass_fds),
            env={**current_environment(), USER_WORKER.name: self._mark},
            start_new_session=True,
        )
        theirs.close()
        if log_path is not None:
            assert self._process.stdout is not None
            writing = partial(_write_log, self._process.stdout, log_path)
            threading.Thread(target=writing, name="user-log", daemon=True).start()
        logger.debug("started %s pid=%d", module, self._process.pid)

    @property
    def cpu_s(self) -> float:
        """CPU time that the process has used; 0 for one that is gone."""
        with suppress(OSError):
            return read_stat(self._process.pid).cpu_s
        return 0.0

    async def load(self, *, section: str, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until the worker has loaded the code; a UserLoadError, with a key of the section, if it cannot."""
        try:
            async with asyncio.timeout(timeout_s):
                report = _report(await self._receive())
        except TimeoutError:
            message = f"importing it took longer than {timeout_s:g} s"
            raise UserLoadError(Problem(key=f"{section}.path", message=message)) from None
        except (EOFError, ConnectionError, ValueError, RecursionError):
            message = f"importing it ended the process: it {self._exit_reason()}"
            raise UserLoadError(Problem(key=f"{section}.path", message=message)) from None
        if "error" in report:
            raise UserLoadError(Problem(key=f"{section}.{report['key']}", message=str(report["error"])))
        self.report = report

    async def ask(self, request: Mapping[str, object], *, timeout_s: float) -> dict[str, object]:
        """Return the reply to a request; a NoReplyError if there is none."""
        self._num_requests += 1
        self.is_whole, began_cpu_s = False, self.cpu_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._send({"id": self._num_requests, **request})
                reply: object = json.loads(await self._receive())
        except TimeoutError:
            raise LateReplyError(f"gave no answer within {timeout_s:g} s", cpu_s=self.cpu_s - began_cpu_s) from None
        except (EOFError, ConnectionError):
            reason = self._exit_reason()
            error = CpuLimitError if self._process.returncode == -signal.SIGXCPU else NoReplyError
            raise error(f"ended its worker process: it {reason}") from None
        except (ValueError, RecursionError) as no_json:
            raise ForeignReplyError(no_json) from None
        if not isinstance(reply, dict) or reply.get("id") != self._num_requests:
            raise ForeignReplyError("it belongs to another request")
        self.is_whole = True
        return reply

    def discard(self) -> None:
        """Kill the process and close the channel. No other task may be waiting on the channel."""
        self.kill()
        self._channel.close()

    def kill(self) -> None:
        if self._process.returncode is not None:
            return
        kill_marked(USER_WORKER.name, self._mark)
        try:
            self._process.wait(_KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            logger.warning("worker pid=%d survived SIGKILL seconds=%g", self._process.pid, _KILL_TIMEOUT_S)

    def _exit_reason(self) -> str:
        """End the process and return how it ended."""
        # A process that has exited keeps its status; the signal only ends what it has started.
        self.kill()
        code = self._process.returncode or 0
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"

    async def _send(self, message: Mapping[str, object]) -> None:
        payload = json.dumps(message).encode()
        await asyncio.get_running_loop().sock_sendall(self._channel, LENGTH.pack(len(payload)) + payload)

    async def _receive(self) -> bytes:
        """Return the next message; raise EOFError or ConnectionError if there is none."""
        (size,) = LENGTH.unpack(await self._read(LENGTH.size))
        if size > MAX_MESSAGE_BYTES:
            # The user's code may have written to the channel.
            raise ConnectionError
        return await self._read(size)

    async def _read(self, num_bytes: int) -> bytes:
        while (num_missing := num_bytes - len(self._received)) > 0:
            chunk = await asyncio.get_running_loop().sock_recv(self._channel, max(num_missing, _READ_BYTES))
            if not chunk:
                raise EOFError
            self._received += chunk
        read, self._received = self._received[:num_bytes], self._received[num_bytes:]
        return read


def _report(content: bytes) -> dict[str, object]:
    """Return the first message of a worker; a ValueError if it is none: code may write to the channel on import."""
    report: object = json.loads(content)
    if not isinstance(report, dict) or not (isinstance(report.get("sources"), dict) or {"key", "error"} <= set(report)):
        raise ValueError("no report")
    return report


async def try_loading(
    module: str,
    task: Mapping[str, object],
    *,
    section: str,
    timeout_s: float = START_TIMEOUT_S,
    log_path: Path | None = None,
) -> Mapping[str, object]:
    """Start one process; return its report, or raise a UserLoadError."""
    process = UserProcess(module, task, log_path=log_path)
    try:
        await process.load(section=section, timeout_s=timeout_s)
    finally:
        process.discard()
    return process.report


class UserPool:
    """At most `workers` processes, started on demand and replaced after `uses_per_worker` uses."""

    def __init__(
        self,
        module: str,
        task: Mapping[str, object],
        *,
        section: str,
        workers: int,
        uses_per_worker: int,
        log_path: Path | None = None,
    ) -> None:
        self._module = module
        self._task = task
        self._section = section
        self._uses_per_worker = uses_per_worker
        self._log_path = log_path
        self._slots = asyncio.Semaphore(workers)
        self._idle: list[UserProcess] = []
        self._busy: set[UserProcess] = set()
        self._sources = SourceWatch()
        self.is_closed = False

    async def take(self) -> UserProcess:
        """Wait for a free place; return a process that has loaded the code, for `give` to take back.

        Raises a UserLoadError, and a RewardError for a file that has changed.
        """
        await self._slots.acquire()
        process = None
        try:
            # Running workers have the old code, new ones would have the new.
            refuse_change(self._sources.changed())
            if self.is_closed:
                raise NoReplyError("has no worker process: the run is over")
            process = self._idle.pop() if self._idle else UserProcess(self._module, self._task, log_path=self._log_path)
            self._busy.add(process)
            if not process.report:
                await process.load(section=self._section)
                refuse_change(self._sources.note(process.report["sources"]))
        except BaseException:
            self._drop(process)
            raise
        return process

    def give(self, process: UserProcess, *, is_usable: bool, num_uses: int = 1) -> None:
        """Take a process back, after some uses; one that is not usable is killed."""
        process.num_uses += num_uses
        if self.is_closed or not is_usable or process.num_uses >= self._uses_per_worker:
            self._drop(process)
            return
        self._busy.remove(process)
        self._idle.append(process)
        self._slots.release()

    def _drop(self, process: UserProcess | None) -> None:
        if process is not None:
            self._busy.discard(process)
            process.discard()
        self._slots.release()

    def close(self) -> None:
        """Kill every process, busy or idle, and what it has started. May be called twice."""
        self.is_closed = True
        for process in self._idle:
            process.discard()
        self._idle.clear()
        for process in self._busy:
            # The caller that waits for it reads the end of the channel and gives it back.
            process.kill()


@dataclass(slots=True, kw_only=True)
class _Source:
    digest: str
    mark: tuple[int, int] | None
    """Modification time and size: cheaper to compare than the digest. None if the file is gone."""


class SourceWatch:
    """The files that workers have imported: a change of one would make old and new workers differ."""

    def __init__(self) -> None:
        self._sources: dict[str, _Source] = {}

    def note(self, digests: object) -> str | None:
        """Take the files of a worker; return the path of one that another worker has loaded differently."""
        assert isinstance(digests, dict)
        for path, digest in digests.items():
            if self._sources.setdefault(path, _Source(digest=digest, mark=_mark(path))).digest != digest:
                return str(path)
        return None

    def changed(self) -> str | None:
        """Return the path of a file that has changed since it was loaded."""
        for path, source in self._sources.items():
            mark = _mark(path)
            if mark == source.mark:
                continue
            if mark is None or hashlib.sha256(Path(path).read_bytes()).hexdigest() != source.digest:
                return path
            source.mark = mark
        return None


def refuse_change(path: str | None) -> None:
    if path is not None:
        raise RewardError(
            f"{path} changed during the run; scores before and after would not be comparable: start the run again"
        )


def _mark(path: str) -> tuple[int, int] | None:
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _write_log(output: IO[bytes], path: Path) -> None:
    """Append a worker's output to the log until its last writer is gone; beyond the limit the oldest part is dropped.

    Output that a full disk does not take is lost: unread, it would block the worker.
    """
    with output:
        while chunk := os.read(output.fileno(), _LOG_CHUNK_BYTES):
            with suppress(OSError), _log_lock:
                if path.exists() and path.stat().st_size + len(chunk) > MAX_LOG_BYTES // 2:
                    path.replace(path.with_name(f"{path.name}.1"))
                with path.open("ab", buffering=0) as log:
                    log.write(chunk)
