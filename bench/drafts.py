"""Drafted tokens on one GPU: tokens/s with a draft and without, and whether the tokens are those of the policy.

The policy has the size of a public model and weights that make it predictable, since no draft can guess tokens that are
all equally likely: a token of class k is followed by the representative of class k + 1 in four of five cases, by token
0 in one of thirty, and else by any. Its layers are random and add a noise to that which depends on the whole context,
so that a wrong key or value shows in log-probabilities. The draft model has embedding, head and one layer of that size,
the EAGLE head one layer, and both know the classes. N-grams learn them from the responses.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
import msgspec
import numpy as np
import torch
from safetensors.torch import save_file

from bench.figures import Failure, Figure
from bench.one_engine import Server, full_publish, random_prompts, serving
from megarl.config.draft import DraftConfig, EagleDraftConfig, ModelDraftConfig, NgramDraftConfig
from megarl.engine.client import GenerateRequest
from megarl.engine.reply import Expectation, Response, read_response
from megarl.errors import MegarlError
from megarl.families import PUBLIC_MODELS
from megarl.families.shape import ModelShape
from megarl.tools.quickstart.tiny_model import TinyShape, write_config
from megarl.types import FloatArray, PolicyVersion
from megarl.weights.layouts.canonical import canonical_tensors

_BATCHES = (1, 32, 256)
_GRAPHS = (1, 8, 32, 64, 128, 256)
"""Sizes of batches that graphs are captured for: few, which takes a third of the time of all."""
_NUM_CLASSES = 64
_FIRST = 64
"""The representative of class 0; tokens before it are special ones."""
_SHARES = (0.8, 0.03)
"""Probabilities of the representative and of token 0."""
_LAYER_SCALE = 0.05
_NOISE = 0.71
"""The size of what all layers together add, relative to the embedding."""
_PROMPT_TOKENS = 32
_RESPONSE_TOKENS = 256
_NUM_DRAWN = 400
"""Responses of the comparison of distributions: 102,400 tokens."""
_NUM_SCORED = 32
_NUM_BUCKETS = 64
_DOUBT = 3.7
"""Standard errors from which two samples are not of one distribution: once in 1,500 tests of three numbers."""


@dataclass(slots=True)
class _Measured:
    """The rates and responses of one engine."""

    rates: dict[int, float] = field(default_factory=dict)
    tokens_per_pass: dict[int, float] = field(default_factory=dict)
    greedy: list[Response] = field(default_factory=list)
    drawn: list[Response] = field(default_factory=list)


async def measure_drafts(
    model: str, folder: Path, options: Mapping[str, object]
) -> AsyncIterator[Figure | Failure | dict[str, object]]:
    """Measure an engine without drafts, then one with a draft model, one with n-grams and one with an EAGLE head."""
    shape = PUBLIC_MODELS[model]
    _write_draft(folder / "draft", shape)
    _write_head(folder / "head", shape)
    plain, options = _Measured(), {"cuda_graph_bs_decode": list(_GRAPHS), **options}
    ways: list[tuple[str, DraftConfig | None]] = [
        ("none", None),
        ("model", ModelDraftConfig(kind="model", path=folder / "draft")),
        ("ngram", NgramDraftConfig(kind="ngram", max_requests=32)),
        ("eagle", EagleDraftConfig(kind="eagle", path=folder / "head")),
    ]
    for name, draft in ways:
        place = folder / name
        place.mkdir()
        measured = plain if draft is None else _Measured()
        began = time.perf_counter()
        try:
            async for outcome in _measure_engine(name, draft, measured, plain, place, model, options):
                yield outcome
        except (MegarlError, RuntimeError, AssertionError, aiohttp.ClientError, TimeoutError) as error:
            yield Failure(part=f"drafts, {name}", reason=f"{type(error).__name__}: {error}"[:600])
        yield {f"drafts, {name}, seconds": round(time.perf_counter() - began, 1)}
        gc.collect()
        torch.cuda.empty_cache()


async def _measure_engine(
    name: str,
    draft: DraftConfig | None,
    measured: _Measured,
    plain: _Measured,
    folder: Path,
    model: str,
    options: Mapping[str, object],
) -> AsyncIterator[Figure | Failure | dict[str, object]]:
    # SGLang switches n-grams off for no number of requests.
    most = draft.most_requests if isinstance(draft, NgramDraftConfig) else max(_BATCHES)
    began = time.perf_counter()
    async with serving(model, folder, options, draft=draft, max_requests=most) as server:
        yield {f"drafts, {name}, seconds until ready": round(time.perf_counter() - began, 1)}
        torch.manual_seed(0)  # each engine gets the same weights
        full = await full_publish(server, fill=_fill(server.shape))
        await full.send()
        await full.send()  # a second one, into an engine that has captured and computed
        for size in (size for size in _BATCHES if size <= most):
            await _measure_rate(server, size, measured)
            yield _rate(name, size, measured, plain)
        measured.greedy = await _ask(server, 32, at_once=32, tokens=128, temperature=0.0)
        at_once = 128 if draft is None else draft.most_requests  # with more there are no drafts to compare
        measured.drawn = await _ask(server, _NUM_DRAWN, at_once=at_once, tokens=_RESPONSE_TOKENS)
        if draft is not None and plain.drawn:
            yield {f"drafts, {name}, greedy": _greedy(measured, plain)}
            yield {f"drafts, {name}, distribution": _distribution(measured, plain)}
        yield {f"drafts, {name}, scored again": await _scored(server, measured.drawn[:_NUM_SCORED])}


async def _measure_rate(server: Server, size: int, measured: _Measured) -> None:
    await _ask(server, size, at_once=size, tokens=64)
    start = time.perf_counter()
    responses = await _ask(server, size, at_once=size, tokens=_RESPONSE_TOKENS)
    num_tokens = sum(len(each.token_ids) for each in responses)
    measured.rates[size] = num_tokens / (time.perf_counter() - start)
    if num_passes := sum(each.num_passes for each in responses):
        measured.tokens_per_pass[size] = num_tokens / num_passes


def _rate(name: str, size: int, measured: _Measured, plain: _Measured) -> Figure | dict[str, object]:
    rate, without = measured.rates[size], plain.rates.get(size)
    if measured is plain or without is None:
        return {f"drafts, {name}, tokens/s of {size} at once": round(rate)}
    return Figure(
        key=f"drafts, {name}, {size}",
        name=f"drafts, {name}: {size} responses at once, {measured.tokens_per_pass.get(size, 1.0):.2f} tokens a pass",
        value=rate,
        unit="tokens/s",
        against=f"the same engine without a draft, {without:.0f} tokens/s",
        ratio=rate / without,
    )


async def _ask(server: Server, num: int, *, at_once: int, tokens: int, temperature: float = 1.0) -> list[Response]:
    """Return the responses to random prompts; greedy ones begin alike on each engine."""
    expected = Expectation(
        vocab=server.shape.vocab,
        max_response_tokens=tokens,
        eos_ids=frozenset({1}),
        version=PolicyVersion(2),
        newest_version=PolicyVersion(2),
    )
    under_way = asyncio.Semaphore(at_once)

    async def one(index: int, token_ids: Sequence[int]) -> Response:
        request = GenerateRequest(
            rid=f"{time.monotonic_ns()}-{index}",
            input_ids=tuple(token_ids),
            max_new_tokens=tokens,
            temperature=temperature,
            stop_token_ids=(1,),
        )
        async with under_way:
            return read_response((await server.client.generate(request)).content, expected)

    prompts = random_prompts(num, _PROMPT_TOKENS, vocab=server.shape.vocab)
    return await asyncio.gather(*(one(index, each.token_ids.tolist()) for index, each in enumerate(prompts)))


# --- the policy and its draft --------------------------------------------------------------------------------------


def _classes(shape: ModelShape) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the direction of each class, and the one that all have in common."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(_NUM_CLASSES + 1, shape.hidden, generator=generator) / math.sqrt(2)
    return directions[:-1], directions[-1]


def _embedding(shape: ModelShape) -> torch.Tensor:
    directions, common = _classes(shape)
    return (directions + common)[torch.arange(shape.vocab) % _NUM_CLASSES]


def _head_rows(shape: ModelShape) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of the representatives and that of token 0, for the shares of them in a softmax."""
    directions, common = _classes(shape)
    rest, reach = 1 - sum(_SHARES), shape.hidden / 2 / math.sqrt(1 + _NOISE**2)
    logits = [math.log(shape.vocab) + math.log(share / rest) for share in _SHARES]
    return directions.roll(1, dims=0) * (logits[0] / reach), common * (logits[1] / reach)


