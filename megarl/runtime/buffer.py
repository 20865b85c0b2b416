"""Scored groups between the producers and the trainer, and the rule that bounds staleness.

Age is counted in steps: a step trains from the version that was published last, and a token is as old as the number
of versions published since the one that chose it. A prompt is admitted only while at most `1 + max_staleness` steps'
worth of prompts are open, and a step is handed over only if what it leaves behind can still be trained in time,
`prompts_per_step` at a time: where it could not, the step waits for older prompts. So age is bounded at admission;
what is handed over is held against the bound all the same.

With `max_staleness` 0 the prompts of a step depend on their order in the stream and on what the algorithm keeps, never
on timing. With `oversampling` more prompts than a step needs are admitted at once; a step waits for all of them, and
what is then left over is carried to the next ones: those are as much older as the surplus is in steps.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megarl.errors import CheckpointError
from megarl.observe.summary import Flow
from megarl.types import DEMONSTRATION, PolicyVersion, ScoredGroup


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
        versions: Sequence[PolicyVersion] = (PolicyVersion(0),),
        carried: Sequence[ScoredGroup] = (),
    ) -> None:
        """`carried` is what another buffer had left over, and `versions` those it knew; the last one is served now."""
        self._prompts_per_step = prompts_per_step
        self._max_staleness = max_staleness
        self._num_at_once = math.ceil(oversampling * prompts_per_step)
        self._check_carried(carried, versions)
        self._versions = deque(versions, maxlen=1 + self.max_age)
        self._step = 0
        self._num_tickets = 0
        self._num_given_up = 0
        self._num_taken = 0
        self._under_way: set[Ticket] = set()
        self._scored = {self._ticket_of_carried(place, len(carried)): group for place, group in enumerate(carried)}
        self._num_to_oversample = self._num_at_once - len(self._scored)
        """In this step, still to be admitted whatever becomes of the others."""
        self._producer_wait_s = 0.0
        self._flow: Flow | None = None
        self._changed = asyncio.Condition()

    @property
    def capacity(self) -> int:
        """The most prompts that can be open at once."""
        return max(self._prompts_per_step * (1 + self._max_staleness), self._num_at_once)

    @property
    def max_age(self) -> int:
        """In steps, of anything that is trained: `max_staleness`, unless a step oversamples more than that."""
        return math.ceil(self.capacity / self._prompts_per_step) - 1

    @property
    def is_synchronous(self) -> bool:
        """Whether nothing is generated while the trainer works."""
        return self._max_staleness == 0

    @property
    def versions(self) -> tuple[PolicyVersion, ...]:
        """Those that tokens of the next step may be of, as published; the last one is served now."""
        return tuple(self._versions)

    @property
    def counts(self) -> Counts:
        return Counts(
            num_taken=self._num_taken,
            num_given_up=self._num_given_up,
            under_way=tuple(sorted(ticket.number for ticket in self._under_way)),
            carried=tuple(self._scored[ticket] for ticket in sorted(self._scored)),
        )

    @property
    def flow(self) -> Flow:
        """Of the step taken last."""
        assert self._flow is not None, "take_step comes first"
        return self._flow

    async def reserve(self) -> Ticket:
        """Wait until one more prompt may be generated. Unblocked by `release_step` and `give_up`."""
        began = time.monotonic()
        async with self._changed:
            await self._changed.wait_for(self._may_admit)
            ticket = Ticket(admitted_in_step=self._step, number=self._num_tickets)
            self._num_tickets += 1
            self._num_to_oversample -= 1
            self._under_way.add(ticket)
            self._producer_wait_s += time.monotonic() - began
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
        began = time.monotonic()
        async with self._changed:
            await self._changed.wait_for(self._has_step)
            taken = self._next_step()
            groups = [self._scored.pop(ticket) for ticket in taken]
            self._num_taken += len(groups)
            ages = self._checked_ages(groups)
            self._flow = Flow(
                trainer_wait_s=time.monotonic() - began,
                producer_wait_s=self._producer_wait_s / self.capacity,
                num_ready=len(self._scored),
                num_under_way=len(self._under_way),
                age_mean=float(ages.mean()),
                age_max=int(ages.max()),
            )
            self._producer_wait_s = 0.0
            return groups

    async def release_step(self, version: PolicyVersion) -> None:
        """The step taken last is trained and published as `version`: admit one more step's prompts.

        Unblocks `reserve`.
        """
        async with self._changed:
            self._versions.append(version)
            self._step += 1
            self._num_to_oversample = self._num_at_once - len(self._scored) - len(self._under_way)
            self._changed.notify_all()

    def _check_carried(self, carried: Sequence[ScoredGroup], versions: Sequence[PolicyVersion]) -> None:
        """Whether they are young enough for this buffer too."""
        for place, scored in enumerate(carried):
            age = place // self._prompts_per_step + int(_ages([scored], versions).max())
            if age > self.max_age:
                raise CheckpointError(
                    f"prompt {scored.group.prompt.uid}: its rollouts are carried over and {age} steps old when their "
                    f"turn comes, {self.max_age} are allowed; go on with train.max_staleness, train.prompts_per_step "
                    "and algorithm.filter.oversampling as they were"
                )

    def _ticket_of_carried(self, place: int, num_carried: int) -> Ticket:
        """As if admitted just in time to be trained first: the buffer it comes from promised no less."""
        return Ticket(
            admitted_in_step=place // self._prompts_per_step - self.max_age,
            number=place - num_carried,
        )

    def _may_admit(self) -> bool:
        num_open = len(self._under_way) + len(self._scored)
        # Between taking a step and releasing it, what was taken still counts.
        num_taken_now = self._num_taken - self._step * self._prompts_per_step
        if num_open + num_taken_now < self._prompts_per_step * (1 + self._max_staleness):
            return True
        return num_taken_now == 0 and self._num_to_oversample > 0

    def _next_step(self) -> list[Ticket]:
        return sorted(self._scored)[: self._prompts_per_step]

    def _has_step(self) -> bool:
        taken = self._next_step()
        if len(taken) < self._prompts_per_step or (self.is_synchronous and self._under_way):
            return False
        left = sorted((self._scored.keys() | self._under_way) - set(taken))
        # The steps after this one take what is left in this order, so many at a time.
        return all(
            self._step + 1 + place // self._prompts_per_step - ticket.admitted_in_step <= self.max_age
            for place, ticket in enumerate(left)
        )

    def _checked_ages(self, groups: Sequence[ScoredGroup]) -> npt.NDArray[np.int64]:
        ages = _ages(groups, self._versions)
        assert 0 <= ages.min() <= ages.max() <= min(self.max_age, len(self._versions) - 1), (
            f"step {self._step} has tokens {ages.min()} to {ages.max()} steps old, allowed are versions {self.versions}"
        )
        return ages


def _ages(groups: Sequence[ScoredGroup], versions: Sequence[PolicyVersion]) -> npt.NDArray[np.int64]:
    """Of every token, in steps; demonstrations have none. A version that was never served gives what is no age."""
    tokens = np.concatenate([rollout.versions for scored in groups for rollout in scored.group.rollouts])
    chosen = tokens[tokens != DEMONSTRATION]
    if not len(chosen):
        return np.zeros(1, np.int64)
    ages: npt.NDArray[np.int64] = len(versions) - np.searchsorted(np.asarray(versions), chosen, side="right")
    return np.where(chosen > versions[-1], -1, ages)
