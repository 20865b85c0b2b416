"""Generation by megarl with default settings, next to SGLang's offline engine and next to its server asked directly.

The same prompts, seeds and lengths three times. Weights are random, so that every token is about equally likely: a
share of the vocabulary ends a response, which gives lengths with the mean and the limit of the workload.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path

import aiohttp
import numpy as np
import torch

from bench.figures import Figure
from bench.one_engine import Server, full_publish, random_prompts, serving
from megarl.config.recipe import Recipe
from megarl.config.roles import RolloutRoleConfig
from megarl.engine.client import GenerateRequest
from megarl.engine.process import graph_sizes
from megarl.env import kernel_caches, update_environment
from megarl.families import PUBLIC_MODELS
from megarl.planner.complete import complete
from megarl.planner.deployment import find_shapes
from megarl.planner.hardware import gpu_of
from megarl.rollout.generator import FleetGenerator, sampling_seed
from megarl.rollout.task import Sampling, Vocabulary
from megarl.types import Prompt

_NUM_RUNS = 2
"""Runs of a step, here and there, of which the better one counts: the first one compiles kernels."""
_NUM_STEPS = 2
"""Steps whose prompts follow one another without a pause, as with `max_staleness: 1`."""
_NUM_FIRST = 8
"""Prompts that are answered before anything is measured: kernels are compiled for the first ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationLoad:
    """The requests of a step: GSM8K's, as recorded with SmolLM2-135M-Instruct."""

    num_prompts: int = 128
    num_rollouts: int = 16
    prompt_tokens: int = 100
    mean_response_tokens: int = 130
    max_prompt_tokens: int = 320
    max_response_tokens: int = 256


LOAD = GenerationLoad()


def default_role(folder: Path, options: Mapping[str, object], load: GenerationLoad) -> RolloutRoleConfig:
    """Return the role of engines as a recipe without keys of its own has it on one GPU that trains as well."""
    recipe = Recipe.model_validate(
        {
            "run": {"name": "generation", "steps": 1},
            "model": {"path": folder},
            "data": {"train": [folder / "train.parquet"], "max_prompt_tokens": load.max_prompt_tokens},
            "pools": {"gpu": {"gpus_per_node": 1}},
            "roles": {"actor": {"pool": "gpu"}, "rollout": {"pool": "gpu", "memory_fraction": 0.5}},
            "algorithm": {"kind": "grpo"},
            "sampling": {"rollouts_per_prompt": load.num_rollouts, "max_response_tokens": load.max_response_tokens},
            "reward": {"kind": "gsm8k"},
            "train": {"prompts_per_step": load.num_prompts},
        }
    )
    _, deployment = complete(recipe, find_shapes(recipe.model, recipe.roles), gpu_of(recipe.cluster, ()))
    role, engine = deployment.roles.rollout, deployment.engine
    assert role is not None and engine is not None, "a recipe with engines"  # noqa: PT018
    return role.model_copy(update={"sglang": dict(options), "max_cached_tokens": engine.cached_tokens})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Workload:
    load: GenerationLoad
    prompts: Sequence[Prompt]
    stop_ids: tuple[int, ...]

    @classmethod
    def of(cls, vocab: int, load: GenerationLoad, *, num_steps: int) -> _Workload:
        """Choose as many tokens that end a response as give its mean length."""
        stop_share = 1 / load.mean_response_tokens
        stop_ids = np.random.default_rng(1).choice(vocab, size=max(1, round(stop_share * vocab)), replace=False)
        prompts = random_prompts(num_steps * load.num_prompts, load.prompt_tokens, vocab=vocab)
        return cls(load=load, prompts=prompts, stop_ids=tuple(int(each) for each in stop_ids))

    def first(self, num_prompts: int) -> _Workload:
        return replace(self, prompts=self.prompts[:num_prompts])

    def requests(self) -> list[GenerateRequest]:
        return [
            GenerateRequest(
                rid=f"{prompt.uid}-{index}",
                input_ids=tuple(prompt.token_ids.tolist()),
                max_new_tokens=self.load.max_response_tokens,
                temperature=1.0,
                stop_token_ids=self.stop_ids,
                sampling_seed=sampling_seed(1, prompt.uid, epoch=0, index=index),
            )
            for prompt in self.prompts
            for index in range(self.load.num_rollouts)
        ]


