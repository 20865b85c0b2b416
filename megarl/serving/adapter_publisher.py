"""Publishes adapters beside a base that never changes: no pause, no abort, no flush of a cache.

Each version is loaded under a name of its own on every engine; then the name that new requests use is switched. A
request computes with one version from its first token to its last. A name is unloaded when no request holds it: SGLang
would wait for them, and hold back the next load meanwhile. Until the switch every engine serves the version before.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from megarl.cluster.stored_adapter import StoredAdapter
from megarl.config.recipe import ModelConfig
from megarl.engine import admin
from megarl.engine.fleet import Engine, Fleet
from megarl.engine.lifecycle import EngineState, FellBehind
from megarl.engine.process import EngineAdapters, EngineSpec
from megarl.errors import EngineError, WeightSyncError, first_few
from megarl.families.shape import ModelShape
from megarl.ranks.calls import ActorCalls
from megarl.ranks.ranks import RankGroup
from megarl.results import PublishResult
from megarl.serving.processes import Engines
from megarl.types import PolicyVersion
from megarl.weights.algebra.slices import TensorSpec
from megarl.weights.layouts.canonical import canonical_tensors
from megarl.weights.layouts.lora import LoraShape, served_tensors

logger = logging.getLogger(__name__)

Compare: TypeAlias = Callable[[Sequence[Engine], PolicyVersion, str], Awaitable[Mapping[int, str]]]
"""Probes engines with the adapter of this name; returns a reason for each, by index, that differs from the trainer."""

PlaceAdapter: TypeAlias = Callable[[int, StoredAdapter, float], AbstractAsyncContextManager[Path]]
"""Writes an adapter to the nodes of the engine of an index, within a time; yields the folder. See `Engines`."""

_POLL_S = 0.05
_MAX_UNEXPLAINED = 2
"""Failures after which every engine still answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedAdapters:
    """The adapters of a run, as its engines serve them."""

    place: PlaceAdapter
    base_folder: Path
    tensors: Mapping[str, TensorSpec]
    limits: EngineAdapters

    @classmethod
    def of(cls, model: ModelConfig, shape: ModelShape, spec: EngineSpec, engines: Engines) -> ServedAdapters | None:
        """Return the adapters of a model; None where its own weights are trained."""
        if model.lora is None or spec.adapters is None:
            return None
        tensors = served_tensors(canonical_tensors(shape), LoraShape.of(model.lora), dtype=spec.dtype)
        return cls(place=engines.placed_adapter, base_folder=spec.model_folder, tensors=tensors, limits=spec.adapters)


