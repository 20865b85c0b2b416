"""The worker processes of a reward function: requests with a deadline, sent twice if a worker dies.

Knows no rollouts: takes requests, returns an `Answer` for each or raises an error that does not name the sample.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from megarl.errors import RewardError, ScoreError
from megarl.reward.protocol import Answer, Request, WorkerTask, read_answers
from megarl.system.foreign import one_line
from megarl.system.user_process import (
    CpuLimitError,
    ForeignReplyError,
    LateReplyError,
    NoReplyError,
    UserLoadError,
    UserPool,
    UserProcess,
)
from megarl.types import Score

logger = logging.getLogger(__name__)

PROGRAM = "megarl.reward.worker"


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
        self._pool = UserPool(
            PROGRAM,
            cast("Mapping[str, object]", task.worker_task),
            section="reward",
            workers=task.workers,
            uses_per_worker=task.samples_per_worker,
            log_path=log_path,
        )

    async def answers(self, requests: Sequence[Request]) -> list[Answer]:
        """Wait for a free worker and its answers. A worker that does not answer is replaced."""
        try:
            return await self._ask_twice(requests)
        except LateError as error:
            if self._task.late_score is None:
                raise
            if not error.is_own_work:
                raise MachineFaultError(f"{error}; it was hardly given a CPU, so the machine is at fault") from error
            logger.warning("a sample got the score %g: it %s", self._task.late_score, error)
            return [{"score": self._task.late_score, "components": {}} for _ in requests]

    async def _ask_twice(self, requests: Sequence[Request]) -> list[Answer]:
        """Ask a second worker if the first one dies: its death may not be caused by the sample."""
        try:
            return await self._ask_worker(requests)
        except RewardWorkerDiedError as error:
            if self._pool.is_closed:
                raise
            logger.warning("a sample %s; it is sent to another worker", error)
            return await self._ask_worker(requests)

    async def _ask_worker(self, requests: Sequence[Request]) -> list[Answer]:
        try:
            process = await self._pool.take()
        except UserLoadError as error:
            raise RewardError(error.problem.message) from None
        is_usable = False
        try:
            answers = await self._ask(process, requests)
            is_usable = True
        finally:
            self._pool.give(process, is_usable=is_usable, num_uses=len(requests))
        return answers

    async def _ask(self, process: UserProcess, requests: Sequence[Request]) -> list[Answer]:
        deadline_s, names = self._task.deadline_s, cast("list[str]", process.report["names"])
        samples = [{name: item for name, item in request.items() if name in names} for request in requests]
        try:
            return read_answers(await process.ask({"samples": samples}, timeout_s=deadline_s), len(samples))
        except ForeignReplyError as error:
            raise ForeignAnswerError(str(error)) from None
        except LateReplyError as error:
            raise LateError(
                f"gave no score within {deadline_s:g} s (reward.deadline_s); its worker is killed",
                is_own_work=error.cpu_s >= deadline_s / 2,
            ) from None
        except CpuLimitError:
            cpu_s = self._task.worker_task["cpu_s"]
            raise LateError(f"used more than {cpu_s} s of CPU (reward.cpu_s)") from None
        except NoReplyError as error:
            raise RewardWorkerDiedError(str(error)) from None

    def close(self) -> None:
        """Kill every worker, busy or idle, and what it has started. May be called twice."""
        self._pool.close()


def score_of(answer: Answer) -> Score:
    """Return the score of an answer; an `error` in it is a ScoreError."""
    if "error" in answer:
        raise (MachineFaultError if answer.get("is_machine_fault") else ScoreError)(one_line(answer["error"]))
    return Score(
        value=answer["score"],
        components=answer["components"],
        prediction=answer.get("prediction"),
        tokens=tuple(answer["tokens"]) if "tokens" in answer else None,
    )