async def measure_generation(
    model: str, folder: Path, options: Mapping[str, object]
) -> AsyncIterator[Figure | dict[str, object]]:
    """Measure one model, a step at a time and with steps that follow one another; rates come as they are measured."""
    # Those of our server: the offline engine computes with the same ones.
    update_environment(kernel_caches())
    began = time.perf_counter()
    shape = PUBLIC_MODELS[model]
    runs_of = {1: _NUM_RUNS, _NUM_STEPS: 1}
    works = [(_Workload.of(shape.vocab, LOAD, num_steps=num_steps), runs) for num_steps, runs in runs_of.items()]
    # SGLang takes as long to import here as in its server, which starts meanwhile.
    importing = asyncio.create_task(asyncio.to_thread(import_module, "sglang.srt.entrypoints.engine"))
    async with serving(model, folder, options, role_of=lambda path: default_role(path, options, LOAD)) as server:
        role = server.role
        yield {f"{model}, seconds until the server was ready": round(time.perf_counter() - began, 1)}
        full = await full_publish(server)
        await full.send()
        del full
        await importing
        await _through(server, works[0][0].first(_NUM_FIRST))
        through = [await _best(server, partial(_through, server, work), runs) for work, runs in works]
        yield {f"{model}, tokens/s of a step and of {_NUM_STEPS} without a pause": [round(rate) for rate in through]}
        straight = await _best(server, partial(_straight, server, works[0][0]), 1)
    gc.collect()
    torch.cuda.empty_cache()
    offline = await asyncio.to_thread(_offline, folder / "model", role, works)
    for kind, ours, theirs in zip(("a step", "steps without a pause"), through, offline, strict=True):
        directly = f" (its server asked directly: {straight:.0f})" if kind == "a step" else ""
        yield Figure(
            key=f"generation, {model}, {kind}",
            name=f"{model}, {kind}: {LOAD.num_prompts} x {LOAD.num_rollouts} responses of up to "
            f"{LOAD.max_response_tokens} tokens, {role.running_requests} at once",
            value=ours,
            unit="tokens/s",
            against=f"SGLang's offline engine, {theirs:.0f} tokens/s{directly}",
            ratio=ours / theirs,
        )


async def _best(server: Server, call: Callable[[], Awaitable[int]], num_runs: int) -> float:
    rates = list[float]()
    for _ in range(num_runs):
        await server.client.flush_cache()
        start = time.perf_counter()
        num_tokens = await call()
        rates.append(num_tokens / (time.perf_counter() - start))
    return max(rates)


async def _through(server: Server, work: _Workload) -> int:
    """Generate as a run does, with one step's prompts under way."""
    generator = FleetGenerator(
        server.fleet,
        sampling=Sampling(
            num_rollouts=work.load.num_rollouts,
            temperature=1.0,
            top_p=1.0,
            top_k=None,
            max_response_tokens=work.load.max_response_tokens,
        ),
        vocabulary=Vocabulary(
            size=server.shape.vocab,
            eos_ids=work.stop_ids,
            max_context_tokens=server.shape.max_context_tokens,
            decode=lambda _: "",
        ),
        seed=1,
        max_attempts=1,
    )
    under_way = asyncio.Semaphore(work.load.num_prompts)

    async def one(prompt: Prompt) -> int:
        async with under_way:
            group = await generator.generate(prompt)
        return sum(len(rollout.token_ids) for rollout in group.rollouts)

    return sum(await asyncio.gather(*(one(prompt) for prompt in work.prompts)))


async def _straight(server: Server, work: _Workload) -> int:
    """Send all requests at once, and read no more of a reply than its tokens."""
    endpoint = server.client.endpoint
    headers = {"Authorization": f"Bearer {endpoint.keys.api}"}
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as session:

        async def one(request: GenerateRequest) -> int:
            async with session.post(f"{endpoint.url}/generate", json=request.to_json()) as response:
                return len((await response.json())["output_ids"])

        return sum(await asyncio.gather(*(one(request) for request in work.requests())))


def _offline(folder: Path, role: RolloutRoleConfig, works: Sequence[tuple[_Workload, int]]) -> list[float]:
    """Return tokens/s of SGLang's own engine for each workload, with the options of ours."""
    from sglang.srt.entrypoints.engine import Engine

    engine = Engine(
        model_path=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_running_requests=role.running_requests,
        max_total_tokens=role.max_cached_tokens,
        mem_fraction_static=0.9,
        log_level="error",
        **({"cuda_graph_bs_decode": graph_sizes(role.running_requests)} | dict(role.sglang)),
    )

    def rate_of(work: _Workload) -> float:
        requests = work.requests()
        engine.flush_cache()
        start = time.perf_counter()
        replies = engine.generate(
            input_ids=[list(request.input_ids) for request in requests],
            sampling_params=[request.to_json()["sampling_params"] for request in requests],
            return_logprob=True,
        )
        return sum(len(reply["output_ids"]) for reply in replies) / (time.perf_counter() - start)

    try:
        rate_of(works[0][0].first(_NUM_FIRST))
        return [max(rate_of(work) for _ in range(runs)) for work, runs in works]
    finally:
        engine.shutdown()
