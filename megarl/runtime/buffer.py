"""Scored groups between the producers and the trainer, and the rule that bounds staleness.

A prompt is admitted only while at most `1 + max_staleness` steps' worth of prompts are under way, and a step waits
for every prompt that could not be trained later without being too old. So age is bounded at admission, and there is
nothing to check afterwards. With `max_staleness` 0 the prompts of a step depend on their order in the stream and on
what the algorithm keeps, never on timing.

With `oversampling` more prompts than a step needs are admitted at once. A step still waits for all of them; what is
then left over is carried to the next one.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
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
    under_way: tuple[int, ...]
    """Numbers of those that have no group yet."""
    carried: tuple[ScoredGroup, ...]
    """Groups that have not been taken, in the order they will be."""


class Buffer:
    def __init__(
        self,
        *,
        prompts_per_step: int,
        max_staleness: int,
        oversampling: float = 1.0,
        carried: Sequence[ScoredGroup] = (),
    ) -> None:
        """`carried` is what another buffer had left over."""
        self._prompts_per_step = prompts_per_step
        self._max_staleness = max_staleness
        self._num_at_once = math.ceil(oversampling * prompts_per_step)
        self._step = 0
        self._num_tickets = 0
        self._num_given_up = 0
        self._num_taken = 0
        self._under_way: set[Ticket] = set()
        self._scored: dict[Ticket, ScoredGroup] = {
            Ticket(admitted_in_step=-1, number=number - len(carried)): group for number, group in enumerate(carried)
        }
        self._num_to_oversample = self._num_at_once - len(self._scored)
        """In this step, still to be admitted whatever becomes of the others."""
        self._changed = asyncio.Condition()

    @property
    def capacity(self) -> int:
        """The most prompts that can be under way at once."""
        return max(self._prompts_per_step * (1 + self._max_staleness), self._num_at_once)

    @property
    def counts(self) -> Counts:
        return Counts(
            num_taken=self._num_taken,
            num_given_up=self._num_given_up,
            under_way=tuple(sorted(ticket.number for ticket in self._under_way)),
            carried=tuple(self._scored[ticket] for ticket in sorted(self._scored)),
        )

    async def reserve(self) -> Ticket:
        """Wait until one more prompt may be generated. Unblocked by `release_step` and `give_up`."""
        async with self._changed:
            await self._changed.wait_for(self._may_admit)
            ticket = Ticket(admitted_in_step=self._step, number=self._num_tickets)
            self._num_tickets += 1
            self._num_to_oversample -= 1
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
            self._num_to_oversample = self._num_at_once - len(self._scored) - len(self._under_way)
            self._changed.notify_all()

    def _may_admit(self) -> bool:
        num_open = len(self._under_way) + len(self._scored)
        # Between taking a step and releasing it, what was taken still counts.
        num_taken_now = self._num_taken - self._step * self._prompts_per_step
        if num_open + num_taken_now < self._prompts_per_step * (1 + self._max_staleness):
            return True
        return num_taken_now == 0 and self._num_to_oversample > 0

    def _has_step(self) -> bool:
        last_chance = self._step - self._max_staleness
        return len(self._scored) >= self._prompts_per_step and all(
            ticket.admitted_in_step > last_chance for ticket in self._under_way
        )
