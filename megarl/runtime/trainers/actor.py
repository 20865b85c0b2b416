"""The weights of the actor as a run publishes them: all its ranks send their shares to the engines."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from megarl.checkpoint.manifest import FileDigest
from megarl.rollout.commands import Rendezvous
from megarl.runtime.stored_adapter import StoredAdapter
from megarl.runtime.trainers.ranks import RankGroup
from megarl.train.interface import ActorCalls
from megarl.weights.layouts.transfer_spec import TransferSpec


class PublishingCalls(ActorCalls, Protocol):
    """Calls to an actor rank that can send its weights (`publishing.PublishingActor`)."""

    def join(self, transfer: TransferSpec, rendezvous: Rendezvous) -> None: ...

    def version(self) -> int: ...

    def send(self, version: int) -> dict[tuple[int, str], int]: ...

    def store_adapter(self, version: int, source_folder: Path) -> StoredAdapter | None: ...


class ActorWeights:
    """The weights of all actor ranks, as a publisher needs them."""

    def __init__(self, ranks: RankGroup[PublishingCalls]) -> None:
        self._ranks = ranks

    def at_rest(self) -> AbstractAsyncContextManager[None]:
        """Return a context in which no rank computes, so that weights do not change."""
        return self._ranks.turn

    async def join(self, transfer: TransferSpec, rendezvous: Rendezvous) -> None:
        await self._ranks.call(PublishingCalls.join, transfer, rendezvous)

    async def version(self) -> int:
        return (await self._ranks.call(PublishingCalls.version))[0]

    async def send(self, version: int) -> list[dict[tuple[int, str], int]]:
        return await self._ranks.call(PublishingCalls.send, version)

    async def store_adapter(self, version: int, source_folder: Path) -> StoredAdapter:
        """Put the adapter of the version that the ranks hold into the object store."""
        async with self._ranks.turn:
            stored = await self._ranks.call_to_end(PublishingCalls.store_adapter, version, source_folder)
        (adapter,) = (each for each in stored if each is not None)
        return adapter

    async def export(self, folder: Path, source_folder: Path) -> dict[str, FileDigest]:
        """Write the weights as a Hugging Face folder `model` in `folder`; return every file that a rank wrote."""
        async with self._ranks.turn:
            written = await self._ranks.call_to_end(PublishingCalls.export, folder, source_folder)
        return {name: digest for files in written for name, digest in files.items()}
