"""The worker processes of a reward function: started on demand, called with a deadline, killed and replaced.

Knows no rollouts: takes a request, returns a `Score` or raises an error that does not name the sample. Each worker has
a mark in its environment, by which all that the user's code has started is found and killed with it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO
from uuid import uuid4

from megarl.env import REWARD_WORKER, current_environment
from megarl.errors import Problem, RewardError, ScoreError
from megarl.reward.protocol import LENGTH, Answer, Loaded, Request, ScoringCall, WorkerTask, read_answers
from megarl.system.proc import kill_marked
from megarl.types import Score

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""Limit on the user's imports; scoring has its own deadline in the recipe."""

MAX_ANSWER_BYTES = 16 << 20
MAX_LOG_BYTES = 64 << 20
"""Limit of the log of the workers on a node: half of it in the file, the half before in another one, `.1`."""
_LOG_CHUNK_BYTES = 1 << 16
_KILL_TIMEOUT_S = 10.0
_STDERR = 2
_log_lock = threading.Lock()
"""Held while a chunk is written: workers share a log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringTask:
    """A reward function and the limits of its workers."""

    worker_task: WorkerTask
    workers: int
    deadline_s: float
    samples_per_worker: int
    late_score: float | None = None
    """Score of a sample that took too long; None makes it an error."""


@dataclass(slots=True, kw_only=True)
class _Source:
    digest: str
    mark: tuple[int, int] | None
    """Modification time and size: cheaper to compare than the digest. None if the file is gone."""


class RewardWorkerDiedError(ScoreError):
    """The worker process ended without an answer."""


class ForeignAnswerError(RewardWorkerDiedError):
    """The worker sent something that does not answer the request; it is replaced."""


class MachineFaultError(ScoreError):
    """The machine failed, not the sample: it gets no score, whatever `reward.on_error` says."""


class LateError(ScoreError):
    """The sample exceeded its deadline or its CPU time."""


class WorkerPool:
    """A `ScoringBackend` of at most `task.workers` processes, started on demand."""

    def __init__(self, task: ScoringTask, *, log_path: Path | None = None) -> None:
        self._task = task
        self._log_path = log_path
        self._slots = asyncio.Semaphore(task.workers)
        self._idle: list[RewardWorker] = []
        self._busy: set[RewardWorker] = set()
        self._sources: dict[str, _Source] = {}
        self._is_closed = False

    async def score(self, request: Request) -> Score:
        """Return the score of one sample; a ScoreError if it has none."""
        (answer,) = await self.answers([request])
        return score_of(answer)

    async def answers(self, requests: Sequence[Request]) -> list[Answer]:
        """Wait for a free worker and its answers. A worker that does not answer is replaced."""
        async with self._slots:
            self._check_sources()
            try:
                return await self._ask_twice(requests)
            except LateError as error:
                if self._task.late_score is None:
                    raise
                logger.warning("a sample got the score %g: it %s", self._task.late_score, error)
                return [{"score": self._task.late_score, "components": {}} for _ in requests]

    async def _ask_twice(self, requests: Sequence[Request]) -> list[Answer]:
        """Ask a second worker if the first one dies: its death may not be caused by the sample."""
        try:
            return await self._ask_worker(requests)
        except RewardWorkerDiedError as error:
            if self._is_closed:
                raise
            logger.warning("a sample %s; it is sent to another worker", error)
            return await self._ask_worker(requests)

    async def _ask_worker(self, requests: Sequence[Request]) -> list[Answer]:
        assert not self._is_closed, "the worker pool is closed"
        worker = self._idle.pop() if self._idle else RewardWorker(self._task, log_path=self._log_path)
        self._busy.add(worker)
        try:
            if not worker.is_ready:
                if problem := await worker.handshake(timeout_s=START_TIMEOUT_S):
                    raise RewardError(problem.message)
                self._note_sources(worker.sources)
            answers = await worker.ask(requests)
            if worker.num_asked < self._task.samples_per_worker:
                self._idle.append(worker)
        finally:
            self._busy.remove(worker)
            if worker not in self._idle:
                worker.discard()
        return answers

    def _note_sources(self, digests: dict[str, str]) -> None:
        for path, digest in digests.items():
            known = self._sources.setdefault(path, _Source(digest=digest, mark=_mark(path)))
            if known.digest != digest:
                raise RewardError(_changed(path))

    def _check_sources(self) -> None:
        """Raise if a source file changed: running workers have the old code, new ones would have the new."""
        for path, source in self._sources.items():
            mark = _mark(path)
            if mark == source.mark:
                continue
            if mark is None or hashlib.sha256(Path(path).read_bytes()).hexdigest() != source.digest:
                raise RewardError(_changed(path))
            source.mark = mark

    def close(self) -> None:
        """Kill every worker, busy or idle, and what it has started. May be called twice."""
        self._is_closed = True
        for worker in self._idle:
            worker.discard()
        self._idle.clear()
        for worker in self._busy:
            # The caller that waits for it reads the end of the channel and discards it.
            worker.kill()


class RewardWorker:
    """One worker process. `handshake` is called first."""

    def __init__(self, task: ScoringTask, *, log_path: Path | None = None) -> None:
        self.is_ready = False
        self.sources: dict[str, str] = {}
        """The digest of each file that it imported."""
        self.num_asked = 0
        self._names: list[str] = []
        """The arguments that the function takes."""
        self._task = task
        self._channel, theirs = socket.socketpair()
        self._channel.setblocking(False)
        self._mark = uuid4().hex
        # -u: the function's output is in the log even if the worker is killed.
        arguments = (str(theirs.fileno()), json.dumps(task.worker_task))
        self._process = subprocess.Popen(  # noqa: S603 - our own module, no shell
            [sys.executable, "-u", "-m", "megarl.reward.worker", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=_STDERR if log_path is None else subprocess.PIPE,
            stderr=_STDERR if log_path is None else subprocess.STDOUT,
            pass_fds=(theirs.fileno(),),
            env={**current_environment(), REWARD_WORKER.name: self._mark},
            start_new_session=True,
        )
        theirs.close()
        if log_path is not None:
            assert self._process.stdout is not None
            writing = partial(_write_log, self._process.stdout, log_path)
            threading.Thread(target=writing, name="reward-log", daemon=True).start()
        logger.debug("started reward worker pid=%d", self._process.pid)

    async def handshake(self, *, timeout_s: float) -> Problem | None:
        """Wait until the worker has loaded the function; return the problem, with the recipe's key, if it could not."""
        try:
            async with asyncio.timeout(timeout_s):
                loaded: Loaded = json.loads(await self._receive())
        except TimeoutError:
            return Problem(key="reward.path", message=f"importing it took longer than {timeout_s:g} s")
        except (EOFError, ConnectionError, ValueError):
            return Problem(key="reward.path", message=f"importing it ended the process: it {self._exit_reason()}")
        if "error" in loaded:
            return Problem(key=f"reward.{loaded['key']}", message=loaded["error"])
        self.sources, self._names = loaded["sources"], loaded["names"]
        self.is_ready = True
        return None

    async def ask(self, requests: Sequence[Request]) -> list[Answer]:
        deadline_s = self._task.deadline_s
        self.num_asked += 1
        samples = [{name: item for name, item in request.items() if name in self._names} for request in requests]
        asked: ScoringCall = {"id": self.num_asked, "samples": samples}
        try:
            async with asyncio.timeout(deadline_s):
                await self._send(asked)
                return read_answers(await self._receive(), asked)
        except (ValueError, RecursionError) as error:
            raise ForeignAnswerError(
                f"got an answer that is not its own ({error}): the function forks, or writes to its worker's channel"
            ) from None
        except TimeoutError:
            raise LateError(
                f"gave no score within {deadline_s:g} s (reward.deadline_s); its worker is killed"
            ) from None
        except (EOFError, ConnectionError):
            reason = self._exit_reason()
            if self._process.returncode == -signal.SIGXCPU:
                cpu_s = self._task.worker_task["cpu_s"]
                raise LateError(f"used more than {cpu_s} s of CPU (reward.cpu_s)") from None
            raise RewardWorkerDiedError(f"ended its worker process: it {reason}") from None

    def discard(self) -> None:
        """Kill the process and close the channel. No other task may be waiting on the channel."""
        self.kill()
        self._channel.close()

    def kill(self) -> None:
        if self._process.returncode is not None:
            return
        kill_marked(REWARD_WORKER.name, self._mark)
        try:
            self._process.wait(_KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            logger.warning("reward worker pid=%d survived SIGKILL seconds=%g", self._process.pid, _KILL_TIMEOUT_S)

    def _exit_reason(self) -> str:
        # A process that has exited keeps its status; the signal only ends what it has started.
        self.kill()
        code = self._process.returncode or 0
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"

    async def _send(self, message: ScoringCall) -> None:
        payload = json.dumps(message).encode()
        await asyncio.get_running_loop().sock_sendall(self._channel, LENGTH.pack(len(payload)) + payload)

    async def _receive(self) -> bytes:
        (size,) = LENGTH.unpack(await self._read(LENGTH.size))
        if size > MAX_ANSWER_BYTES:
            # The user's code may have written to the channel.
            raise ConnectionError
        return await self._read(size)

    async def _read(self, num_bytes: int) -> bytes:
        chunks = b""
        while len(chunks) < num_bytes:
            chunk = await asyncio.get_running_loop().sock_recv(self._channel, num_bytes - len(chunks))
            if not chunk:
                raise EOFError
            chunks += chunk
        return chunks


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


def _mark(path: str) -> tuple[int, int] | None:
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _changed(path: str) -> str:
    return f"{path} changed during the run; scores before and after would not be comparable: start the run again"


def score_of(answer: Answer) -> Score:
    """Return the score of an answer; an `error` in it is a ScoreError."""
    if "error" in answer:
        raise (MachineFaultError if answer.get("is_machine_fault") else ScoreError)(answer["error"])
    return Score(value=answer["score"], components=answer["components"], prediction=answer.get("prediction"))
