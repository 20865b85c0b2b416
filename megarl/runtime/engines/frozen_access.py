"""Frozen models for rollout workers in other processes: fleets that follow the driver's through a directory."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ray.actor import ActorHandle

from megarl.config.model import ModelShape
from megarl.data.tokenizer import load_tokenizer
from megarl.rollout.client import EngineClient, EngineEndpoint
from megarl.rollout.fleet import Fleet
from megarl.rollout.frozen import FrozenEngines
from megarl.rollout.worker import EngineView, FollowingFleet

_FOLLOW_EVERY_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenSetup:
    """All that a process needs to ask the engines of one frozen role."""

    role: str
    folder: Path
    shape: ModelShape
    max_attempts: int
    max_outstanding: int
    request_timeout_s: float
    patience_s: float
    endpoints: tuple[EngineEndpoint, ...]

    def model(self, fleet: Fleet) -> FrozenEngines:
        is_teacher = self.role.startswith("teacher.")  # given tokens, never a chat
        tokenizer = load_tokenizer(self.folder, vocab=self.shape.vocab, template="raw" if is_teacher else "chat")
        return FrozenEngines(fleet, tokenizer, self.shape, role=self.role, max_attempts=self.max_attempts)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenAccess:
    """The frozen models of a run for rollout workers in other processes."""

    directory: ActorHandle
    setups: tuple[FrozenSetup, ...]

    def open(self) -> FollowedModels:
        return FollowedModels(self)


class FollowedModels:
    """The frozen models in the process of a rollout worker."""

    def __init__(self, access: FrozenAccess) -> None:
        self._directory = access.directory
        self._fleets = {
            setup.role: FollowingFleet(
                setup.endpoints,
                connect=partial(EngineClient, request_timeout_s=setup.request_timeout_s),
                lent=frozenset(),
                max_outstanding=setup.max_outstanding,
                publish_timeout_s=setup.patience_s,
            )
            for setup in access.setups
        }
        self.models = {setup.role: setup.model(self._fleets[setup.role].fleet) for setup in access.setups}
        self._following: asyncio.Task[None] | None = None

    def follow(self) -> None:
        """Begin to follow the driver's fleets, unless this was done before."""
        if self._following is None:
            self._following = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        number = 0
        while True:
            views: dict[str, list[EngineView]] = await self._directory.views.remote()
            number += 1
            for role, of_role in views.items():
                # Numbered again: a state that only this process changed is told again as well.
                await self._fleets[role].follow([replace(view, number=number) for view in of_role])
            await asyncio.sleep(_FOLLOW_EVERY_S)
