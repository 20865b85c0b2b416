"""The end of a step's generation on a real engine: the orders of `bench.tail`, measured and simulated.

Each answer has the length that was drawn for it: the engine ignores end tokens. The simulation gets the time of a token
at some numbers of requests from the same engine, and what it costs when a request begins, from requests without an
order.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import aiohttp
import numpy as np

from bench.figures import Failure, Figure
from bench.one_engine import Server, full_publish, generator_of, random_prompts, serving
from bench.tail import (
    LAST,
    ORDERS,
    Engines,
    Step,
    TailFigure,
    World,
    made_step,
    requests_of,
    simulate,
    tail_figures,
)
from megarl.config.section import Device
from megarl.errors import EngineError, MegarlError
from megarl.planner.deployment import StepWorkload

Outcome = Figure | Failure | dict[str, object]
Result = TypeVar("Result")

_PART_TIMEOUT_S = 150.0
_ALIKE = 0.5
"""Share of the variance of lengths that is between prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TailLoad:
    """The requests of a step: about two for each that an engine computes at a time, as in `recipes/dapo_32b.yaml`."""

    num_steps: int
    num_prompts: int
    num_rollouts: int
    running_requests: int
    prompt_tokens: int
    mean_response_tokens: int
    max_response_tokens: int

    @property
    def workload(self) -> StepWorkload:
        return StepWorkload(
            mean_prompt_tokens=self.prompt_tokens,
            mean_response_tokens=self.mean_response_tokens,
            max_response_tokens=self.max_response_tokens,
        )

    @property
    def batches(self) -> list[int]:
        """Numbers of requests at which the time of a token is measured."""
        return sorted({1, *(max(1, self.running_requests // part) for part in (8, 2, 1))})

    def steps(self) -> list[Step]:
        sizes = {"num_prompts": self.num_prompts, "num_rollouts": self.num_rollouts}
        return [made_step(self.workload, **sizes, alike=_ALIKE, seed=seed) for seed in range(self.num_steps)]

    def unordered(self) -> list[tuple[int, int]]:
        """Return requests of all lengths up to the mean of answers, in an order without a trend."""
        mean = self.mean_response_tokens
        lengths = replace(self.workload, mean_response_tokens=mean // 2, max_response_tokens=mean)
        return [(place % self.num_prompts, n) for place, n in enumerate(lengths.lengths(2 * self.running_requests))]


LOADS: Mapping[Device, TailLoad] = {
    "cuda": TailLoad(
        num_steps=2,
        num_prompts=32,
        num_rollouts=8,
        running_requests=128,
        prompt_tokens=64,
        mean_response_tokens=512,
        max_response_tokens=2048,
    ),
    "cpu": TailLoad(
        num_steps=2,
        num_prompts=8,
        num_rollouts=2,
        running_requests=8,
        prompt_tokens=8,
        mean_response_tokens=12,
        max_response_tokens=48,
    ),
}


async def measure_tail_engine(
    model: str, folder: Path, options: Mapping[str, object], *, device: Device = "cuda"
) -> AsyncIterator[Outcome]:
    """Measure each order of some steps in turn, and compare the times with simulated ones.

    A run that fails or is late yields a Failure, and its step counts for no order.
    """
    load = LOADS[device]
    exact = {**options, "preferred_sampling_params": {"ignore_eos": True}}
    began = time.perf_counter()
    async with serving(model, folder, exact, device=device, max_requests=load.running_requests) as server:
        await (await full_publish(server)).send()
        yield {"tail, seconds until ready": round(time.perf_counter() - began, 1)}
        bench = _Bench(server, load)
        found = await _tried("tail, the engine's times", bench.engines())
        if isinstance(found, Engines):
            shown = {size: round(1e3 * found.step_s(size, 0), 2) for size in load.batches}
            yield {"tail, ms of a token by requests": shown, "tail, ms of a begin": round(1e3 * found.begin_s, 2)}
        else:
            yield found
        ended: dict[str, list[list[float]]] = {name: [] for name in ORDERS}
        measured = list[Step]()
        for number, step in enumerate(load.steps()):
            runs = {name: await _tried(f"tail, step {number}, {name}", bench.ends(step, name)) for name in ORDERS}
            for failure in runs.values():
                if isinstance(failure, Failure):
                    yield failure
            whole = {name: ends for name, ends in runs.items() if not isinstance(ends, Failure)}
            yield {f"tail, step {number}, seconds": {name: round(ends[-1], 2) for name, ends in whole.items()}}
            if len(whole) == len(ORDERS):
                measured.append(step)
                for name, ends in whole.items():
                    ended[name].append(ends)
        if not measured:
            return
        first = next(iter(ORDERS))
        again = await _tried(f"tail, {first}, again", bench.ends(measured[0], first))
        yield (
            again
            if isinstance(again, Failure)
            else {"tail, the first run again, times": round(again[-1] / ended[first][0][-1], 4)}
        )
    simulated = None
    if isinstance(found, Engines):
        simulated = simulate(found, measured, prompt_tokens=load.prompt_tokens)
    for outcome in compared(tail_figures(ended), simulated, load):
        yield outcome


def compared(engine: Sequence[TailFigure], simulated: Sequence[TailFigure] | None, load: TailLoad) -> list[Outcome]:
    """Return the figures of orders, with simulated ones if there are any, and whether both rank the orders alike."""
    outcomes = list[Outcome]()
    others: Sequence[TailFigure | None] = simulated or [None] * len(engine)
    requests = f"{load.num_prompts} x {load.num_rollouts} answers, {load.running_requests} at once"
    for each, other in zip(engine, others, strict=True):
        shown = ""
        if other is not None:
            shown = f"; simulated {other.seconds:.2f} s, {other.ratio:.3f} of it, last {LAST:.0%} take {other.tail:.0%}"
        outcomes.append(
            Figure(
                key=f"tail, {each.order}",
                name=f"{requests}, {each.order}: {each.ratio:.3f} of the time in the data's order, "
                f"last {LAST:.0%} take {each.tail:.0%}{shown}",
                value=each.seconds,
                unit="s",
                against=f"as the data has them, {engine[0].seconds:.2f} s",
                ratio=1 / each.ratio,
            )
        )
    if simulated is not None:
        ranks = {name: _ranked(figures) for name, figures in (("engine", engine), ("simulator", simulated))}
        outcomes.append({"tail, fastest first": {**ranks, "agree": ranks["engine"] == ranks["simulator"]}})
    return outcomes


def _ranked(figures: Sequence[TailFigure]) -> list[str]:
    return [each.order for each in sorted(figures, key=lambda each: each.seconds)]


async def _tried(part: str, call: Awaitable[Result]) -> Result | Failure:
    try:
        async with asyncio.timeout(_PART_TIMEOUT_S):
            return await call
    except TimeoutError:
        return Failure(part=part, reason=f"not done within {_PART_TIMEOUT_S:.0f} s")
    except (MegarlError, RuntimeError, aiohttp.ClientError) as error:
        return Failure(part=part, reason=f"{type(error).__name__}: {error}"[:500])


@dataclass(frozen=True, slots=True)
class _Bench:
    server: Server
    load: TailLoad

    async def ends(self, step: Step, order: str) -> list[float]:
        return await self._ask(requests_of(step, ORDERS[order]))

    async def engines(self) -> Engines:
        """Measure what the engine takes for a token, and for a request that begins."""
        load = self.load
        token_s = [await self._token_s(size) for size in load.batches]
        still = Engines(
            step_s=_between(load.batches, token_s),
            num=1,
            num_running=load.running_requests,
            most_outstanding=self.server.role.outstanding_requests,
        )
        seconds = min([(await self._ask(load.unordered()))[-1] for _ in range(2)])
        return replace(still, begin_s=begin_s(still, load, seconds))

    async def _token_s(self, size: int) -> float:
        """Return the time of a token for each of `size` requests; what they cost together is left out."""
        many, few = self.load.mean_response_tokens, self.load.mean_response_tokens // 4
        # The first ones compile kernels.
        _, short, long = [(await self._ask([(0, length)] * size))[-1] for length in (2, few, many)]
        return (long - short) / (many - few)

    async def _ask(self, requests: Sequence[tuple[int, int]]) -> list[float]:
        """Ask for all answers at once, in this order; return the times at which they were there."""
        server, ended = self.server, list[float]()
        prompts = random_prompts(self.load.num_prompts, self.load.prompt_tokens, vocab=server.shape.vocab)
        await server.client.flush_cache()
        start = time.perf_counter()

        async def one(seed: int, prompt: int, length: int) -> None:
            generator = replace(generator_of(server, num_rollouts=1, max_response_tokens=length), seed=seed)
            (rollout,) = (await generator.generate(prompts[prompt])).rollouts
            ended.append(time.perf_counter() - start)
            if len(rollout.token_ids) != length:
                raise EngineError(f"{server.client.endpoint}: {len(rollout.token_ids)} tokens, asked for {length}")

        asked = (one(seed, prompt, length) for seed, (prompt, length) in enumerate(requests))
        for error in await asyncio.gather(*asked, return_exceptions=True):
            if error is not None:
                raise error
        return ended


def begin_s(still: Engines, load: TailLoad, seconds: float) -> float:
    """Return what a begin must cost for the requests without an order to take so long."""
    step_s = still.step_s(load.running_requests, 0)

    def simulated(begin: float) -> float:
        return World(replace(still, begin_s=begin), prompt_tokens=load.prompt_tokens).answer(load.unordered())[-1]

    without = simulated(0.0)
    return max(0.0, step_s * (seconds - without) / (simulated(step_s) - without))


def _between(sizes: Sequence[int], token_s: Sequence[float]) -> Callable[[int, float], float]:
    # Contexts cost little here: those of all requests are far smaller than the weights.
    return lambda running, _context: float(np.interp(running, sizes, token_s))
