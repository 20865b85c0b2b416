"""The processes that play episodes with a user's code: one for each episode, or shared where the code gives way.

Code whose functions are all `async` shares. An episode that ends a shared process is played again in a process of its
own; its neighbours are played again as if nothing had been.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, cast

from megarl.episodes.worker import EnvironmentTask
from megarl.errors import EnvironmentLostError, NeighbourError
from megarl.system.shared_process import NeighbourLostError, SharedPool
from megarl.system.user_process import LateReplyError, NoReplyError, UserLoadError, UserPool
from megarl.types import JsonValue

PROGRAM = "megarl.episodes.worker"
_MAX_ALONE = 1 << 16
"""Prompts whose losses are remembered."""
_BLAMED = 2
"""A loss counts so much for the episode that computed, 1 for others; from here on a prompt's episodes play alone."""


class _Place(Protocol):
    """A process, or a seat in one."""

    @property
    def is_whole(self) -> bool:
        """Whether it may be asked again."""
        ...

    async def ask(self, request: Mapping[str, object], *, timeout_s: float) -> dict[str, object]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLimits:
    workers: int
    episodes_per_process: int | None
    """None: as many as there is memory for, where the code gives way; else 1."""
    episodes_per_worker: int


class EpisodeProcess:
    """The process of one episode, which others may share."""

    def __init__(
        self, place: _Place, *, give: Callable[[bool], None], lost: Callable[[NoReplyError], None] = lambda _: None
    ) -> None:
        """`give` takes the place back, and is told whether it may be used again."""
        self._place = place
        self._lost = lost
        self.give = give

    @property
    def is_whole(self) -> bool:
        return self._place.is_whole

    async def ask(
        self, does: str, *, timeout_s: float, name: str = "", arguments: Mapping[str, JsonValue]
    ) -> dict[str, JsonValue]:
        """Return the reply; an EnvironmentLostError if the process gives none."""
        request = {"does": does, "name": name, "arguments": dict(arguments)}
        try:
            reply = await self._place.ask(request, timeout_s=timeout_s)
            if reply.pop("is_crowded", False):
                self._lost(NoReplyError(does))  # it takes more than an episode may that shares
            return cast("dict[str, JsonValue]", reply)
        except NeighbourLostError as error:
            self._lost(error)
            raise NeighbourError(str(error)) from None
        except NoReplyError as error:
            if not isinstance(error, LateReplyError):
                self._lost(error)
            raise EnvironmentLostError(f"{name or does} {error}") from None


class EpisodeProcesses:
    """All processes of one rollout worker that run a class, an agent or programs."""

    def __init__(self, task: EnvironmentTask, limits: ProcessLimits, *, gives_way: bool, log_path: Path | None) -> None:
        """`gives_way`: the code's functions are all `async`."""
        values, each = cast("Mapping[str, object]", task), limits.episodes_per_process
        self._own = UserPool(
            PROGRAM,
            values,
            section="environment",
            workers=limits.workers,
            uses_per_worker=limits.episodes_per_worker,
            log_path=log_path,
        )
        self._shared: SharedPool | None = None
        self.most_open: int | None = limits.workers
        """Episodes that can be open; None: as many as there is memory for."""
        if each != 1 and (each is not None or gives_way):
            self.most_open = None if each is None else limits.workers * each
            self._shared = SharedPool(
                PROGRAM,
                values,
                section="environment",
                workers=limits.workers,
                episodes_per_process=each,
                log_path=log_path,
            )
        self._losses: dict[str, int] = {}
        """By prompt, what its episodes lost in shared processes."""

    async def take(self, prompt: str) -> EpisodeProcess:
        """Wait for a process that has loaded the code; an EnvironmentLostError if there is none."""
        shared = self._shared
        try:
            if shared is None or self._losses.get(prompt, 0) >= _BLAMED:
                process = await self._own.take()
                return EpisodeProcess(process, give=lambda usable: self._own.give(process, is_usable=usable))
            seat = await shared.take()
        except (UserLoadError, NoReplyError) as error:
            raise EnvironmentLostError(str(error)) from None
        return EpisodeProcess(
            seat, give=lambda usable: shared.give(seat, is_usable=usable), lost=partial(self._count, prompt)
        )

    def _count(self, prompt: str, error: NoReplyError) -> None:
        if len(self._losses) >= _MAX_ALONE:
            del self._losses[next(iter(self._losses))]
        more = 1 if isinstance(error, NeighbourLostError) else _BLAMED
        self._losses[prompt] = self._losses.get(prompt, 0) + more

    def close(self) -> None:
        self._own.close()
        if self._shared is not None:
            self._shared.close()
