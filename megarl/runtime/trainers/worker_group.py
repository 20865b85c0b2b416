"""One call, every rank, one result or one error that names the rank."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import ray
from ray.actor import ActorHandle

from megarl.errors import CheckpointError, MegarlError, WeightSyncError, WorkerError

_LAST_WORDS_S = 2.0
"""After a rank has failed, for another to be known dead: then the first only lost its connection to that one."""


class WorkerDiedError(WorkerError):
    """A process is gone."""


class WorkerLateError(WorkerError):
    """A call did not end in time."""


class WorkerGroup:
    """The processes of one role, in rank order. Every call has a deadline; the first failure ends the call."""

    def __init__(self, role: str, workers: Sequence[ActorHandle], *, timeout_s: float) -> None:
        self.role = role
        self.workers = tuple(workers)
        self._timeout_s = timeout_s

    def __len__(self) -> int:
        return len(self.workers)

    async def call(
        self, method: str, *arguments: object, waits_for_all: bool = False, timeout_s: float | None = None
    ) -> list[object]:
        """The same call on every rank; results in rank order. `timeout_s` where it is not the group's.

        A failure is raised at once or, with `waits_for_all`, when no other rank does anything any more.
        """
        shared = [ray.put(argument) for argument in arguments]
        given = [shared for _ in self.workers]
        return await self._gather(method, given, waits_for_all=waits_for_all, timeout_s=timeout_s)

    async def call_each(
        self, method: str, arguments: Sequence[Sequence[object]], *, timeout_s: float | None = None
    ) -> list[object]:
        """A call with arguments of its own on every rank."""
        assert len(arguments) == len(self), f"{len(arguments)} argument lists, {len(self)} ranks"
        return await self._gather(method, arguments, timeout_s=timeout_s)

    async def call_first(self, method: str, *arguments: object) -> object:
        (result,) = await self._gather(method, [arguments], workers=self.workers[:1])
        return result

    async def _gather(
        self,
        method: str,
        arguments: Sequence[Sequence[object]],
        workers: Sequence[ActorHandle] | None = None,
        *,
        waits_for_all: bool = False,
        timeout_s: float | None = None,
    ) -> list[object]:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        workers = self.workers if workers is None else workers
        tasks = [
            asyncio.ensure_future(self._await(rank, method, getattr(worker, method).remote(*given)))
            for rank, (worker, given) in enumerate(zip(workers, arguments, strict=True))
        ]
        try:
            failures = await _failures(tasks, waits_for_all=waits_for_all, timeout_s=timeout_s)
            late = [rank for rank, task in enumerate(tasks) if not task.done()]
            if not failures and late:
                raise WorkerLateError(await self._explain(method, late, timeout_s))
        finally:
            for task in tasks:
                task.cancel()
        if failures:
            raise min(failures, key=_weight)
        return [task.result() for task in tasks]

    async def _explain(self, method: str, late: Sequence[int], timeout_s: float) -> str:
        """Why a call did not end in time, as far as it can be known."""
        ranks = ", ".join(str(rank) for rank in late)
        return f"{self.role} rank(s) {ranks}: {method} did not finish within {timeout_s:g} s"

    async def _await(self, rank: int, method: str, reference: ray.ObjectRef) -> object:
        try:
            return await reference
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, MegarlError):
                raise cause from None
            raise WorkerError(f"{self.role} rank {rank}: {method} failed: {_last_line(error)}") from error
        except ray.exceptions.RayActorError as error:
            raise WorkerDiedError(f"{self.role} rank {rank}: died during {method}: {_last_words(error)}") from error


async def _failures(
    tasks: Sequence[asyncio.Future[object]], *, waits_for_all: bool, timeout_s: float
) -> list[BaseException]:
    done, pending = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
    failures = [error for task in done if (error := task.exception()) is not None]
    if failures and pending and (waits_for_all or all(_weight(error) == _AFFECTED for error in failures)):
        # Ranks are told when one fails, but not when it dies: nobody waits for those who wait for the dead.
        may_wait = waits_for_all and not any(isinstance(error, WorkerError) for error in failures)
        done, _ = await asyncio.wait(tasks, timeout=timeout_s if may_wait else _LAST_WORDS_S)
    return [error for task in done if (error := task.exception()) is not None]


_SAID, _DIED, _AFFECTED = range(3)


def _weight(error: BaseException) -> int:
    """Which of several failures is the news: a rank whose peer failed or died reports a broken connection."""
    if isinstance(error, WorkerDiedError):
        return _DIED
    return _AFFECTED if isinstance(error, WorkerError | WeightSyncError | CheckpointError) else _SAID


def _last_words(error: BaseException) -> str:
    """Of a process that is gone, as Ray has them; not what may cause such things in general."""
    line = _last_line(error)
    return line.partition("Worker exit detail: ")[2].partition(" Some common causes")[0] or line


def _last_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
