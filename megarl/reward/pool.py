"""The worker processes of a reward function: started on demand, called with a deadline, killed and replaced.

Knows no rollouts: takes a request, returns a `Score` or raises an error that does not name the sample.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.errors import Problem, RewardError, ScoreError
from megarl.reward.protocol import Answer, Loaded, Request, ScoringCall, WorkerTask, read_answers
from megarl.system.user_process import SourceWatch, UserProcess
from megarl.types import Score

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""Limit on the user's imports; scoring has its own deadline in the recipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringTask:
    """A reward function and the limits of its workers."""

    worker_task: WorkerTask
    workers: int
    deadline_s: float
    samples_per_worker: int
    late_score: float | None = None
    """Score of a sample that took too long; None makes it an error."""


class RewardWorkerDiedError(ScoreError):
    """The worker process ended without an answer."""


class ForeignAnswerError(RewardWorkerDiedError):
    """The worker sent something that does not answer the request; it is replaced."""


class MachineFaultError(ScoreError):
    """The machine failed, not the sample: it gets no score, whatever `reward.on_error` says."""


class LateError(ScoreError):
    """The sample exceeded its deadline or its CPU time."""

    def __init__(self, message: str, *, is_own_work: bool = True) -> None:
        """`is_own_work`: the worker computed for most of the time, rather than wait for the machine."""
        super().__init__(message)
        self.is_own_work = is_own_work


class WorkerPool:
    """A `ScoringBackend` of at most `task.workers` processes, started on demand."""

    def __init__(self, task: ScoringTask, *, log_path: Path | None = None) -> None:
        self._task = task
        self._log_path = log_path
        self._slots = asyncio.Semaphore(task.workers)
        self._idle: list[RewardWorker] = []
        self._busy: set[RewardWorker] = set()
        self._sources = SourceWatch()
        self._is_closed = False

    async def score(self, request: Request) -> Score:
        """Return the score of one sample; a ScoreError if it has none."""
        (answer,) = await self.answers([request])
        return score_of(answer)

    async def answers(self, requests: Sequence[Request]) -> list[Answer]:
        """Wait for a free worker and its answers. A worker that does not answer is replaced."""
        async with self._slots:
            # Running workers have the old code, new ones would have the new.
            if path := self._sources.changed():
                raise RewardError(_changed(path))
            try:
                return await self._ask_twice(requests)
            except LateError as error:
                if self._task.late_score is None:
                    raise
                if not error.is_own_work:
                    raise MachineFaultError(
                        f"{error}; it was hardly given a CPU, so the machine is at fault"
                    ) from error
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
                if path := self._sources.note(worker.sources):
                    raise RewardError(_changed(path))
            answers = await worker.ask(requests)
            if worker.num_samples < self._task.samples_per_worker:
                self._idle.append(worker)
        finally:
            self._busy.remove(worker)
            if worker not in self._idle:
                worker.discard()
        return answers

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
        self.num_samples = 0
        """Samples it was asked for, by which its calls are numbered."""
        self._names: list[str] = []
        """The arguments that the function takes."""
        self._task = task
        self._process = UserProcess("megarl.reward.worker", task.worker_task, log_path=log_path)

    async def handshake(self, *, timeout_s: float) -> Problem | None:
        """Wait until the worker has loaded the function; return the problem, with the recipe's key, if it could not."""
        try:
            async with asyncio.timeout(timeout_s):
                loaded: Loaded = json.loads(await self._process.receive())
        except TimeoutError:
            return Problem(key="reward.path", message=f"importing it took longer than {timeout_s:g} s")
        except (EOFError, ConnectionError, ValueError):
            return Problem(
                key="reward.path", message=f"importing it ended the process: it {self._process.exit_reason()}"
            )
        if "error" in loaded:
            return Problem(key=f"reward.{loaded['key']}", message=loaded["error"])
        self.sources, self._names = loaded["sources"], loaded["names"]
        self.is_ready = True
        return None

    async def ask(self, requests: Sequence[Request]) -> list[Answer]:
        deadline_s, before_s = self._task.deadline_s, self._process.cpu_s
        self.num_samples += len(requests)
        samples = [{name: item for name, item in request.items() if name in self._names} for request in requests]
        asked: ScoringCall = {"id": self.num_samples, "samples": samples}
        try:
            async with asyncio.timeout(deadline_s):
                await self._process.send(asked)
                return read_answers(await self._process.receive(), asked)
        except (ValueError, RecursionError) as error:
            raise ForeignAnswerError(
                f"got an answer that is not its own ({error}): the function forks, or writes to its worker's channel"
            ) from None
        except TimeoutError:
            raise LateError(
                f"gave no score within {deadline_s:g} s (reward.deadline_s); its worker is killed",
                is_own_work=self._process.cpu_s - before_s >= deadline_s / 2,
            ) from None
        except (EOFError, ConnectionError):
            reason = self._process.exit_reason()
            if self._process.signal_of_end == signal.SIGXCPU:
                cpu_s = self._task.worker_task["cpu_s"]
                raise LateError(f"used more than {cpu_s} s of CPU (reward.cpu_s)") from None
            raise RewardWorkerDiedError(f"ended its worker process: it {reason}") from None

    def discard(self) -> None:
        """Kill the process. No other task may be waiting for its answer."""
        self._process.discard()

    def kill(self) -> None:
        self._process.kill()


def _changed(path: str) -> str:
    return f"{path} changed during the run; scores before and after would not be comparable: start the run again"


def score_of(answer: Answer) -> Score:
    """Return the score of an answer; an `error` in it is a ScoreError."""
    if "error" in answer:
        raise (MachineFaultError if answer.get("is_machine_fault") else ScoreError)(answer["error"])
    return Score(
        value=answer["score"],
        components=answer["components"],
        prediction=answer.get("prediction"),
        tokens=tuple(answer["tokens"]) if "tokens" in answer else None,
    )