@dataclass(eq=False, kw_only=True)
class AdapterPublisher:
    ranks: RankGroup[ActorCalls]
    fleet: Fleet
    place: PlaceAdapter
    base_folder: Path
    tensors: Mapping[str, TensorSpec]
    """All that an adapter consists of."""
    num_loaded: int
    """Versions that an engine has at most at a time."""
    timeout_s: float
    failed: Callable[[PolicyVersion, str], None] = lambda _version, _reason: None
    _compare: tuple[Compare, int] | None = field(default=None, init=False)
    _num_published: int = field(default=0, init=False)
    _num_alive: int = field(default=0, init=False)
    _served: StoredAdapter | None = field(default=None, init=False)
    _publish_lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    """Held during a publish: versions are loaded one after the other."""

    def compare_with(self, compare: Compare, *, every: int) -> None:
        """Compare the engines with the trainer before the switch, in the first and then every `every`-th publish."""
        self._compare = compare, every

    async def publish(self, version: PolicyVersion) -> PublishResult:
        """Load the version on all reachable engines, then let new requests use it on those where that succeeded."""
        async with self._publish_lock:
            started = time.monotonic()
            stored = await self._store(version)
            self._check(stored)
            engines = await self._deliver_somewhere(stored)
            self._served = stored
            self._num_published += 1
            seconds = time.monotonic() - started
        num_bytes = len(engines) * stored.num_bytes
        logger.info("published adapter version=%d engines=%d seconds=%.3f", version, len(engines), seconds)
        return PublishResult(
            version=version,
            num_bytes=num_bytes,
            seconds=seconds,
            num_engines=len(engines),
            num_adapters=self._num_alive,
            max_adapters=self.num_loaded,
        )

    async def _store(self, version: PolicyVersion) -> StoredAdapter:
        """Put the adapter of the version that the ranks hold into the object store."""
        async with self.ranks.device_lock:
            of_ranks = await self.ranks.call_to_end(ActorCalls.store_adapter, version, self.base_folder)
        (stored,) = (each for each in of_ranks if each is not None)
        return stored

    async def catch_up(self, engine: Engine) -> bool:
        """Load the committed version on a stale engine; return False if there is none, or if it is not stored here."""
        async with self._publish_lock:
            stored = self._served
            if stored is None or engine.state is not EngineState.STALE:
                return False
            if stored.version != self.fleet.committed_version:
                return False
            name = self._new_name(stored.version)
            with self.fleet.syncing([engine]):
                reason = await self._load(engine, stored, name)
            if reason is not None:
                raise WeightSyncError(reason)
            await self.fleet.joined(engine, adapter=name)
            await self._unload_unused(engine)
            return True

    def _check(self, stored: StoredAdapter) -> None:
        """Compare what the trainer stored with what the engines expect: half an adapter would be served unnoticed."""
        wrong = [
            f"{name} is {stored.tensors.get(name, 'missing')}, expected {spec}"
            for name, spec in self.tensors.items()
            if stored.tensors.get(name) != spec
        ]
        wrong += [f"{name} is unexpected" for name in stored.tensors if name not in self.tensors]
        if wrong:
            raise WeightSyncError(f"adapter of version {stored.version} is not sent: {first_few(wrong)}")

    async def _deliver_somewhere(self, stored: StoredAdapter) -> list[Engine]:
        num_unexplained = 0
        while True:
            roster = await self.fleet.any_reachable()
            try:
                return await self._deliver(roster, stored)
            except WeightSyncError as error:
                logger.info("publish failed version=%d engines=%d reason=%s", stored.version, len(roster), error)
                self.failed(PolicyVersion(stored.version), str(error))
                if all(await asyncio.gather(*(self.fleet.examine(engine, str(error)) for engine in roster))):
                    num_unexplained += 1
                    if num_unexplained > _MAX_UNEXPLAINED:
                        raise

    async def _deliver(self, roster: Sequence[Engine], stored: StoredAdapter) -> list[Engine]:
        """Return the engines that serve the version now. Before the switch a failure changes nothing."""
        version, name = PolicyVersion(stored.version), self._new_name(stored.version)
        with self.fleet.syncing(roster):
            outcomes = await asyncio.gather(*(self._load(engine, stored, name) for engine in roster))
        reasons = {engine.index: why for engine, why in zip(roster, outcomes, strict=True) if why is not None}
        loaded = [engine for engine in roster if engine.index not in reasons]
        if loaded and self._compare is not None and self._num_published % self._compare[1] == 0:
            reasons |= await self._compare[0](loaded, version, name)
        serving = [engine for engine in loaded if engine.index not in reasons]
        if not serving:
            await asyncio.gather(*(self._unload(engine, name) for engine in loaded))
            raise WeightSyncError(
                f"version {version} is served nowhere; engines keep the one before: {first_few(list(reasons.values()))}"
            )
        for engine in roster:
            if engine.index in reasons:
                self.fleet.report(engine, FellBehind(reason=reasons[engine.index]))
        await self.fleet.committed(version, serving, adapter=name)
        self._num_alive = max(len(_names(engine)) for engine in serving)
        await asyncio.gather(*(self._unload_unused(engine) for engine in serving))
        return serving

    async def _load(self, engine: Engine, stored: StoredAdapter, name: str) -> str | None:
        """Return None if the engine has the adapter now, else the reason."""
        try:
            await self._make_room(engine)
            async with self.place(engine.index, stored, self.timeout_s) as folder:
                # Recorded first: a load that was cut off may have succeeded.
                engine.adapters[name] += 0
                await admin.load_adapter(engine.client, name, folder, timeout_s=self.timeout_s)
        except (EngineError, WeightSyncError) as error:
            return str(error)
        return None

    async def _make_room(self, engine: Engine) -> None:
        """Wait until one more version can be loaded: SGLang would unload one in use, and wait for it inside a load."""
        deadline = time.monotonic() + self.timeout_s
        await self._unload_unused(engine)
        while len(_names(engine)) >= self.num_loaded:
            if time.monotonic() > deadline:
                held = sorted(engine.held_adapters)
                raise WeightSyncError(f"{engine}: no room for another adapter within {self.timeout_s:g} s: {held}")
            await asyncio.sleep(_POLL_S)
            await self._unload_unused(engine)

    async def _unload_unused(self, engine: Engine) -> None:
        used = {engine.adapter, *engine.held_adapters}
        for name in [name for name in _names(engine) if name not in used]:
            await self._unload(engine, name)

    async def _unload(self, engine: Engine, name: str) -> None:
        """Forget an adapter that no request holds; one that the engine does not have is forgotten here alone."""
        adapters = engine.adapters
        try:
            await admin.unload_adapter(engine.client, name, timeout_s=self.timeout_s)
        except EngineError as error:
            logger.info("adapter=%s was not unloaded: %s", name, error)
        adapters.pop(name, None)

    def _new_name(self, version: int) -> str:
        """Return a name that no engine has loaded: ranks that resumed publish some versions again."""
        loaded = {name for engine in self.fleet.engines for name in _names(engine)}
        name, number = f"policy@{version}", 1
        while name in loaded:
            number += 1
            name = f"policy@{version}.{number}"
        return name


def _names(engine: Engine) -> list[str]:
    return [name for name in engine.adapters if name is not None]
