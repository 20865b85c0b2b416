"""One call, every rank, one result or one error that names the rank."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import ray
from ray.actor import ActorHandle

from megarl.errors import MegarlError, WorkerError


class WorkerGroup:
    """The processes of one role, in rank order. Every call has a deadline; the first failure ends the call."""

    def __init__(self, role: str, workers: Sequence[ActorHandle], *, timeout_s: float) -> None:
        self.role = role
        self.workers = tuple(workers)
        self._timeout_s = timeout_s

    def __len__(self) -> int:
        return len(self.workers)

    async def call(self, method: str, *arguments: object, waits_for_all: bool = False) -> list[object]:
        """The same call on every rank; results in rank order.

        A failure is raised at once or, with `waits_for_all`, when no other rank does anything any more.
        """
        shared = [ray.put(argument) for argument in arguments]
        return await self._gather(method, [shared for _ in self.workers], waits_for_all=waits_for_all)

    async def call_each(self, method: str, arguments: Sequence[Sequence[object]]) -> list[object]:
        """A call with arguments of its own on every rank."""
        assert len(arguments) == len(self), f"{len(arguments)} argument lists, {len(self)} ranks"
        return await self._gather(method, arguments)

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
    ) -> list[object]:
        workers = self.workers if workers is None else workers
        tasks = [
            asyncio.ensure_future(self._await(rank, method, getattr(worker, method).remote(*given)))
            for rank, (worker, given) in enumerate(zip(workers, arguments, strict=True))
        ]
        done, pending = await asyncio.wait(tasks, timeout=self._timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        # Ranks are told when one fails, but not when it dies: nobody waits for those who wait for the dead.
        if waits_for_all and pending and not any(isinstance(task.exception(), WorkerError) for task in done):
            done, pending = await asyncio.wait(tasks, timeout=self._timeout_s)
        for task in pending:
            task.cancel()
        failed = [task for task in done if task.exception() is not None]
        if failed:
            failures = [error for task in failed if (error := task.exception()) is not None]
            # A rank whose peer died reports a broken connection; the peer's own error says why.
            raise min(failures, key=lambda error: isinstance(error, WorkerError))
        if pending:
            late = ", ".join(str(rank) for rank, task in enumerate(tasks) if task in pending)
            raise WorkerError(
                f"{self.role} rank(s) {late}: {method} did not finish within {self._timeout_s:.0f} s "
                "(train.operation_timeout_s)"
            )
        return [task.result() for task in tasks]

    async def _await(self, rank: int, method: str, reference: ray.ObjectRef) -> object:
        try:
            return await reference
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, MegarlError):
                raise cause from None
            raise WorkerError(f"{self.role} rank {rank}: {method} failed: {_last_line(error)}") from error
        except ray.exceptions.RayActorError as error:
            raise WorkerError(f"{self.role} rank {rank}: died during {method}: {_last_line(error)}") from error


def _last_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
