"""The processes that run a reward function: started, asked with a deadline, killed, replaced.

Knows nothing of rollouts: a request goes in, a `Score` or an error without the sample's name comes out.
A worker is a session of its own, so that killing it takes along what the user's code has started.
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
from dataclasses import dataclass
from pathlib import Path

from megarl.errors import Problem, RewardError, ScoreError
from megarl.reward.protocol import LENGTH, Answer, Request, Task
from megarl.types import Score

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""For the user's imports; scoring has its own deadline in the recipe."""

MAX_ANSWER_BYTES = 16 << 20
_KILL_TIMEOUT_S = 10.0
_STDERR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringTask:
    """One function and what its workers may use."""

    task: Task
    workers: int
    deadline_s: float
    samples_per_worker: int
    late_score: float | None = None
    """Of a sample that took too long; None makes it an error."""


@dataclass(slots=True, kw_only=True)
class _Source:
    digest: str
    mark: tuple[int, int] | None
    """Changes whenever the content does, and is quicker to have."""


class RewardWorkerDiedError(ScoreError):
    """The process ended without an answer."""


class LateError(ScoreError):
    """The sample took more time than it may."""


class WorkerPool:
    """At most `workload.workers` processes, started when they are first needed."""

    def __init__(self, workload: ScoringTask, *, log_path: Path | None = None) -> None:
        self._workload = workload
        self._log_path = log_path
        self._slots = asyncio.Semaphore(workload.workers)
        self._idle: list[RewardWorker] = []
        self._busy: set[RewardWorker] = set()
        self._sources: dict[str, _Source] = {}
        self._is_closed = False

    async def ask(self, request: Request) -> Score:
        """Consumes a free worker, waits for its answer; a worker that failed to give one is not used again."""
        async with self._slots:
            self._check_sources()
            try:
                answer = await self._ask_until_answered(request)
            except LateError as error:
                if self._workload.late_score is None:
                    raise
                logger.warning("a sample counts as %g: it %s", self._workload.late_score, error)
                return Score(value=self._workload.late_score, components={})
        return score_of(answer)

    async def _ask_until_answered(self, request: Request) -> Answer:
        """A worker's death may have had nothing to do with its sample, so that another is asked, once."""
        try:
            return await self._ask_worker(request)
        except RewardWorkerDiedError as error:
            if self._is_closed:
                raise
            logger.warning("a sample %s; another worker is asked", error)
            return await self._ask_worker(request)

    async def _ask_worker(self, request: Request) -> Answer:
        assert not self._is_closed, "the worker pool is closed"
        worker = self._idle.pop() if self._idle else RewardWorker(self._workload, log_path=self._log_path)
        self._busy.add(worker)
        try:
            if not worker.is_ready:
                if problem := await worker.handshake(timeout_s=START_TIMEOUT_S):
                    raise RewardError(problem.message)
                self._note_sources(worker.sources)
            answer = await worker.ask(request)
            if worker.num_asked < self._workload.samples_per_worker:
                self._idle.append(worker)
        finally:
            self._busy.remove(worker)
            if worker not in self._idle:
                worker.discard()
        return answer

    def _note_sources(self, digests: dict[str, str]) -> None:
        for path, digest in digests.items():
            known = self._sources.setdefault(path, _Source(digest=digest, mark=_mark(path)))
            if known.digest != digest:
                raise RewardError(_changed(path))

    def _check_sources(self) -> None:
        """Workers that run keep the old code and fresh ones would take the new: scores would not be comparable."""
        for path, source in self._sources.items():
            mark = _mark(path)
            if mark == source.mark:
                continue
            if mark is None or hashlib.sha256(Path(path).read_bytes()).hexdigest() != source.digest:
                raise RewardError(_changed(path))
            source.mark = mark

    def close(self) -> None:
        """Kill every worker, busy or not, with what it has started. May be called twice."""
        self._is_closed = True
        for worker in self._idle:
            worker.discard()
        self._idle.clear()
        for worker in self._busy:
            # Whoever waits for it finds the channel's end and discards it.
            worker.kill()


