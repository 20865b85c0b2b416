"""One Protocol per arrow of the step. The loop knows these and nothing else.

prompts --Generator--> groups --Scorer--> scored --Trainer--> estimates --Algorithm--> samples --Trainer--> version
version --Publisher--> engines
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from megarl.results import PublishResult, UpdateResult
from megarl.types import Estimates, PolicyVersion, Prompt, RolloutGroup, ScoredGroup, TrainSample


class PromptSource(Protocol):
    """An endless, seeded stream: one epoch after the other."""

    def next(self) -> Prompt: ...


class Generator(Protocol):
    async def generate(self, prompt: Prompt) -> RolloutGroup:
        """All rollouts of one prompt, checked; raises FleetError when no engine can give them."""
        ...


class Scorer(Protocol):
    async def score(self, group: RolloutGroup) -> ScoredGroup: ...


class Algorithm(Protocol):
    def keeps(self, group: ScoredGroup) -> bool:
        """Whether the group may be trained on; a group that is not kept is replaced by another prompt."""
        ...

    def take_dropped(self) -> Mapping[str, int]:
        """How many groups were not kept since this was last asked, by cause."""
        ...

    def assign(self, groups: Sequence[ScoredGroup], estimates: Estimates) -> list[TrainSample]:
        """Credit for every rollout of one step, in the order of the groups."""
        ...

    @property
    def kl_coef(self) -> float | None:
        """What the next step's distance from the reference will cost, where it costs anything."""
        ...


class Trainer(Protocol):
    """All models that are trained or asked: the actor and, where the recipe has them, critic and reference."""

    async def estimate(self, groups: Sequence[ScoredGroup]) -> Estimates:
        """What the algorithm needs to know before it assigns credit; nothing, where it needs nothing."""
        ...

    async def update(self, samples: Sequence[TrainSample]) -> UpdateResult:
        """One step of training; the version is the actor's."""
        ...


class Publisher(Protocol):
    async def publish(self, version: PolicyVersion) -> PublishResult:
        """No engine serves another version than this when it returns, and one at least serves it.

        Raises WeightSyncError when it was not committed, FleetError when no engine is left.
        """
        ...


class Phases(Protocol):
    """Who may use the devices when. Separate pools: everyone, always. A shared pool: one after the other."""

    def generating(self) -> AbstractAsyncContextManager[None]: ...

    def training(self) -> AbstractAsyncContextManager[None]: ...
