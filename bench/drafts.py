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
import numpy.typing as npt
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
from megarl.types import JsonValue, PolicyVersion
from megarl.weights.layouts.canonical import canonical_tensors

_Floats = npt.NDArray[np.float64]

_BATCHES = (1, 8, 32, 256)
_GRAPHS = (1, 8, 32, 64, 128, 256)
"""Sizes of batches that graphs are captured for: few, which takes a third of the time of all."""
_NUM_CLASSES = 16
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
"""Responses whose tokens are compared with the probabilities of the policy: 102,400 tokens."""
_SCORED_AT_ONCE = 32
_DOUBT = 3.5
"""Standard errors from which tokens are not the policy's: once in 1,000 tests of two numbers."""


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
    """Measure an engine without drafts, then one for each kind of them."""
    shape = PUBLIC_MODELS[model]
    plain, options = _Measured(), {"cuda_graph_bs_decode": list(_GRAPHS), **options}
    for name in ("none", "ngram", "model", "eagle"):
        draft = _draft(name, folder, shape)
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


def _draft(kind: str, folder: Path, shape: ModelShape) -> DraftConfig | None:
    """Return the draft of a kind, whose weights are written."""
    path = folder / f"draft_{kind}"
    match kind:
        case "model":
            _write_draft(path, shape)
            return ModelDraftConfig(kind="model", path=path)
        case "eagle":
            _write_head(path, shape)
            return EagleDraftConfig(kind="eagle", path=path)
        case "ngram":
            return NgramDraftConfig(kind="ngram", max_requests=32)
        case _:
            return None


async def _measure_engine(
    name: str,
    draft: DraftConfig | None,
    measured: _Measured,
    plain: _Measured,
    folder: Path,
    model: str,
    options: Mapping[str, object],
) -> AsyncIterator[Figure | Failure | dict[str, object]]:
    most = max(_BATCHES) if draft is None else draft.most_requests
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
        if draft is not None and plain.greedy:
            yield {f"drafts, {name}, greedy": _greedy(measured, plain)}
        yield {f"drafts, {name}, scored again": await _scored(server, measured.drawn)}


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


async def _scored(server: Server, responses: Sequence[Response]) -> dict[str, object]:
    """Score the responses as prompts: log-probabilities, and whether tokens are as frequent as the policy says."""
    prompts = random_prompts(len(responses), _PROMPT_TOKENS, vocab=server.shape.vocab)
    under_way = asyncio.Semaphore(_SCORED_AT_ONCE)

    async def one(index: int) -> tuple[_Floats, _Floats]:
        ids = [*prompts[index].token_ids.tolist(), *responses[index].token_ids.tolist()]
        body: dict[str, JsonValue] = {
            "rid": f"score-{index}",
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": _PROMPT_TOKENS - 1,
            "token_ids_logprob": [0, *range(_FIRST, _FIRST + _NUM_CLASSES)],
        }
        async with under_way:
            meta = msgspec.json.decode(await server.client.post("score", "/generate", body))["meta_info"]
        chosen = np.array([entry[0] for entry in meta["input_token_logprobs"][1:]], np.float64)
        asked = [[entry[0] for entry in position] for position in meta["input_token_ids_logprobs"][1:]]
        return chosen, np.array(asked, np.float64)

    scored = await asyncio.gather(*(one(index) for index in range(len(responses))))
    differences = np.concatenate([each.logprobs - chosen for each, (chosen, _) in zip(responses, scored, strict=True)])
    kinds = [_kinds(each, asked) for each, (_, asked) in zip(responses, scored, strict=True)]
    is_kind, probabilities = (np.concatenate(each, axis=1) for each in zip(*kinds, strict=True))
    apart = standard_errors(is_kind, probabilities)
    return {
        "tokens": len(differences),
        "mean difference": round(float(differences.mean()), 5),
        "99 % are within": round(float(np.quantile(np.abs(differences), 0.99)), 5),
        "largest": round(float(np.abs(differences).max()), 4),
        "share of the representative and of token 0": np.round(is_kind.mean(axis=1), 5).tolist(),
        "so the policy": np.round(probabilities.mean(axis=1), 5).tolist(),
        "standard errors between": np.round(apart, 2).tolist(),
        "are the policy's": bool(np.abs(apart).max() < _DOUBT),
        "tokens per pass": round(len(differences) / max(1, sum(each.num_passes for each in responses)), 3),
    }


def standard_errors(is_kind: _Floats, probabilities: _Floats) -> _Floats:
    """Return how far the tokens of each kind are from their probabilities, given the tokens before; one row a kind.

    Given what came before, a token is drawn anew; so the sum of what differs from its probability has a known spread,
    whatever the tokens of a response have in common.
    """
    apart: _Floats = (is_kind - probabilities).sum(axis=1) / np.sqrt((probabilities * (1 - probabilities)).sum(axis=1))
    return apart


def _kinds(response: Response, asked: _Floats) -> tuple[_Floats, _Floats]:
    """Return of all tokens but the first whether they are the representative and token 0, and how likely both were."""
    before, after = response.token_ids[:-1], response.token_ids[1:]
    following = (before + 1) % _NUM_CLASSES
    is_kind = np.stack([after == _FIRST + following, after == 0]).astype(np.float64)
    likely = np.exp(asked[1:])
    return is_kind, np.stack([likely[np.arange(len(after)), 1 + following], likely[:, 0]])
