"""Publishes adapters beside a base that never changes: nothing is aborted or flushed.

Each version is loaded without values under a name of its own on every engine, and received in the slot that it has
there, as weights are. While the bytes arrive, requests wait between two tokens; then the name that new ones use is
switched. A request computes with one version from its first token to its last. A name is unloaded when no request holds
it: SGLang would wait for them, and hold back the next load meanwhile. Until the switch every engine serves the version
before.

Between two publishes, beside running requests, engines unload what no request holds and load the name of the next.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from megarl.config.recipe import Recipe
from megarl.engine import admin
from megarl.engine.fleet import Engine
from megarl.engine.lifecycle import FellBehind
from megarl.engine.process import EngineSpec
from megarl.errors import EngineError, WeightSyncError, WorkerError, first_few
from megarl.families.shape import ModelShape
from megarl.planner.memory import adapter_versions
from megarl.results import PublishResult
from megarl.serving.publisher import TransferPublisher
from megarl.types import PolicyVersion
from megarl.weights.algebra.plan import Plan

logger = logging.getLogger(__name__)

Compare: TypeAlias = Callable[[Sequence[Engine], PolicyVersion, str], Awaitable[Mapping[int, str]]]
"""Probes engines with the adapter of this name; returns a reason for each, by index, that differs from the trainer."""

_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedAdapters:
    """The adapters of a run, as its engines serve them."""

    fields: Mapping[str, object]
    """PEFT's configuration of each."""
    num_loaded: int
    """Versions of a policy that an engine has at most at a time."""

    @classmethod
    def of(cls, recipe: Recipe, shape: ModelShape, spec: EngineSpec) -> ServedAdapters | None:
        """Return the adapters of a run; None where engines get whole weights."""
        lora = recipe.model.served_lora
        if lora is None or spec.adapters is None:
            return None
        fields = lora.peft_fields(base=spec.model_folder, modules=lora.served_modules(shape))
        return cls(fields=fields, num_loaded=adapter_versions(recipe.train.max_staleness))


