"""Lets requests into SGLang's running batch in company: all that run wait while the prompt of a new one is computed.

SGLang takes in whatever waits before each of its passes. Where hundreds of episodes call tools, one of them goes on
after nearly every token of the others, and a pass over a few tokens of prompts comes between any two that generate.
Here requests wait until they have lost as many passes, together, as those that run lose by one over prompts: then the
sum of both is least, whatever the length of turns. Nothing looks at a clock: the ranks of an engine decide alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Protocol

TARGET = "sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill"
MOST_PASSES = 16
"""Passes for which a request waits at most: an agent with short turns should not wait as long as others answer."""


class _Batch(Protocol):
    reqs: Sized
    batch_is_full: bool


class _Plan(Protocol):
    """The next pass of SGLang's scheduler."""

    @property
    def batch_to_run(self) -> _Batch | None: ...
    @property
    def running_batch(self) -> _Batch: ...


class _Scheduler(Protocol):
    """The fields of SGLang's scheduler that are used."""

    waiting_queue: list[object]
    chunked_req: object | None


class Company:
    """Decides before each pass whether those that wait are let in."""

    def __init__(self) -> None:
        self._lost = 0
        self._passes = 0
        self._most_running: int | None = None
        """How many ran when there was no place for more; None if there was."""

    def admits(self, *, waiting: int, running: int) -> bool:
        """Count the pass that those who wait lose, and return whether they have lost enough."""
        places = waiting if self._most_running is None else max(0, self._most_running - running)
        self._lost += min(waiting, places)
        self._passes += min(waiting, 1)
        return self._lost >= running or self._passes > MOST_PASSES

    def let_in(self, *, running: int, is_full: bool) -> None:
        """Note how many run now, and whether there was no place for others."""
        self._lost = self._passes = 0
        self._most_running = running if is_full else None


def register_hook() -> None:
    """Register the hook; a scheduler applies it when it loads its plugins."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415 - only in the server

    company = Company()  # a process has one scheduler

    def in_company(get: Callable[..., _Plan], scheduler: _Scheduler, running_batch: _Batch) -> _Plan:
        return taken_in(company, get, scheduler, running_batch)

    HookRegistry.register(TARGET, in_company, HookType.AROUND)


def taken_in(company: Company, get: Callable[..., _Plan], scheduler: _Scheduler, running_batch: _Batch) -> _Plan:
    """Return SGLang's plan with those that wait, or as if none did."""
    running = len(running_batch.reqs)
    # A prompt that is computed in parts goes on.
    if scheduler.chunked_req is None and not company.admits(waiting=len(scheduler.waiting_queue), running=running):
        waiting, scheduler.waiting_queue = scheduler.waiting_queue, []
        plan = get(scheduler, running_batch)
        # It adds requests whose grammar is ready.
        scheduler.waiting_queue = waiting + scheduler.waiting_queue
        return plan
    plan = get(scheduler, running_batch)
    if plan.batch_to_run is not None:
        running += len(plan.batch_to_run.reqs)
    company.let_in(running=running, is_full=plan.running_batch.batch_is_full)
    return plan
