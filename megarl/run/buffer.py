"""Scored groups between producers and trainer: how many prompts may be open, and the rule that bounds staleness.

Age is counted in steps: the age of a token is the number of versions published since the one that chose it. A prompt
is admitted only while at most `1 + max_staleness` steps' worth of prompts are open. A step is handed over only if the
prompts that it leaves behind can still be trained in time, `prompts_per_step` at a time; otherwise it waits for older
prompts. So age is bounded at admission, and each step is checked against the bound again.

With `max_staleness` 0 the prompts of a step depend on their order in the stream and on what the algorithm keeps, never
on timing. With `oversampling` more prompts than a step needs are admitted at once; a step waits for all of them and
carries the surplus to the next steps, where it is older by as many steps.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megarl.errors import CheckpointError
from megarl.observe.summary import Flow
from megarl.tokens import counted
from megarl.types import DEMONSTRATION, PolicyVersion, ScoredGroup


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Ticket:
    """Permission to generate one prompt."""

    admitted_in_step: int
    number: int
    """Counts from 0; the prompt drawn with this ticket has the same number among all drawn prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The state of every ticket."""

    num_taken: int
    num_given_up: int
    under_way: tuple[int, ...]
    """Numbers of the tickets that have no group yet."""
    carried: tuple[ScoredGroup, ...]
    """Groups that have not been taken, in the order in which they will be."""


class Buffer:
    def __init__(
        self,
        *,
        prompts_per_step: int,
        max_staleness: int,
        oversampling: float = 1.0,
        versions: Sequence[PolicyVersion] = (PolicyVersion(0),),
        carried: Sequence[ScoredGroup] = (),
        replace_lost: Callable[[Sequence[ScoredGroup]], Awaitable[list[ScoredGroup]]] | None = None,
    ) -> None:
        """Continue an earlier buffer with its `carried` groups and its `versions`; the last version is served now.

        `replace_lost` returns the groups of a step with those that were lost meanwhile sampled again.
        """
        self._prompts_per_step = prompts_per_step
        self._max_staleness = max_staleness
        self._replace_lost = replace_lost
        self._num_at_once = math.ceil(oversampling * prompts_per_step)
        self._check_carried(carried, versions)
        self._versions = deque(versions, maxlen=1 + self.max_age)
        self._step = 0
        self._num_tickets = 0
        self._num_given_up = 0
        self._num_taken = 0
        self._under_way: set[Ticket] = set()
        self._scored = {self._ticket_of_carried(place, len(carried)): group for place, group in enumerate(carried)}
        # Open prompts by the step that admitted them: a step is decided from these few numbers at every `put`.
        self._num_scored = Counter(ticket.admitted_in_step for ticket in self._scored)
        self._num_under_way: Counter[int] = Counter()
        self._num_to_oversample = self._num_at_once - len(self._scored)
        """Prompts of this step that are still to be admitted, whether or not others are kept."""
        self._producer_wait_s = 0.0
        self._flow: Flow | None = None
        self._waiting: deque[asyncio.Future[None]] = deque()
        """Producers without a ticket, in the order in which they came."""
        self._num_called = 0
        """Producers that were woken and have not drawn their ticket yet."""
        self._step_is_ready = asyncio.Event()
        self._note_change()

    @property
    def capacity(self) -> int:
        """The largest number of prompts that can be open at once."""
        return max(self._prompts_per_step * (1 + self._max_staleness), self._num_at_once)

    @property
    def max_age(self) -> int:
        """The largest age in steps of a trained token: `max_staleness`, unless a step oversamples by more."""
        return math.ceil(self.capacity / self._prompts_per_step) - 1

    @property
    def is_synchronous(self) -> bool:
        """Whether nothing is generated while the trainer works."""
        return self._max_staleness == 0

    @property
    def versions(self) -> tuple[PolicyVersion, ...]:
        """The versions that may have chosen tokens of the next step; the last one is served now."""
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
        """The waiting times and ages of the last taken step."""
        assert self._flow is not None, "take_step comes first"
        return self._flow

    @property
    def num_ready(self) -> int:
        return len(self._scored)

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    async def reserve(self) -> Ticket:
        """Wait until one more prompt may be generated. Unblocked by `release_step` and `give_up`."""
        began = time.monotonic()
        if not self._may_admit():
            await self._wait_for_room()
        # The ticket is numbered here, where the producer goes on and draws its prompt: their orders are the same.
        ticket = Ticket(admitted_in_step=self._step, number=self._num_tickets)
        self._num_tickets += 1
        self._num_to_oversample -= 1
        self._under_way.add(ticket)
        self._num_under_way[ticket.admitted_in_step] += 1
        self._producer_wait_s += time.monotonic() - began
        return ticket

    async def _wait_for_room(self) -> None:
        room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(room)
        try:
            await room
        except asyncio.CancelledError:
            if not room.cancelled():
                self._num_called -= 1
                self._note_change()  # wake the next waiter
            raise
        self._num_called -= 1

    async def put(self, ticket: Ticket, group: ScoredGroup) -> None:
        """Hand over a group the algorithm keeps. Unblocks `take_step`."""
        self._close(ticket)
        self._scored[ticket] = group
        self._num_scored[ticket.admitted_in_step] += 1
        self._note_change()

    async def give_up(self, ticket: Ticket) -> None:
        """Drop a group; another prompt takes its place. Unblocks `reserve`."""
        self._close(ticket)
        self._num_given_up += 1
        self._note_change()

    async def take_step(self) -> list[ScoredGroup]:
        """Wait for the groups of one step; return the oldest in the order in which their prompts were admitted."""
        began = time.monotonic()
        while not self._has_step():
            self._step_is_ready.clear()
            await self._step_is_ready.wait()
        taken = sorted(self._scored)[: self._prompts_per_step]
        groups = [self._scored[ticket] for ticket in taken]
        if self._replace_lost is not None:
            groups = await self._replace_lost(groups)
        for ticket in taken:
            del self._scored[ticket]
        self._num_scored.subtract(ticket.admitted_in_step for ticket in taken)
        self._num_taken += len(groups)
        ages, num_tokens = self._checked_ages(groups)
        self._flow = Flow(
            trainer_wait_s=time.monotonic() - began,
            producer_wait_s=self._producer_wait_s / self.capacity,
            num_ready=len(self._scored),
            num_under_way=len(self._under_way),
            age_mean=float(np.average(ages, weights=num_tokens)),
            age_max=int(ages.max()),
        )
        self._producer_wait_s = 0.0
        return groups

    async def release_step(self, version: PolicyVersion) -> None:
        """Admit one more step's prompts: the last taken step is published as `version`. Unblocks `reserve`."""
        self._versions.append(version)
        self._step += 1
        self._num_to_oversample = self._num_at_once - len(self._scored) - len(self._under_way)
        self._note_change()

    def _close(self, ticket: Ticket) -> None:
        self._under_way.remove(ticket)
        self._num_under_way[ticket.admitted_in_step] -= 1

    def _note_change(self) -> None:
        """Wake those that can go on, and only those."""
        while self._waiting and self._may_admit():
            room = self._waiting.popleft()
            if not room.done():
                room.set_result(None)
                self._num_called += 1
        if self._has_step():
            self._step_is_ready.set()

    def _check_carried(self, carried: Sequence[ScoredGroup], versions: Sequence[PolicyVersion]) -> None:
        """Refuse groups that would be too old when this buffer hands them over."""
        for place, scored in enumerate(carried):
            age = place // self._prompts_per_step + int(_ages([scored], versions)[0].max())
            if age > self.max_age:
                raise CheckpointError(
                    f"prompt {scored.group.prompt.uid}: its carried rollouts will be trained {age} steps old, "
                    f"{self.max_age} are allowed; resume with the earlier values of train.max_staleness, "
                    "train.prompts_per_step and algorithm.filter.oversampling"
                )

    def _ticket_of_carried(self, place: int, num_carried: int) -> Ticket:
        """Return a ticket so old that the group is trained first, as the earlier buffer guaranteed."""
        return Ticket(
            admitted_in_step=place // self._prompts_per_step - self.max_age,
            number=place - num_carried,
        )

    def _may_admit(self) -> bool:
        num_open = len(self._under_way) + len(self._scored) + self._num_called
        # Between take_step and release_step the taken groups still count.
        num_taken_now = self._num_taken - self._step * self._prompts_per_step
        if num_open + num_taken_now < self._prompts_per_step * (1 + self._max_staleness):
            return True
        return num_taken_now == 0 and self._num_to_oversample > self._num_called

    def _has_step(self) -> bool:
        if len(self._scored) < self._prompts_per_step or (
            self.is_synchronous and (self._under_way or self._num_called)
        ):
            return False
        # The next steps take the rest in the order of admission, prompts_per_step at a time. The last prompt that a
        # step admitted is taken last of them.
        num_left = 0
        for admitted_in_step, num_open in self._left_behind():
            num_left += num_open
            last_place = num_left - 1
            if num_open and self._step + 1 + last_place // self._prompts_per_step - admitted_in_step > self.max_age:
                return False
        return True

    def _left_behind(self) -> Iterator[tuple[int, int]]:
        """Yield how many prompts of each admitting step stay open when the next step is taken, the oldest first."""
        num_to_take = self._prompts_per_step
        for admitted_in_step in sorted(self._num_scored.keys() | self._num_under_way.keys()):
            num_scored, num_under_way = self._num_scored[admitted_in_step], self._num_under_way[admitted_in_step]
            if not num_scored and not num_under_way:
                del self._num_scored[admitted_in_step], self._num_under_way[admitted_in_step]
                continue
            num_taken = min(num_to_take, num_scored)
            num_to_take -= num_taken
            yield admitted_in_step, num_scored - num_taken + num_under_way

    def _checked_ages(self, groups: Sequence[ScoredGroup]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        ages, num_tokens = _ages(groups, self._versions)
        assert 0 <= ages.min() <= ages.max() <= min(self.max_age, len(self._versions) - 1), (
            f"step {self._step} has tokens {ages.min()} to {ages.max()} steps old, allowed are versions {self.versions}"
        )
        return ages, num_tokens


def _ages(
    groups: Sequence[ScoredGroup], versions: Sequence[PolicyVersion]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the ages of tokens in steps, without demonstrations, and how many tokens have each.

    A version that was never served has age -1.
    """
    counts: Counter[int] = Counter()
    for scored in groups:
        for rollout in scored.group.rollouts:
            for version, number in counted(rollout.versions):
                counts[version] += number
    counts.pop(DEMONSTRATION, None)
    if not counts:
        return np.zeros(1, np.int64), np.ones(1, np.int64)
    chosen, numbers = np.array(list(counts)), np.array(list(counts.values()))
    ages: npt.NDArray[np.int64] = len(versions) - np.searchsorted(np.asarray(versions), chosen, side="right")
    return np.where(chosen > versions[-1], -1, ages), numbers
