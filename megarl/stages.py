"""One Protocol per arrow of the step. The loop knows these and nothing else.

prompts --Generator--> groups --Scorer--> scored --Algorithm--> samples --pack--> batch --Trainer--> version
version --Publisher--> engines
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from megarl.types import (
    PolicyVersion,
    Prompt,
    PublishResult,
    RolloutGroup,
    ScoredGroup,
    TrainBatch,
    TrainSample,
    UpdateResult,
)


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

    def assign(self, groups: Sequence[ScoredGroup]) -> list[TrainSample]:
        """Credit for every rollout of one step, in the order of the groups."""
        ...


class Trainer(Protocol):
    async def update(self, batch: TrainBatch) -> UpdateResult: ...


class Publisher(Protocol):
    async def publish(self, version: PolicyVersion) -> PublishResult:
        """All engines serve `version` when this returns; raises WeightSyncError when it was not committed."""
        ...


class Phases(Protocol):
    """Who may use the devices when. Separate pools: everyone, always. A shared pool: one after the other."""

    def generating(self) -> AbstractAsyncContextManager[None]: ...

    def training(self) -> AbstractAsyncContextManager[None]: ...
