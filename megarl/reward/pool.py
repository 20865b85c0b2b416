"""The processes that run the user's reward function: started, asked with a deadline, killed, replaced.

Knows nothing of rollouts: a request goes in, a `Score` or a RewardError without the sample's name comes out.
A worker is a session of its own, so that killing it takes along what the user's code has started.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from megarl.config.recipe import FunctionRewardConfig
from megarl.errors import Problem, RewardError
from megarl.reward.protocol import LENGTH, Answer, Request
from megarl.types import Score

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""For the user's imports; scoring has its own deadline in the recipe."""

_KILL_TIMEOUT_S = 10.0
_STDERR = 2


class WorkerPool:
    """At most `config.workers` processes, started when they are first needed."""

    def __init__(self, config: FunctionRewardConfig, *, log_path: Path | None = None) -> None:
        self._config = config
        self._log_path = log_path
        self._slots = asyncio.Semaphore(config.workers)
        self._idle: list[RewardWorker] = []
        self._busy: set[RewardWorker] = set()
        self._is_closed = False

    async def ask(self, request: Request) -> Score:
        """Consumes a free worker, waits for its answer; a worker that failed to give one is not used again."""
        async with self._slots:
            assert not self._is_closed, "the worker pool is closed"
            worker = self._idle.pop() if self._idle else RewardWorker(self._config, log_path=self._log_path)
            self._busy.add(worker)
            try:
                if not worker.is_ready and (problem := await worker.handshake(timeout_s=START_TIMEOUT_S)):
                    raise RewardError(problem.message)
                answer = await worker.ask(request, deadline_s=self._config.deadline_s)
                self._idle.append(worker)
            finally:
                self._busy.remove(worker)
                if worker not in self._idle:
                    worker.discard()
        if "error" in answer:
            raise RewardError(answer["error"])
        return Score(value=answer["score"], components=answer["components"], prediction=answer.get("prediction"))

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

    def __init__(self, config: FunctionRewardConfig, *, log_path: Path | None = None) -> None:
        self.is_ready = False
        self._channel, theirs = socket.socketpair()
        self._channel.setblocking(False)
        path = config.path.resolve()
        # -u: what the user's function prints is on disk even when the worker is killed.
        command = [sys.executable, "-u", "-m", "megarl.reward.worker", str(theirs.fileno()), str(path), config.name]
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
        self.is_ready = True
        return None

    async def ask(self, request: Request, *, deadline_s: float) -> Answer:
        try:
            async with asyncio.timeout(deadline_s):
                await self._send(request)
                return await self._receive()
        except TimeoutError:
            raise RewardError(
                f"gave no score within {deadline_s:g} s (reward.deadline_s); its worker is killed"
            ) from None
        except (EOFError, ConnectionError):
            raise RewardError(f"ended its worker process: it {self._last_words()}") from None

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
