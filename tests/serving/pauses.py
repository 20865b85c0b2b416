"""Publishes to a real engine while it generates."""

from __future__ import annotations

from megarl import stages
from megarl.config.roles import InFlight
from megarl.engine import admin
from megarl.engine.fleet import Fleet
from megarl.results import PublishResult
from megarl.serving.publisher import EnginePublisher
from megarl.stages import SeparatePhases
from megarl.types import PolicyVersion
from tests.engine.engines import (
    REQUEST_TIMEOUT_S,
    ServedModel,
)


class DiskPublisher:
    """Serves the other model at odd versions and the first one at even ones."""

    def __init__(self, served: ServedModel, fleet: Fleet, mode: InFlight) -> None:
        self._folders = (served.folder, served.other_folder)
        self._fleet = fleet
        self._mode = mode

    async def publish(self, version: PolicyVersion) -> PublishResult:
        (engine,) = self._fleet.engines
        folder = self._folders[version % 2]
        await admin.load_weights_from_disk(engine.client, folder, version=version, timeout_s=REQUEST_TIMEOUT_S)
        if self._mode != "in_place":
            await engine.client.flush_cache()
        await self._fleet.committed(version, [engine])
        return PublishResult(version=version, num_bytes=0, seconds=0.0, num_engines=1)


def pausing(transport: stages.Publisher, fleet: Fleet, mode: InFlight) -> EnginePublisher:
    return EnginePublisher(transport=transport, fleet=fleet, phases=SeparatePhases(), in_flight=mode)
