"""Scored groups between the producers and the trainer, and the rule that bounds staleness.

A prompt is admitted only while at most `1 + max_staleness` steps' worth of prompts are under way, and a step waits
for every prompt that could not be trained later without being too old. So age is bounded at admission, and there is
nothing to check afterwards. With `max_staleness` 0 the prompts of a step depend on their order in the stream and on
what the algorithm keeps, never on timing.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from megarl.types import ScoredGroup


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Ticket:
    """Permission to generate one prompt, and when it was given."""

    admitted_in_step: int
    number: int
    """Counts from 0; the prompt drawn with it has the same number among all that are drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What became of every ticket."""

    num_taken: int
    num_given_up: int
    waiting: tuple[int, ...]
    """Numbers of those whose group is under way or has not been taken."""


class Buffer:
    def __init__(self, *, prompts_per_step: int, max_staleness: int) -> None:
        self._prompts_per_step = prompts_per_step
        self._max_staleness = max_staleness
        self._step = 0
        self._num_tickets = 0
        self._num_given_up = 0
        self._num_taken = 0
        self._under_way: set[Ticket] = set()
        self._scored: dict[Ticket, ScoredGroup] = {}
        self._changed = asyncio.Condition()

    @property
    def capacity(self) -> int:
        """The most prompts that can be under way at once."""
        return self._prompts_per_step * (1 + self._max_staleness)

    @property
    def counts(self) -> Counts:
        waiting = sorted(ticket.number for ticket in (*self._under_way, *self._scored))
        return Counts(num_taken=self._num_taken, num_given_up=self._num_given_up, waiting=tuple(waiting))

    async def reserve(self) -> Ticket:
        """Wait until one more prompt may be generated. Unblocked by `release_step` and `give_up`."""
        async with self._changed:
            await self._changed.wait_for(self._may_admit)
            ticket = Ticket(admitted_in_step=self._step, number=self._num_tickets)
            self._num_tickets += 1
            self._under_way.add(ticket)
            return ticket

    async def put(self, ticket: Ticket, group: ScoredGroup) -> None:
        """Hand over a group the algorithm keeps. Unblocks `take_step`."""
        async with self._changed:
            self._under_way.remove(ticket)
            self._scored[ticket] = group
            self._changed.notify_all()

    async def give_up(self, ticket: Ticket) -> None:
        """The group is not trained on: another prompt takes its place. Unblocks `reserve`."""
        async with self._changed:
            self._under_way.remove(ticket)
            self._num_given_up += 1
            self._changed.notify_all()

    async def take_step(self) -> list[ScoredGroup]:
        """Wait for the groups of one step, the oldest first; in the order their prompts were admitted."""
        async with self._changed:
            await self._changed.wait_for(self._has_step)
            taken = sorted(self._scored)[: self._prompts_per_step]
            self._num_taken += len(taken)
            return [self._scored.pop(ticket) for ticket in taken]

    async def release_step(self) -> None:
        """The step taken last is trained and published: admit the prompts of one more. Unblocks `reserve`."""
        async with self._changed:
            self._step += 1
            self._changed.notify_all()

    def _may_admit(self) -> bool:
        num_admitted = self._num_tickets - self._num_given_up
        return num_admitted < (self._step + 1 + self._max_staleness) * self._prompts_per_step

    def _has_step(self) -> bool:
        last_chance = self._step - self._max_staleness
        return len(self._scored) >= self._prompts_per_step and all(
            ticket.admitted_in_step > last_chance for ticket in self._under_way
        )
