"""Publishes by files to engines that megarl did not start: they load one Hugging Face folder per version.

The trainer ranks write the folder as they write a checkpoint. An engine can fail in the middle of loading, so one that
does not confirm the version is stale; so is one that reports another version afterwards.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.checkpoint.manifest import MODEL_FOLDER, FileDigest
from megarl.engine import admin
from megarl.engine.client import EngineClient
from megarl.engine.fleet import Engine, Fleet
from megarl.errors import CheckpointError, EngineError, MachineError, WeightSyncError
from megarl.ranks.calls import ActorCalls
from megarl.ranks.ranks import RankGroup
from megarl.results import PublishResult
from megarl.types import JsonValue, PolicyVersion

logger = logging.getLogger(__name__)

_PREFIX = "version_"


@dataclass(eq=False, kw_only=True)
class FilePublisher:
    ranks: RankGroup[ActorCalls]
    fleet: Fleet
    folder: Path
    """Engines load from it."""
    source_folder: Path
    """Has the configuration and tokenizer."""
    timeout_s: float

    async def connect(self) -> None:
        """Check that every engine generates with the trainer's architecture; the error names each that does not."""
        expected = json.loads((self.source_folder / "config.json").read_text())["architectures"]
        problems = await asyncio.gather(*(_problem(engine, expected) for engine in self.fleet.engines))
        if any(problems):
            raise MachineError("; ".join(filter(None, problems)))

    async def publish(self, version: PolicyVersion) -> PublishResult:
        started = time.monotonic()
        folder = self.folder / f"{_PREFIX}{version:08d}"
        files = await self._write(folder)
        engines = self.fleet.reachable
        with self.fleet.syncing(engines):
            reasons = await asyncio.gather(*(self._load(engine, folder / MODEL_FOLDER, version) for engine in engines))
        succeeded = [engine for engine, reason in zip(engines, reasons, strict=True) if reason is None]
        for engine, reason in zip(engines, reasons, strict=True):
            if reason is not None:
                await self.fleet.mark_stale(engine, reason)
        if not succeeded:
            all_reasons = "; ".join(filter(None, reasons)) or "no engine can be reached"
            raise WeightSyncError(f"version {version} was loaded nowhere: {all_reasons}")
        await self.fleet.committed(version, succeeded)
        await asyncio.to_thread(_prune, self.folder, folder)
        num_bytes = len(succeeded) * sum(file.num_bytes for file in files.values())
        seconds = time.monotonic() - started
        logger.info("published version=%d folder=%s engines=%d seconds=%.3f", version, folder, len(succeeded), seconds)
        return PublishResult(version=version, num_bytes=num_bytes, seconds=seconds, num_engines=len(succeeded))

    async def _write(self, folder: Path) -> Mapping[str, FileDigest]:
        # A run that was stopped while it published may have left it.
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            async with self.ranks.device_lock:
                written = await self.ranks.call_to_end(ActorCalls.export, folder, self.source_folder)
        except CheckpointError as error:
            raise WeightSyncError(f"{folder} was not written; engines keep what they have: {error}") from error
        return {name: digest for files in written for name, digest in files.items()}

    async def _load(self, engine: Engine, folder: Path, version: PolicyVersion) -> str | None:
        """Return None if the engine serves `version` now, else the reason."""
        try:
            await admin.load_weights_from_disk(engine.client, folder, version=version, timeout_s=self.timeout_s)
            # Cached prefixes were computed with the old weights.
            await engine.client.flush_cache()
            info = await admin.model_info(engine.client)
        except EngineError as error:
            return str(error)
        served = str(info.get("weight_version")), str(info.get("model_path"))
        if served != (str(version), str(folder)):
            return f"{engine}: reports version {served[0]} of {served[1]} after {folder} was loaded"
        return None


async def _problem(engine: Engine, architectures: Sequence[JsonValue]) -> str | None:
    client: EngineClient = engine.client
    try:
        info = await admin.model_info(client)
    except EngineError as error:
        return f"{error}; the engines of roles.rollout.endpoints must be running"
    if not info.get("is_generation"):
        return f"{engine} does not generate: it serves {info.get('model_path')}"
    if info.get("architectures") != list(architectures):
        return f"{engine} serves {info.get('architectures')}, model.path is {list(architectures)}"
    return None


def _prune(folder: Path, newest: Path) -> None:
    for path in folder.glob(f"{_PREFIX}*"):
        if path != newest:
            shutil.rmtree(path, ignore_errors=True)
