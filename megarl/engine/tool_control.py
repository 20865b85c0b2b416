"""The driver's end of the commands that only tools and tests send to engine ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megarl.engine.control import EngineControl
from megarl.engine.tool_commands import Dump, Fingerprint, StartRecording, WriteRecording
from megarl.weights.layouts.transfer_spec import TransferSpec
from megarl.weights.recordings import WeightDigests


class ToolControl(EngineControl):
    """An EngineControl with the commands that only tools and tests send."""

    async def fingerprints(self) -> list[Mapping[str, int]]:
        """Return a hash of the bytes of every parameter, per target rank."""
        return [reply.digests for reply in await self.ask(Fingerprint())]

    async def dump(self, folder: Path) -> None:
        """Let every target rank write its parameters into a file of `folder`."""
        await self.ask(Dump(folder=str(folder)))

    async def start_recording(self, transfer: TransferSpec) -> None:
        """Let every target rank record the outputs of its modules."""
        await self.ask(StartRecording(transfer=transfer))

    async def write_recording(self, folder: Path) -> list[WeightDigests]:
        """Let every target rank write its recording into a file of `folder`; return the digests of its weights."""
        return [reply.digests for reply in await self.ask(WriteRecording(folder=str(folder)))]