def _write_rows(head: torch.Tensor, shape: ModelShape) -> None:
    rows, zero = _head_rows(shape)
    head.normal_(0.0, 0.003)
    head[_FIRST : _FIRST + _NUM_CLASSES] = rows.to(head)
    head[0] = zero.to(head)


def _fill(shape: ModelShape) -> Callable[[Mapping[str, torch.Tensor]], None]:
    def fill(weights: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in weights.items():
            if "norm" in name:
                tensor.fill_(1.0)
            elif name.endswith(".bias"):
                tensor.zero_()
            elif name.endswith(("linear_proj.weight", "linear_fc2.weight")):
                tensor.mul_(_LAYER_SCALE)
            elif name.endswith("word_embeddings.weight"):
                tensor[: shape.vocab].copy_(_embedding(shape))
            elif name.endswith("output_layer.weight"):
                _write_rows(tensor, shape)

    return fill


def _write_draft(folder: Path, shape: ModelShape) -> None:
    small = replace(shape, num_layers=1)
    write_config(folder, TinyShape.like(small))
    weights = dict[str, torch.Tensor]()
    for name, spec in canonical_tensors(small).items():
        tensor = weights[name] = torch.zeros(spec.shape, dtype=torch.bfloat16, device="cuda")
        if "norm" in name:
            tensor.fill_(1.0)
        elif name == "model.embed_tokens.weight":
            tensor.copy_(_embedding(shape))
        elif name == "lm_head.weight":
            _write_rows(tensor, shape)
    save_file({name: tensor.cpu() for name, tensor in weights.items()}, folder / "model.safetensors", {"format": "pt"})


def _write_head(folder: Path, shape: ModelShape) -> None:
    """Write a head that passes the embedding of a token on, to the policy's own head."""
    small = replace(shape, num_layers=1)
    write_config(folder, TinyShape.like(small))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen2ForCausalLMEagle"]}))
    weights = {"fc.weight": torch.cat([torch.eye(shape.hidden), torch.zeros(shape.hidden, shape.hidden)], dim=1)}
    weights["fc.bias"] = torch.zeros(shape.hidden)
    for name, spec in canonical_tensors(small).items():
        if ".layers." in name and "input_layernorm" not in name:  # SGLang's class of heads has none
            make = torch.ones if "norm" in name else torch.zeros
            weights[name.removeprefix("model.")] = make(spec.shape)
    save_file({name: each.bfloat16() for name, each in weights.items()}, folder / "model.safetensors", {"format": "pt"})


# --- whether the tokens are the policy's ---------------------------------------------------------------------------


def _greedy(measured: _Measured, plain: _Measured) -> dict[str, object]:
    pairs = list(zip(measured.greedy, plain.greedy, strict=True))
    equal = [np.array_equal(one.token_ids, other.token_ids) for one, other in pairs]
    return {"responses": len(pairs), "equal": sum(equal)}


def _distribution(measured: _Measured, plain: _Measured) -> dict[str, object]:
    """Compare the kinds of tokens: representative of the next class, token 0, or one of the rest, in buckets.

    The tokens of a response have their context in common, so differences are counted in standard errors of responses.
    """
    both = (measured, plain)
    counts = [np.stack([_counts(response) for response in each.drawn]) for each in both]
    kinds = np.stack([each.sum(axis=0) for each in counts])
    kinds = kinds[:, kinds.sum(axis=0) > 0]
    totals = kinds.sum(axis=1, keepdims=True)
    expected = totals * kinds.sum(axis=0) / kinds.sum()
    chi2, freedom = float(((kinds - expected) ** 2 / expected).sum()), kinds.shape[1] - 1
    logprobs = [np.array([response.logprobs.mean() for response in each.drawn]) for each in both]
    shares = [each[:, :2] / np.maximum(1, each.sum(axis=1, keepdims=True)) for each in counts]
    apart = {
        "share of the representative": _apart(shares[0][:, 0], shares[1][:, 0]),
        "share of token 0": _apart(shares[0][:, 1], shares[1][:, 1]),
        "mean log-probability": _apart(*logprobs),
    }
    return {
        "tokens": [int(total) for total in totals[:, 0]],
        "share of the representative": [round(float(each[0] / each.sum()), 5) for each in kinds],
        "share of token 0": [round(float(each[1] / each.sum()), 5) for each in kinds],
        "mean log-probability": [round(float(each.mean()), 4) for each in logprobs],
        "apart, in standard errors": {name: round(each, 2) for name, each in apart.items()},
        "chi2, as if tokens were independent": round(chi2, 1),
        "degrees of freedom": freedom,
        "probability": round(_tail(chi2, freedom), 4),
        "tokens per pass": round(
            sum(len(each.token_ids) for each in measured.drawn)
            / max(1, sum(each.num_passes for each in measured.drawn)),
            3,
        ),
        "is of one distribution": max(map(abs, apart.values())) < _DOUBT,
    }


def _apart(one: FloatArray, other: FloatArray) -> float:
    """Return the difference of two means in its standard errors."""
    spread = math.sqrt(sum(float(np.var(each)) / len(each) for each in (one, other)))
    return float(one.mean() - other.mean()) / max(spread, 1e-12)


def _counts(response: Response) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    before, after = response.token_ids[:-1], response.token_ids[1:]
    is_next = after == _FIRST + (before + 1) % _NUM_CLASSES
    is_zero = after == 0
    rest = np.bincount(after[~is_next & ~is_zero] % _NUM_BUCKETS, minlength=_NUM_BUCKETS)
    return np.concatenate([[is_next.sum(), is_zero.sum()], rest])


def _tail(chi2: float, freedom: int) -> float:
    """Return the probability of a larger chi2, by Wilson and Hilferty's cube root."""
    scale = 2 / (9 * freedom)
    return 0.5 * math.erfc(((chi2 / freedom) ** (1 / 3) - 1 + scale) / math.sqrt(2 * scale))


async def _scored(server: Server, responses: Sequence[Response]) -> dict[str, object]:
    """Compare the log-probabilities that came with tokens with those of the same tokens as a prompt."""
    prompts = random_prompts(len(responses), _PROMPT_TOKENS, vocab=server.shape.vocab)

    async def one(index: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        ids = [*prompts[index].token_ids.tolist(), *responses[index].token_ids.tolist()]
        content = await server.client.post(
            "score",
            "/generate",
            {
                "rid": f"score-{index}",
                "input_ids": ids,
                "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
                "return_logprob": True,
                "logprob_start_len": _PROMPT_TOKENS - 1,
            },
        )
        scores = msgspec.json.decode(content)["meta_info"]["input_token_logprobs"][1:]
        given = np.array([entry[0] for entry in scores], np.float64)
        return np.abs(given[: len(responses[index].logprobs)] - responses[index].logprobs)

    differences = np.concatenate(await asyncio.gather(*(one(index) for index in range(len(responses)))))
    return {
        "tokens": len(differences),
        "median difference": round(float(np.median(differences)), 5),
        "99 % are below": round(float(np.quantile(differences, 0.99)), 5),
        "largest": round(float(differences.max()), 4),
    }
