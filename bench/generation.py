"""Generation by megarl with default settings, next to SGLang's offline engine and next to its server asked directly.

The same prompts, seeds and distribution of lengths three times. All tokens are about equally likely but the one that
ends a response: embedding and head are made so that responses have the mean length of the workload.
"""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path

import aiohttp
import torch

from bench.figures import Figure
from bench.one_engine import Server, full_publish, random_prompts, serving
from megarl.config.recipe import Recipe
from megarl.config.roles import RolloutRoleConfig
from megarl.config.section import Device, dtype_on
from megarl.engine.client import GenerateRequest
from megarl.engine.process import graph_sizes
from megarl.env import kernel_caches, update_environment
from megarl.families import PUBLIC_MODELS
from megarl.families.shape import ModelShape
from megarl.planner.complete import complete
from megarl.planner.deployment import find_shapes
from megarl.planner.hardware import gpu_of
from megarl.rollout.generator import FleetGenerator, sampling_seed
from megarl.rollout.task import Sampling, Vocabulary
from megarl.types import Prompt
from megarl.weights.executors.tensors import torch_dtype

_END = 1
"""The token that ends a response."""
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

    @classmethod
    def of(cls, vocab: int, load: GenerationLoad, *, num_steps: int) -> _Workload:
        prompts = random_prompts(num_steps * load.num_prompts, load.prompt_tokens, vocab=vocab)
        return cls(load=load, prompts=prompts)

    def first(self, num_prompts: int) -> _Workload:
        return replace(self, prompts=self.prompts[:num_prompts])

    def requests(self) -> list[GenerateRequest]:
        return [
            GenerateRequest(
                rid=f"{prompt.uid}-{index}",
                input_ids=tuple(prompt.token_ids.tolist()),
                max_new_tokens=self.load.max_response_tokens,
                temperature=1.0,
                stop_token_ids=(_END,),
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
        ends = _ending(shape, LOAD, server.device)
        full = await full_publish(server, fill=partial(_fill, ends))
        await full.send()
        del full
        await importing
        await _through(server, works[0][0].first(_NUM_FIRST))
        results = [await _best(server, partial(_through, server, work), runs) for work, runs in works]
        through = [rate for rate, _ in results]
        yield {f"{model}, tokens/s of a step and of {_NUM_STEPS} without a pause": [round(rate) for rate in through]}
        straight, _ = await _best(server, partial(_straight, server, works[0][0]), 1)
    gc.collect()
    torch.cuda.empty_cache()
    offline, length = await asyncio.to_thread(_offline, folder / "model", role, works, ends)
    lengths = [results[-1][1] / len(works[-1][0].requests()), length]
    yield {f"{model}, tokens of a response, ours and the offline engine's": [round(each, 1) for each in lengths]}
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


def _ending(shape: ModelShape, load: GenerationLoad, device: Device) -> dict[str, torch.Tensor]:
    """Return embedding (and head) and last norm, by SGLang's names, that end a response at each token alike.

    All embeddings have a direction in common, which the row of the end token is a multiple of; other logits differ by
    at most 1.
    """
    generator = torch.Generator(device).manual_seed(0)
    rows = torch.randn(shape.vocab + 1, shape.hidden, generator=generator, device=device) / math.sqrt(2)
    embedding, common = rows[:-1] + rows[-1], rows[-1]
    embedding[_END] = common * (1 + 2 * math.log(shape.vocab / load.mean_response_tokens))
    tensors = {"model.embed_tokens.weight": embedding, "model.norm.weight": torch.full_like(common, 1 / shape.hidden)}
    tensors |= {} if shape.has_tied_embeddings else {"lm_head.weight": embedding}
    return {name: tensor.to(torch_dtype(dtype_on(device))) for name, tensor in tensors.items()}


def _fill(ends: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]) -> None:
    embedding = ends["model.embed_tokens.weight"]
    for name, tensor in weights.items():
        if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
            tensor.mul_(1e-3)
        elif name.endswith("final_layernorm.weight"):
            tensor.copy_(ends["model.norm.weight"])
        elif name.endswith(("word_embeddings.weight", "output_layer.weight")):
            tensor[: len(embedding)].copy_(embedding)


async def _best(server: Server, call: Callable[[], Awaitable[int]], num_runs: int) -> tuple[float, int]:
    """Return the best rate, and the tokens of the last run."""
    rates, num_tokens = list[float](), 0
    for _ in range(num_runs):
        await server.client.flush_cache()
        start = time.perf_counter()
        num_tokens = await call()
        rates.append(num_tokens / (time.perf_counter() - start))
    return max(rates), num_tokens


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
            eos_ids=(_END,),
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


def _offline(
    folder: Path,
    role: RolloutRoleConfig,
    works: Sequence[tuple[_Workload, int]],
    ends: Mapping[str, torch.Tensor],
) -> tuple[list[float], float]:
    """Return tokens/s of SGLang's own engine for each workload, with the options of ours, and its mean length."""
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

    lengths = list[float]()

    def rate_of(work: _Workload) -> float:
        requests = work.requests()
        engine.flush_cache()
        start = time.perf_counter()
        replies = engine.generate(
            input_ids=[list(request.input_ids) for request in requests],
            sampling_params=[request.to_json()["sampling_params"] for request in requests],
            return_logprob=True,
        )
        seconds, num_tokens = time.perf_counter() - start, sum(len(reply["output_ids"]) for reply in replies)
        lengths.append(num_tokens / len(requests))
        return num_tokens / seconds

    try:
        has_sessions = hasattr(engine, "begin_weight_update")  # from 0.5.21
        if has_sessions:
            engine.begin_weight_update()
        done, message = engine.update_weights_from_tensor(list(ends.items()))
        assert done, message
        if has_sessions:
            engine.end_weight_update()
        rate_of(works[0][0].first(_NUM_FIRST))
        return [max(rate_of(work) for _ in range(runs)) for work, runs in works], lengths[-1]
    finally:
        engine.shutdown()
