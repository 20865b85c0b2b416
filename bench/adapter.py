"""Time of publishing an adapter against publishing the whole model, and what a publish takes from running requests.

This process stands in for the only trainer rank. An adapter goes the way of a run, into the slot that a real engine has
for it: on a CPU over gloo, as between nodes; on a GPU the engine reads it from this process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TypeAlias, TypeVar

import torch

from bench.figures import Failure, Figure
from bench.one_engine import (
    NUM_REPEATS,
    NUM_WARMUPS,
    TIMEOUT_S,
    Server,
    full_publish,
    generator_of,
    random_prompts,
    random_weights,
    seconds_of,
    serving,
    transfer_to,
)
from megarl.config.lora import LoraConfig
from megarl.config.roles import ModelParallelConfig
from megarl.config.section import Device
from megarl.engine.commands import Rendezvous
from megarl.engine.control import EngineControl
from megarl.engine.fleet import Engine
from megarl.engine.process import EngineAdapters
from megarl.errors import MegarlError
from megarl.planner.memory import adapter_versions
from megarl.ranks.calls import ActorCalls
from megarl.ranks.ranks import RankGroup
from megarl.serving.adapter_publisher import AdapterPublisher, ServedAdapters
from megarl.system.network import LOOPBACK
from megarl.types import ONE_POLICY, PolicyVersion
from megarl.weights.algebra.plan import Plan
from megarl.weights.executors.digest import fastest_digest
from megarl.weights.executors.group import TransferGroup
from megarl.weights.executors.transfer import Sender
from megarl.weights.layouts.lora import LoraShape
from megarl.weights.layouts.transfer_spec import TransferSpec

Outcome: TypeAlias = Figure | Failure
Result = TypeVar("Result")

GOAL = 20
"""An adapter should be published this many times as fast as its whole model."""
_NUM_LOADED = 3
_NUM_TURNS = 2
MOST_TIMES = 1.3
"""Several policies should take at most this many times as long as one for the same tokens."""
_POLICIES = ("first", "second", "third", "fourth")
_POLICY_TURNS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """The requests that run while adapters are published."""

    num: int
    prompt_tokens: int
    response_tokens: int


REQUESTS: Mapping[Device, Requests] = {
    "cuda": Requests(num=128, prompt_tokens=64, response_tokens=256),
    "cpu": Requests(num=8, prompt_tokens=16, response_tokens=48),
}


async def measure_adapter(
    model: str, folder: Path, options: Mapping[str, object], *, device: Device, rank: int
) -> AsyncIterator[Outcome]:
    """Measure an engine without adapters and one with adapters of this rank, one after the other."""
    lora = LoraConfig(rank=rank, alpha=2 * rank)
    adapters = EngineAdapters(rank=rank, modules=lora.modules, num_loaded=_NUM_LOADED)
    try:
        async with AsyncExitStack() as stack:
            plain = serving(model, folder / "full", options, device=device)
            adapted = serving(model, folder / "adapted", options, device=device, adapters=adapters)
            # Both start at the same time: that takes longer than everything else.
            server, other = await asyncio.gather(*(stack.enter_async_context(each) for each in (plain, adapted)))
            full = await full_publish(server)
            full_s = await seconds_of(full.send)
            bench = _Bench.of(other, lora, folder)
            stack.callback(bench.ranks.close)
            stack.push_async_callback(bench.publisher.close)
            ours_s = await _publish_seconds(bench)
            yield _publish_figure(bench, ours_s=ours_s, full_s=full_s, full_bytes=full.num_bytes)
            async for figure in _measure_requests(bench, REQUESTS[device]):
                yield figure
    except (MegarlError, RuntimeError, TimeoutError) as error:
        yield Failure(part="adapter", reason=f"{type(error).__name__}: {error}"[:500])


async def measure_policies(
    model: str, folder: Path, options: Mapping[str, object], *, device: Device, rank: int
) -> AsyncIterator[Outcome]:
    """Measure the time of the same requests to one engine, of one policy and of four, in turn."""
    lora, requests = LoraConfig(rank=rank, alpha=2 * rank), REQUESTS[device]
    num_loaded = len(_POLICIES) * adapter_versions(0)
    adapters = EngineAdapters(rank=rank, modules=lora.modules, num_loaded=num_loaded)
    try:
        async with AsyncExitStack() as stack:
            serving_all = serving(model, folder, options, device=device, adapters=adapters)
            server = await stack.enter_async_context(serving_all)
            for policy in _POLICIES:
                bench = _Bench.of(server, lora, folder, policy=policy)
                stack.callback(bench.ranks.close)
                stack.push_async_callback(bench.publisher.close)
                await bench.publish()
            seconds = await _generate_in_turn(server, requests)
    except (MegarlError, RuntimeError, TimeoutError) as error:
        yield Failure(part="policies", reason=f"{type(error).__name__}: {error}"[:500])
        return
    of_one, of_all = (min(seconds[num]) for num in (1, len(_POLICIES)))
    tokens = f"{requests.num} requests of {requests.response_tokens} tokens"
    yield Figure(
        key="policies",
        name=f"{tokens}, by {len(_POLICIES)} adapters of rank {rank} at once (goal: ratio {1 / MOST_TIMES:.2f})",
        value=of_all,
        unit="s",
        against=f"by one of them, {of_one:.2f} s",
        ratio=of_one / of_all,
    )


async def _generate_in_turn(server: Server, requests: Requests) -> dict[int, list[float]]:
    """Return the seconds of the same prompts, by the number of policies that they are divided among."""
    prompts = random_prompts(requests.num, requests.prompt_tokens)
    generators = [
        replace(
            generator_of(server, num_rollouts=1, max_response_tokens=requests.response_tokens),
            policy=policy,
        )
        for policy in _POLICIES
    ]
    seconds: dict[int, list[float]] = {1: [], len(_POLICIES): []}
    for turn in range(1 + _POLICY_TURNS):
        for num, times in seconds.items():
            start = time.perf_counter()
            await asyncio.gather(*(generators[index % num].generate(prompt) for index, prompt in enumerate(prompts)))
            if turn:  # kernels are compiled in the first
                times.append(time.perf_counter() - start)
    return seconds


@dataclass(eq=False, kw_only=True)
class _TimedPublisher(AdapterPublisher):
    held_s: list[float] = field(default_factory=list)
    """Seconds in which the requests of the engine waited."""

    async def _fill(
        self, loaded: Sequence[Engine], version: PolicyVersion, name: str, *, is_locked: bool = False
    ) -> Plan:
        start = time.perf_counter()
        plan = await super()._fill(loaded, version, name, is_locked=is_locked)
        self.held_s.append(time.perf_counter() - start)
        return plan


@dataclass(slots=True, kw_only=True)
class _Bench:
    server: Server
    publisher: _TimedPublisher
    ranks: _OneRank
    version: int = 0

    @classmethod
    def of(cls, server: Server, lora: LoraConfig, folder: Path, *, policy: str = ONE_POLICY) -> _Bench:
        ranks = _OneRank(server.device)
        transfer = replace(transfer_to(server), lora=LoraShape.of(lora))
        publisher = _TimedPublisher(
            ranks=ranks,
            fleet=server.fleet,
            control=EngineControl(server.fleet, timeout_s=TIMEOUT_S, holds_requests=True),
            transfer=lambda: transfer,
            timeout_s=TIMEOUT_S,
            host=LOOPBACK,
            policy=policy,
            adapters=ServedAdapters(fields=lora.peft_fields(base=folder, modules=lora.modules), num_loaded=_NUM_LOADED),
        )
        return cls(server=server, publisher=publisher, ranks=ranks)

    async def publish(self) -> float:
        """Return the seconds of a publish."""
        self.version += 1
        return (await self.publisher.publish(PolicyVersion(self.version))).seconds


class _OneRank(RankGroup[ActorCalls]):
    """The trainer rank, which is this process."""

    def __init__(self, device: Device) -> None:
        super().__init__(
            "actor", [], split=ModelParallelConfig(), timeout_s=TIMEOUT_S, run_folder=Path(), device_lock=asyncio.Lock()
        )
        # As in a trainer rank.
        torch.set_num_threads(1)
        self._device = device
        self._group: TransferGroup | None = None
        self._sender: Sender | None = None
        self.send_s: list[float] = []

    async def _call_all(
        self,
        method: Callable[..., Result],
        arguments: Sequence[object],
        named: dict[str, object],
        *,
        waits_for_all: bool = False,
    ) -> list[Result]:
        return [await asyncio.to_thread(getattr(self, method.__name__), *arguments, **named)]

    def join(self, transfer: TransferSpec, rendezvous: Rendezvous) -> None:
        plan, is_cpu = transfer.plan(), transfer.is_cpu_engine
        self._group = TransferGroup.join(
            rendezvous.address,
            name=rendezvous.name,
            peer=0,
            num_peers=transfer.num_peers,
            timeout_s=TIMEOUT_S,
            backend=rendezvous.backend,
        )
        weights = random_weights(plan.source.by_rank[0].tensors, self._device)
        self._sender = Sender(
            plan, 0, weights, self._group, digest=fastest_digest(is_on_host=is_cpu), direct=transfer.direct
        )

    def send(self, version: int) -> dict[tuple[int, str], int]:
        assert self._sender is not None, "join comes first"
        start = time.perf_counter()
        digests = self._sender.send(version)
        self.send_s.append(time.perf_counter() - start)
        return digests

    def close(self) -> None:
        if self._group is not None:
            self._group.close()


async def _publish_seconds(bench: _Bench) -> float:
    """Return the median of publishes with time between them, as steps leave it, after some others."""
    times = []
    for _ in range(NUM_WARMUPS + NUM_REPEATS):
        times.append(await bench.publish())
        await bench.publisher.prepared()
    return median(times[NUM_WARMUPS:])


def _publish_figure(bench: _Bench, *, ours_s: float, full_s: float, full_bytes: int) -> Figure:
    num_bytes = sum(bench.publisher.transfer().plan().traffic.received_bytes.values())
    parts = {"requests wait": bench.publisher.held_s, "sent": bench.ranks.send_s}
    shown = ", ".join(f"{name} {1e3 * median(times):.0f}" for name, times in parts.items())
    return Figure(
        key="adapter publish",
        name=f"publish of an adapter of {num_bytes / 1e6:.0f} MB ({shown}; goal: ratio {GOAL})",
        value=1e3 * ours_s,
        unit="ms",
        against=f"publish of the whole model, {full_bytes / 1e9:.1f} GB in {1e3 * full_s:.0f} ms",
        ratio=full_s / ours_s,
    )


async def _measure_requests(bench: _Bench, requests: Requests) -> AsyncIterator[Figure]:
    """Compare the rate of the same requests without publishes, with one, and with one after the other, in turn."""
    prompts = random_prompts(requests.num, requests.prompt_tokens)
    generator = generator_of(bench.server, num_rollouts=1, max_response_tokens=requests.response_tokens)
    max_publishes = {"quiet": 0, "one": 1, "many": 1000}
    num_tokens, seconds, num_publishes = (dict.fromkeys(max_publishes, 0.0) for _ in range(3))

    async def generate() -> int:
        groups = await asyncio.gather(*(generator.generate(prompt) for prompt in prompts))
        return sum(len(rollout.token_ids) for group in groups for rollout in group.rollouts)

    await generate()
    for kind in tuple(max_publishes) * _NUM_TURNS:
        await bench.publish()
        start = time.perf_counter()
        generated = asyncio.create_task(generate())
        await asyncio.sleep(0)
        for _ in range(max_publishes[kind]):
            if generated.done():
                break
            await bench.publish()
            num_publishes[kind] += 1
        num_tokens[kind] += await generated
        seconds[kind] += time.perf_counter() - start
    quiet = num_tokens["quiet"] / seconds["quiet"]
    for kind, words in (("one", "one adapter is published"), ("many", "adapters are published one after the other")):
        lost_s = (seconds[kind] - num_tokens[kind] / quiet) / max(num_publishes[kind], 1)
        yield Figure(
            key=f"adapter requests, {kind}",
            name=f"{requests.num} requests of {seconds[kind] / _NUM_TURNS:.1f} s, while {words} "
            f"({num_publishes[kind]:.0f} in all; each takes {1e3 * lost_s:.0f} ms from them)",
            value=num_tokens[kind] / seconds[kind],
            unit="tokens/s",
            against=f"without publishes, {quiet:.0f} tokens/s",
            ratio=num_tokens[kind] * seconds["quiet"] / (seconds[kind] * num_tokens["quiet"]),
        )