@dataclass(eq=False, kw_only=True)
class AdapterPublisher(TransferPublisher):
    """Its `control` lets requests wait during a command."""

    adapters: ServedAdapters
    _ahead: dict[Engine, tuple[str, asyncio.Task[str | None]]] = field(default_factory=dict, init=False)
    """The name that each engine loads for the next publish, and its `_load`."""
    _compare: tuple[Compare, int] | None = field(default=None, init=False)
    _num_published: int = field(default=0, init=False)
    _num_alive: int = field(default=0, init=False)

    def compare_with(self, compare: Compare, *, every: int) -> None:
        """Compare the engines with the trainer before the switch, in the first and then every `every`-th publish."""
        self._compare = compare, every

    async def publish(self, version: PolicyVersion) -> PublishResult:
        """Send the version to all reachable engines, then let new requests use it on those where that succeeded."""
        result = await super().publish(version)
        self._num_published += 1
        return replace(result, num_adapters=self._num_alive, max_adapters=self.adapters.num_loaded)

    async def prepared(self) -> None:
        """Return when all that was begun for the next publish is done."""
        if self._ahead:
            await asyncio.wait([loading for _, loading in self._ahead.values()])

    async def close(self) -> None:
        """Give up what was begun for the next publish."""
        for _, loading in self._ahead.values():
            loading.cancel()
        await self.prepared()
        self._ahead.clear()

    async def _deliver(
        self, roster: Sequence[Engine], version: PolicyVersion, *, is_catching_up: bool = False
    ) -> tuple[int, Plan]:
        """Let engines of the roster serve the version. Before the switch a failure changes nothing."""
        name, wait_s = self._new_name(version), 0.0 if is_catching_up else self.timeout_s
        outcomes = await asyncio.gather(*(self._have(engine, name, wait_s=wait_s) for engine in roster))
        reasons = {engine.index: why for engine, why in zip(roster, outcomes, strict=True) if why is not None}
        loaded = [engine for engine in roster if engine.index not in reasons]
        try:
            plan = await self._fill(loaded, version, name, is_locked=is_catching_up) if loaded else None
            if loaded and not is_catching_up:
                reasons |= await self._differences(loaded, version, name)
            serving = [engine for engine in loaded if engine.index not in reasons]
            if plan is None or not serving:
                why = first_few(list(reasons.values()))
                raise WeightSyncError(f"version {version} is served nowhere; engines keep the one before: {why}")
        except BaseException:
            await asyncio.gather(*(self._unload(engine, name) for engine in loaded))
            raise
        for engine in roster:
            if engine.index in reasons:
                self.fleet.report(engine, FellBehind(reason=reasons[engine.index]))
        if is_catching_up:
            for engine in serving:
                await self.fleet.joined(engine, adapter=name, policy=self.policy)
        else:
            await self.fleet.committed(version, serving, adapter=name, policy=self.policy)
        self._num_alive = max(len(self._names(engine)) for engine in serving)
        self._prepare(serving, version + 1)
        return len(serving), plan

    def _prepare(self, engines: Sequence[Engine], version: int) -> None:
        """Begin to load the adapter of this version. Another version, or a restarted engine, loads its own later."""
        name = self._new_name(version)
        for engine in engines:
            self._ahead[engine] = name, asyncio.create_task(self._load(engine, name, wait_s=self.timeout_s))

    async def _have(self, engine: Engine, name: str, *, wait_s: float) -> str | None:
        """Return None if the engine has the adapter now, loaded ahead or here, else the reason."""
        prepared, loading = self._ahead.pop(engine, (None, None))
        if loading is not None:
            if not wait_s:
                loading.cancel()  # it may wait for room
                await asyncio.wait([loading])
            elif (why := await loading) is not None:
                logger.info("engine=%d adapter=%s was not loaded ahead: %s", engine.index, prepared, why)
            elif prepared == name in engine.adapters:
                return None
        return await self._load(engine, name, wait_s=wait_s)

    async def _load(self, engine: Engine, name: str, *, wait_s: float) -> str | None:
        """Return None if the engine has the adapter now, without values, else the reason."""
        try:
            await self._make_room(engine, wait_s)
            # Recorded first: a load that was cut off may have succeeded.
            engine.adapters[name] += 0
            await admin.load_empty_adapter(engine.client, name, self.adapters.fields, timeout_s=self.timeout_s)
        except (EngineError, WeightSyncError) as error:
            return str(error)
        return None

    async def _fill(
        self, loaded: Sequence[Engine], version: PolicyVersion, name: str, *, is_locked: bool = False
    ) -> Plan:
        try:
            # Requests do not wait until ranks have updated another policy; `is_locked` says that they compute nothing.
            async with nullcontext() if is_locked else self.ranks.device_lock:
                link = await self._linked(loaded)
                await self._exchange(link, version, adapter=name)
        except (EngineError, WeightSyncError, WorkerError) as error:
            raise self._not_published(version, "engines keep the one before", error) from error
        return link.plan

    async def _differences(self, loaded: Sequence[Engine], version: PolicyVersion, name: str) -> Mapping[int, str]:
        if self._compare is None or self._num_published % self._compare[1]:
            return {}
        return await self._compare[0](loaded, version, name)

    async def _make_room(self, engine: Engine, wait_s: float) -> None:
        """Wait until one more version can be loaded: SGLang would refuse one beyond its slots."""
        deadline = time.monotonic() + wait_s
        await self._unload_unused(engine)
        while len(self._names(engine)) >= self.adapters.num_loaded:
            if time.monotonic() > deadline:
                held = sorted(engine.held_adapters.intersection(self._names(engine)))
                raise WeightSyncError(f"{engine}: no room for another adapter within {wait_s:g} s: {held}")
            await asyncio.sleep(_POLL_S)
            await self._unload_unused(engine)

    async def _unload_unused(self, engine: Engine) -> None:
        used = {engine.serves(self.policy).adapter, *engine.held_adapters}
        for name in [name for name in self._names(engine) if name not in used]:
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
        """Return a name that no engine has but for this publish: ranks that resumed publish some versions again."""
        loaded = {
            name
            for engine in self.fleet.engines
            for name in self._names(engine)
            if engine not in self._ahead or name != self._ahead[engine][0]
        }
        name, number = f"{self._prefix}{version}", 1
        while name in loaded:
            number += 1
            name = f"{self._prefix}{version}.{number}"
        return name

    def _names(self, engine: Engine) -> list[str]:
        """Return the names of this policy's versions that the engine has loaded."""
        return [name for name in engine.adapters if name is not None and name.startswith(self._prefix)]

    @property
    def _prefix(self) -> str:
        return f"{self.policy or 'policy'}@"
