"""Episodes of several turns on a real engine, next to the same tokens in one turn each.

All are asked for at once, and a turn begins when the one before is over, with its tokens and a result before it: as
with a tool that answers at once. Random weights; turns have lengths as those of GSM8K with a calculator.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np

from bench.figures import Figure
from bench.one_engine import Server, full_publish, serving
from megarl.config.section import Device
from megarl.engine.client import GenerateRequest
from megarl.engine.reply import Expectation, read_response
from megarl.errors import EngineError
from megarl.types import PolicyVersion

_NUM_RUNS = 2
"""The faster one counts: the first one compiles kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnsLoad:
    num_episodes: int
    num_turns: int = 4
    mean_tokens: int = 35
    prompt_tokens: int = 100
    result_tokens: int = 12

    def episodes(self) -> list[list[int]]:
        """Return the tokens of each turn."""
        random = np.random.default_rng(0)
        shape = (self.num_episodes, self.num_turns)
        lengths = np.maximum(1, random.exponential(self.mean_tokens, shape).astype(int))
        return [[int(length) for length in turns] for turns in lengths]


LOADS: Mapping[Device, TurnsLoad] = {"cuda": TurnsLoad(num_episodes=1024), "cpu": TurnsLoad(num_episodes=8)}


async def measure_turns(
    model: str, folder: Path, options: Mapping[str, object], *, device: Device = "cuda"
) -> AsyncIterator[Figure | dict[str, object]]:
    load = LOADS[device]
    exact = {**options, "preferred_sampling_params": {"ignore_eos": True}}
    async with serving(model, folder, exact, device=device, max_requests=load.num_episodes) as server:
        await (await full_publish(server)).send()
        bench = _Bench(server, load, count())
        episodes = load.episodes()
        seconds = {
            name: min([await bench.seconds(turns) for _ in range(_NUM_RUNS)])
            for name, turns in (("turns", episodes), ("whole", [[sum(turns)] for turns in episodes]))
        }
    num_tokens = sum(map(sum, episodes))
    yield Figure(
        key=f"turns, {model}",
        name=f"{model}: {load.num_episodes} episodes at once, {load.num_turns} turns of {load.mean_tokens} tokens in "
        f"the mean, {seconds['turns']:.2f} s",
        value=num_tokens / seconds["turns"],
        unit="tokens/s",
        against=f"the same tokens in one turn each, {seconds['whole']:.2f} s",
        ratio=seconds["whole"] / seconds["turns"],
    )


@dataclass(frozen=True, slots=True)
class _Bench:
    server: Server
    load: TurnsLoad
    ids: count[int]

    async def seconds(self, episodes: Sequence[Sequence[int]]) -> float:
        await self.server.client.flush_cache()
        start = time.perf_counter()
        await asyncio.gather(*(self._play(seed, turns) for seed, turns in enumerate(episodes)))
        return time.perf_counter() - start

    async def _play(self, seed: int, turns: Sequence[int]) -> None:
        random = np.random.default_rng(seed)

        def some(num_tokens: int) -> tuple[int, ...]:
            return tuple(random.integers(1000, self.server.shape.vocab, num_tokens).tolist())

        history = some(self.load.prompt_tokens)
        for num_tokens in turns:
            request = GenerateRequest(
                rid=f"turn-{next(self.ids)}", input_ids=history, max_new_tokens=num_tokens, temperature=1.0
            )
            version = PolicyVersion(1)
            expected = Expectation(
                vocab=self.server.shape.vocab,
                max_response_tokens=num_tokens,
                eos_ids=frozenset(),
                version=version,
                newest_version=version,
            )
            response = read_response((await self.server.client.generate(request)).content, expected)
            if len(response.token_ids) != num_tokens:
                raise EngineError(f"{request.rid}: {len(response.token_ids)} tokens, asked for {num_tokens}")
            history = (*history, *response.token_ids.tolist(), *some(self.load.result_tokens))
