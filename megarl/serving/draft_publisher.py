"""Sends what the model that drafts has learned to the drafts of the engines, over the same machinery as the policy.

No version of a draft changes a token's probability, so that nothing waits for one: an engine whose draft got none, or a
part of one, serves on, and gets all of it with the next publish.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from megarl.engine.client import EngineClient
from megarl.engine.fleet import Engine
from megarl.errors import WeightSyncError, WorkerError
from megarl.ranks.calls import ActorCalls
from megarl.serving.publisher import TransferPublisher
from megarl.serving.supervisor import CatchUp
from megarl.types import PolicyVersion
from megarl.weights.algebra.plan import Plan

logger = logging.getLogger(__name__)

_OF_FOLDER = PolicyVersion(0)
"""An engine starts with the draft of the recipe's folder."""


@dataclass(eq=False, kw_only=True)
class DraftPublisher(TransferPublisher):
    """Its `ranks` are those of the drafter, and its `control` is for drafts."""

    _sent: WeakKeyDictionary[EngineClient, PolicyVersion] = field(default_factory=WeakKeyDictionary, init=False)
    """A restarted engine has a new client."""

    async def publish_new(self) -> None:
        """Publish what engines have not got; what fails is reported, and left to the next publish."""
        version = PolicyVersion((await self.ranks.call(ActorCalls.version))[0])
        if all(self._has(engine, version) for engine in self.fleet.reachable):
            return
        with suppress(WeightSyncError):
            await self.publish(version)

    def before(self, catch_up: CatchUp) -> CatchUp:
        """Return what sends an engine its draft before it catches up with the policy: then it gets no request."""

        async def both(engine: Engine) -> bool:
            async with self.fleet.publish_lock, self.ranks.device_lock:
                version = PolicyVersion((await self.ranks.call(ActorCalls.version))[0])
                if not self._has(engine, version):
                    try:
                        await self._deliver([engine], version)
                    except WeightSyncError as error:
                        self.failed(version, str(error))
            return await catch_up(engine)

        return both

    def _has(self, engine: Engine, version: PolicyVersion) -> bool:
        return self._sent.get(engine.client, _OF_FOLDER) == version

    async def _deliver(
        self, roster: Sequence[Engine], version: PolicyVersion, *, is_catching_up: bool = False
    ) -> tuple[int, Plan]:
        try:
            link = await self._linked(roster)
            await self._exchange(link, version)
        except (WeightSyncError, WorkerError) as error:
            raise self._not_published(version, "engines draft with the one before", error) from error
        logger.info("sent drafts version=%d engines=%s", version, [engine.index for engine in roster])
        for engine in roster:
            self._sent[engine.client] = version
        return len(roster), link.plan

    @property
    def _group(self) -> str:
        return f"{super()._group} of drafts"
