"""Typed calls to a group of Ray actors.

One call goes to every rank; then there are all results, or one error that names the rank. A call has the token of the
driver that holds the run's lock (`system.run_lock`). Every process that outlives a driver has a `Fence`: a driver that
was frozen until another took its place changes nothing any more.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Concatenate, Generic, ParamSpec, TypeVar

import ray
from ray.actor import ActorHandle

from megarl.errors import CheckpointError, MachineError, MegarlError, NodeMemoryError, WeightSyncError, WorkerError
from megarl.system.run_lock import held_token, is_held, newest_token

Worker = TypeVar("Worker", covariant=True)
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_DEATH_NOTICE_S = 2.0
"""After a rank has failed, how long another may take to be known dead: the first then only lost its connection."""
_LOW_MEMORY = "running low on memory"
_REPORTED, _DIED, _AFFECTED = range(3)


class LostRanksError(WorkerError):
    """Ranks of a role are lost; `ranks` are those that caused it, empty where that is not known."""

    def __init__(self, message: str, role: str = "", ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.role, self.ranks = role, tuple(ranks)


class WorkerDiedError(LostRanksError):
    """A process is gone."""


class WorkerLateError(LostRanksError):
    """A call did not end in time."""


class Fence:
    """Lets the drivers of a run pass in the order of their tokens. A driver without a lock has the token 0."""

    def __init__(self, token: int = 0) -> None:
        self.token = token
        """The highest so far."""

    def enter(self, token: int) -> None:
        """Raise MachineError for a driver that another one has followed."""
        if token < self.token:
            raise MachineError(
                f"driver {token} of this run called, and driver {self.token} has taken over; driver {token} ends"
            )
        self.token = token


class WorkerGroup(Generic[Worker]):
    """The processes of one role, in rank order. Every call has a deadline; the first failure ends the call.

    A method is named as `Worker.method`, so that arguments and result are checked where the call is written.
    """

    def __init__(
        self, role: str, workers: Sequence[ActorHandle], *, timeout_s: float, run_folder: Path | None = None
    ) -> None:
        """`timeout_s` is the deadline of a call without one of its own. `run_folder` is that of a run with a lock."""
        self._lock_of = run_folder
        self.token = 0 if run_folder is None else held_token(run_folder)
        """This driver's, which workers compare with those of others."""
        self.role = role
        self.workers = tuple(workers)
        self.timeout_s = timeout_s

    def __len__(self) -> int:
        return len(self.workers)

    async def is_ours(self) -> bool:
        """Whether the workers are this driver's to end: another one may have taken over the run."""
        return self._lock_of is None or await asyncio.to_thread(is_held, self._lock_of)

    async def is_followed(self) -> bool:
        """Whether another driver has taken the run since."""
        return self._lock_of is not None and await asyncio.to_thread(newest_token, self._lock_of) > self.token

    async def call(
        self,
        method: Callable[Concatenate[Worker, Parameters], Result],
        *arguments: Parameters.args,
        **named: Parameters.kwargs,
    ) -> list[Result]:
        """Call every rank with the same arguments; a failure is raised at once."""
        return await self._call_all(method, arguments, named)

    async def call_to_end(
        self,
        method: Callable[Concatenate[Worker, Parameters], Result],
        *arguments: Parameters.args,
        **named: Parameters.kwargs,
    ) -> list[Result]:
        """Call every rank with the same arguments; a failure is raised when every other rank has ended the call."""
        return await self._call_all(method, arguments, named, waits_for_all=True)

    async def _call_all(
        self,
        method: Callable[..., Result],
        arguments: Sequence[object],
        named: dict[str, object],
        *,
        waits_for_all: bool = False,
    ) -> list[Result]:
        # Each argument is stored once, however many ranks read it.
        shared = [ray.put(argument) for argument in arguments]
        shared_named = {key: ray.put(argument) for key, argument in named.items()}
        started = [self._start(worker, method.__name__, shared, shared_named) for worker in self.workers]
        return await self.gather(method.__name__, started, waits_for_all=waits_for_all)

    def _start(
        self, worker: ActorHandle, method: str, arguments: Sequence[object], named: dict[str, object]
    ) -> ray.ObjectRef:
        return getattr(worker, method).remote(*arguments, **named)

    async def gather(
        self,
        method: str,
        started: Sequence[ray.ObjectRef],
        *,
        ranks: Sequence[int] | None = None,
        timeout_s: float | None = None,
        waits_for_all: bool = False,
        is_moving: Callable[[], Awaitable[bool]] | None = None,
    ) -> list[Result]:
        """Return the results of calls that were started on all ranks, or on `ranks`; `method` names them in errors.

        Calls whose work `is_moving` says goes on get as much time again when theirs is over.
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        ranks = range(len(started)) if ranks is None else ranks
        tasks: list[asyncio.Future[Result]] = [
            asyncio.ensure_future(self._await(rank, method, each)) for rank, each in zip(ranks, started, strict=True)
        ]
        try:
            while True:
                failures = await _failures(tasks, waits_for_all=waits_for_all, timeout_s=timeout_s)
                late = [rank for rank, task in zip(ranks, tasks, strict=True) if not task.done()]
                if failures or not late:
                    break
                if is_moving is None or not await is_moving():
                    raise await self._explain(method, late, timeout_s)
        finally:
            for task in tasks:
                task.cancel()
        if failures:
            raise min(failures, key=_weight)
        return [task.result() for task in tasks]

    async def _explain(self, method: str, late: Sequence[int], timeout_s: float) -> WorkerLateError:
        """Return the error of a call that did not end in time."""
        ranks = ", ".join(str(rank) for rank in late)
        return WorkerLateError(f"{self.role} rank(s) {ranks}: {method} did not finish within {timeout_s:g} s")

    async def _await(self, rank: int, method: str, reference: ray.ObjectRef) -> Result:
        try:
            result: Result = await reference
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, MegarlError):
                raise cause from None
            raise WorkerError(f"{self.role} rank {rank}: {method} failed: {_last_line(error)}") from error
        except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as error:
            message = f"{self.role} rank {rank}: died during {method}: {exit_detail(error)}"
            if _LOW_MEMORY in str(error):
                raise NodeMemoryError(message) from error
            raise WorkerDiedError(message, self.role, [rank]) from error
        return result


async def _failures(
    tasks: Sequence[asyncio.Future[Result]], *, waits_for_all: bool, timeout_s: float
) -> list[BaseException]:
    done, pending = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
    failures = [error for task in done if (error := task.exception()) is not None]
    if failures and pending and (waits_for_all or all(_weight(error) == _AFFECTED for error in failures)):
        # A rank that waits for a dead one does not notice its death: waiting for all has no end then.
        may_wait = waits_for_all and not any(isinstance(error, WorkerError) for error in failures)
        done, _ = await asyncio.wait(tasks, timeout=timeout_s if may_wait else _DEATH_NOTICE_S)
    return [error for task in done if (error := task.exception()) is not None]


def _weight(error: BaseException) -> int:
    """Order failures by how close they are to the cause: a rank whose peer died only reports a broken connection."""
    if isinstance(error, WorkerDiedError | NodeMemoryError):
        return _DIED
    return _AFFECTED if isinstance(error, WorkerError | WeightSyncError | CheckpointError) else _REPORTED


def exit_detail(error: BaseException) -> str:
    """Return Ray's reason for the death of this process, without its list of common causes."""
    if _LOW_MEMORY in str(error):
        used = re.findall(r"[\d.]+GB used / [\d.]+GB limit", str(error))
        return f"Ray ended it, its node ran short of memory ({', '.join(used)}); run less there"
    line = _last_line(error)
    if line.startswith("actor_id: "):
        return "Ray gives no reason, as after the loss of its node"
    return line.partition("Worker exit detail: ")[2].partition(" Some common causes")[0] or line


def _last_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
