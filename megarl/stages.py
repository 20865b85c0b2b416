"""One Protocol per arrow of the step. The loop knows these and nothing else.

prompts --GroupSource--> scored groups --Trainer--> estimates --Algorithm--> samples --Trainer--> version
version --Publisher--> engines
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from megarl.results import PublishResult, UpdateResult
from megarl.types import Estimates, PolicyVersion, Prompt, RolloutGroup, ScoredGroup, TrainSample


class GroupSource(Protocol):
    async def scored_group(self, prompt: Prompt) -> ScoredGroup | None:
        """Return all rollouts of one prompt, checked and scored; None if it gets none, and another replaces it.

        Raise FleetError when no engine is left.
        """
        ...

    def take_dropped(self) -> Mapping[str, int]:
        """Return and reset the number of prompts that got no rollouts, by cause."""
        ...


class Generator(Protocol):
    async def generate(self, prompt: Prompt) -> RolloutGroup:
        """Return all rollouts of one prompt, checked; raise FleetError when no engine is left to give them."""
        ...


class Scorer(Protocol):
    async def score(self, group: RolloutGroup) -> ScoredGroup: ...


class Algorithm(Protocol):
    def keeps(self, group: ScoredGroup) -> bool:
        """Whether the group may be trained on; a group that is not kept is replaced by another prompt."""
        ...

    def take_dropped(self) -> Mapping[str, int]:
        """Return and reset the number of groups that were not kept, by cause."""
        ...

    def assign(self, groups: Sequence[ScoredGroup], estimates: Estimates) -> list[TrainSample]:
        """Assign credit to every rollout of one step; return the samples in the order of the groups."""
        ...

    @property
    def kl_coef(self) -> float | None:
        """The weight of the KL term in the next step; None without one."""
        ...


class Trainer(Protocol):
    """All trained models and their reference: the actor and, where the recipe has them, critic and reference."""

    async def estimate(self, groups: Sequence[ScoredGroup]) -> Estimates:
        """Return the per-token numbers that the algorithm needs before it assigns credit."""
        ...

    async def update(self, samples: Sequence[TrainSample]) -> UpdateResult:
        """Take one step of training; the version of the result is the actor's."""
        ...


class Publisher(Protocol):
    async def publish(self, version: PolicyVersion) -> PublishResult:
        """Return when every serving engine, at least one, serves this version.

        Raise WeightSyncError when it was not committed, FleetError when no engine is left.
        """
        ...


class Phases(Protocol):
    """When each side may use the devices: always in separate pools, one after the other in a shared pool."""

    def generating(self) -> AbstractAsyncContextManager[None]: ...
    def training(self) -> AbstractAsyncContextManager[None]: ...

    def comparing(self) -> AbstractAsyncContextManager[None]:
        """Let trainers compute without a change of weights: engines keep theirs."""
        ...

    def publishing(self) -> AbstractAsyncContextManager[None]:
        """Let engines have memory for the weights that are sent."""
        ...


class SeparatePhases:
    """The phases of separate pools, and of one with room for all: neither side waits for the other."""

    def generating(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    training = comparing = publishing = generating


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """One implementation of each Protocol: everything that a step passes through."""

    prompts: Iterator[Prompt]
    """Endless and seeded: one epoch after the other."""
    groups: GroupSource
    algorithm: Algorithm
    trainer: Trainer
    publisher: Publisher
    phases: Phases