class RewardWorker:
    """One process. Its handshake comes first and tells whether it has found the function."""

    def __init__(self, workload: ScoringTask, *, log_path: Path | None = None) -> None:
        self.is_ready = False
        self.sources: dict[str, str] = {}
        """By file, the digest of what it has imported."""
        self.num_asked = 0
        self._workload = workload
        self._channel, theirs = socket.socketpair()
        self._channel.setblocking(False)
        # -u: what the user's function prints is on disk even when the worker is killed.
        command = [sys.executable, "-u", "-m", "megarl.reward.worker", str(theirs.fileno()), json.dumps(workload.task)]
        log = None if log_path is None else log_path.open("ab")
        self._process = subprocess.Popen(  # noqa: S603 - our own module, no shell
            command,
            stdin=subprocess.DEVNULL,
            stdout=log or _STDERR,
            stderr=log or _STDERR,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
        theirs.close()
        if log is not None:
            log.close()
        logger.debug("started reward worker pid=%d", self._process.pid)

    async def handshake(self, *, timeout_s: float) -> Problem | None:
        """None when the user's function is there; else why it is not, under the recipe's key."""
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._receive()
        except TimeoutError:
            return Problem(key="reward.path", message=f"importing it took longer than {timeout_s:g} s")
        except (EOFError, ConnectionError):
            return Problem(key="reward.path", message=f"importing it ended the process: it {self._last_words()}")
        if "error" in answer:
            return Problem(key=f"reward.{answer['key']}", message=answer["error"])
        self.sources = answer["sources"]
        self.is_ready = True
        return None

    async def ask(self, request: Request) -> Answer:
        deadline_s = self._workload.deadline_s
        self.num_asked += 1
        try:
            async with asyncio.timeout(deadline_s):
                await self._send(request)
                return await self._receive()
        except TimeoutError:
            raise LateError(
                f"gave no score within {deadline_s:g} s (reward.deadline_s); its worker is killed"
            ) from None
        except (EOFError, ConnectionError):
            words = self._last_words()
            if self._process.returncode == -signal.SIGXCPU:
                cpu_s = self._workload.task["cpu_s"]
                raise LateError(f"used more than {cpu_s} s of CPU (reward.cpu_s)") from None
            raise RewardWorkerDiedError(f"ended its worker process: it {words}") from None

    def discard(self) -> None:
        """Kill it and forget it. Only when nobody waits on its channel."""
        self.kill()
        self._channel.close()

    def kill(self) -> None:
        if self._process.returncode is not None:
            return
        os.killpg(self._process.pid, signal.SIGKILL)
        try:
            self._process.wait(_KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            logger.warning("reward worker pid=%d outlives SIGKILL seconds=%g", self._process.pid, _KILL_TIMEOUT_S)

    def _last_words(self) -> str:
        # A process that has exited by itself keeps its status; the signal only reaps what it left.
        self.kill()
        code = self._process.returncode or 0
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"

    async def _send(self, message: Request) -> None:
        payload = json.dumps(message).encode()
        await asyncio.get_running_loop().sock_sendall(self._channel, LENGTH.pack(len(payload)) + payload)

    async def _receive(self) -> Answer:
        (size,) = LENGTH.unpack(await self._read(LENGTH.size))
        if size > MAX_ANSWER_BYTES:
            # The user's code may have written into the channel; whatever it is, it is no answer.
            raise ConnectionError
        message: Answer = json.loads(await self._read(size))
        return message

    async def _read(self, num_bytes: int) -> bytes:
        chunks = b""
        while len(chunks) < num_bytes:
            chunk = await asyncio.get_running_loop().sock_recv(self._channel, num_bytes - len(chunks))
            if not chunk:
                raise EOFError
            chunks += chunk
        return chunks


def _mark(path: str) -> tuple[int, int] | None:
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _changed(path: str) -> str:
    return f"{path} changed during the run; scores before and after would not be comparable: start the run again"


def score_of(answer: Answer) -> Score:
    """Raises a ScoreError where there is none."""
    if "error" in answer:
        raise ScoreError(answer["error"])
    return Score(value=answer["score"], components=answer["components"], prediction=answer.get("prediction"))
