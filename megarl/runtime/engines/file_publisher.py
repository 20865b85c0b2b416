"""Publishing by files, to engines that megarl did not start: a Hugging Face folder per version, which each one loads.

The trainer ranks write it as they write a checkpoint. An engine that loads weights in place can fail half-way, so one
that does not confirm the version is stale, whatever it serves; so is one that says another version afterwards.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from megarl.checkpoint.manifest import MODEL_FOLDER, FileDigest
from megarl.config.roles import EndpointConfig
from megarl.errors import CheckpointError, EngineError, MachineError, WeightSyncError
from megarl.results import PublishResult
from megarl.rollout.client import EngineClient, EngineEndpoint, EngineKeys
from megarl.rollout.fleet import Engine, Fleet
from megarl.types import JsonValue, PolicyVersion

logger = logging.getLogger(__name__)

PUBLISH_FOLDER = "published"
"""Inside the folder of the run."""
_PREFIX = "version_"


class ExportingRanks(Protocol):
    """The trainer ranks, as publishing by files needs them."""

    async def export(self, folder: Path, source_folder: Path, /) -> Mapping[str, FileDigest]:
        """Write the weights as a Hugging Face folder `model` in `folder`; return every file that a rank wrote."""
        ...


class FilePublisher:
    def __init__(
        self, *, ranks: ExportingRanks, fleet: Fleet, folder: Path, source_folder: Path, timeout_s: float
    ) -> None:
        """`folder` is where engines find what is published; `source_folder` has the configuration and tokenizer."""
        self._ranks = ranks
        self._fleet = fleet
        self._folder = folder
        self._source_folder = source_folder
        self._timeout_s = timeout_s

    async def connect(self) -> None:
        """Check that every engine generates with a model like the trainer's; the error names each that does not."""
        expected = json.loads((self._source_folder / "config.json").read_text())["architectures"]
        problems = await asyncio.gather(*(_problem(engine, expected) for engine in self._fleet.engines))
        found = [problem for problem in problems if problem is not None]
        if found:
            raise MachineError("; ".join(found))

    async def publish(self, version: PolicyVersion) -> PublishResult:
        started = time.monotonic()
        folder = self._folder / f"{_PREFIX}{version:08d}"
        files = await self._write(folder)
        engines = self._fleet.reachable
        with self._fleet.syncing(engines):
            reasons = await asyncio.gather(*(self._load(engine, folder / MODEL_FOLDER, version) for engine in engines))
        succeeded = [engine for engine, reason in zip(engines, reasons, strict=True) if reason is None]
        for engine, reason in zip(engines, reasons, strict=True):
            if reason is not None:
                await self._fleet.mark_stale(engine, reason)
        if not succeeded:
            told = "; ".join(filter(None, reasons)) or "no engine can be reached"
            raise WeightSyncError(f"version {version} was loaded nowhere: {told}")
        await self._fleet.committed(version, succeeded)
        await asyncio.to_thread(_prune, self._folder, folder)
        num_bytes = len(succeeded) * sum(file.num_bytes for file in files.values())
        seconds = time.monotonic() - started
        logger.info("published version=%d folder=%s engines=%d seconds=%.3f", version, folder, len(succeeded), seconds)
        return PublishResult(version=version, num_bytes=num_bytes, seconds=seconds, num_engines=len(succeeded))

    async def _write(self, folder: Path) -> Mapping[str, FileDigest]:
        # What is left of a run that was stopped in the middle of this.
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            return await self._ranks.export(folder, self._source_folder)
        except CheckpointError as error:
            raise WeightSyncError(f"{folder} was not written; engines keep what they have: {error}") from error

    async def _load(self, engine: Engine, folder: Path, version: PolicyVersion) -> str | None:
        """None where it serves `version` now, else why not."""
        try:
            await engine.client.load_weights_from_disk(folder, version=version, timeout_s=self._timeout_s)
            # Cached prefixes were computed with the old weights.
            await engine.client.flush_cache()
            info = await engine.client.model_info()
        except EngineError as error:
            return str(error)
        served = str(info.get("weight_version")), str(info.get("model_path"))
        if served != (str(version), str(folder)):
            return f"{engine}: says that it serves version {served[0]} of {served[1]} after {folder} was loaded"
        return None


def endpoints_of(configs: Sequence[EndpointConfig], *, device: str) -> list[EngineEndpoint]:
    """Where the engines are, with their keys."""
    assert device in ("cpu", "cuda"), device
    found = []
    for index, config in enumerate(configs):
        parts = urlsplit(config.url)
        assert parts.hostname is not None, f"{config.url} has no host"
        assert parts.port is not None, f"{config.url} has no port"
        api = _read_key(config.api_key_file)
        admin = api if config.admin_key_file is None else _read_key(config.admin_key_file)
        found.append(
            EngineEndpoint(
                index=index,
                host=parts.hostname,
                port=parts.port,
                # Weights go to a whole engine: how many ranks it has is its own business.
                tensor=1,
                device="cuda" if device == "cuda" else "cpu",
                keys=EngineKeys(api=api, admin=admin),
                scheme=parts.scheme,
            )
        )
    return found


def _read_key(path: Path | None) -> str:
    return "" if path is None else path.read_text().strip()


async def _problem(engine: Engine, architectures: Sequence[JsonValue]) -> str | None:
    client: EngineClient = engine.client
    try:
        info = await client.model_info()
    except EngineError as error:
        return f"{error}; roles.rollout.endpoints names engines that run already"
    if not info.get("is_generation"):
        return f"{engine} does not generate: it serves {info.get('model_path')}"
    if info.get("architectures") != list(architectures):
        return f"{engine} serves {info.get('architectures')}, model.path is {list(architectures)}"
    return None


def _prune(folder: Path, kept: Path) -> None:
    for path in folder.glob(f"{_PREFIX}*"):
        if path != kept:
            shutil.rmtree(path, ignore_errors=True)
