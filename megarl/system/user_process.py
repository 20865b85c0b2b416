"""A process that runs a user's code: started with limits, spoken to in JSON, killed with all that it has started.

This is the side that starts it; `user_worker` is the other one. A message is its length and a JSON object in UTF-8.
Each process has a mark in its environment, by which all that the user's code has started is found and killed with it.
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
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO
from uuid import uuid4

from megarl.env import USER_WORKER, current_environment
from megarl.system.proc import kill_marked, read_stat

logger = logging.getLogger(__name__)

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


class UserProcess:
    """One process of `python -m module SOCKET TASK`."""

    def __init__(self, module: str, task: Mapping[str, object], *, log_path: Path | None = None) -> None:
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
            pass_fds=(theirs.fileno(),),
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
    def signal_of_end(self) -> int | None:
        """The signal that ended the process; None if it runs or exited."""
        code = self._process.returncode
        return -code if code is not None and code < 0 else None

    @property
    def cpu_s(self) -> float:
        """CPU time that the process has used; 0 for one that is gone."""
        with suppress(OSError):
            return read_stat(self._process.pid).cpu_s
        return 0.0

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    async def send(self, message: Mapping[str, object]) -> None:
        payload = json.dumps(message).encode()
        await asyncio.get_running_loop().sock_sendall(self._channel, LENGTH.pack(len(payload)) + payload)

    async def receive(self) -> bytes:
        """Return the next message; raise EOFError or ConnectionError if there is none."""
        (size,) = LENGTH.unpack(await self._read(LENGTH.size))
        if size > MAX_MESSAGE_BYTES:
            # The user's code may have written to the channel.
            raise ConnectionError
        return await self._read(size)

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

    def exit_reason(self) -> str:
        """End the process and return how it ended."""
        # A process that has exited keeps its status; the signal only ends what it has started.
        self.kill()
        code = self._process.returncode or 0
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"

    async def _read(self, num_bytes: int) -> bytes:
        while (num_missing := num_bytes - len(self._received)) > 0:
            chunk = await asyncio.get_running_loop().sock_recv(self._channel, max(num_missing, _READ_BYTES))
            if not chunk:
                raise EOFError
            self._received += chunk
        read, self._received = self._received[:num_bytes], self._received[num_bytes:]
        return read


@dataclass(slots=True, kw_only=True)
class _Source:
    digest: str
    mark: tuple[int, int] | None
    """Modification time and size: cheaper to compare than the digest. None if the file is gone."""


class SourceWatch:
    """The files that workers have imported: a change of one would make old and new workers differ."""

    def __init__(self) -> None:
        self._sources: dict[str, _Source] = {}

    def note(self, digests: Mapping[str, str]) -> str | None:
        """Take the files of a worker; return the path of one that another worker has loaded differently."""
        for path, digest in digests.items():
            known = self._sources.setdefault(path, _Source(digest=digest, mark=_mark(path)))
            if known.digest != digest:
                return path
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
