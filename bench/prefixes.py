"""Times of an update's passes on one GPU with rows that share prefixes, computed once and as rows apart.

Weights and tokens are random; both ways take the same samples and the same model, and compute as many tokens in a
micro-batch at most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from bench.figures import Figure
from bench.training import alone, clear_device, randomise, timed
from megarl.config.roles import ActorConfig
from megarl.data.packing import Packing
from megarl.data.row_prefixes import row_prefixes
from megarl.data.shares import make_shares
from megarl.families import PUBLIC_MODELS
from megarl.planner.flops import sequence_cost
from megarl.tokens import Content
from megarl.train.build import build_chunks
from megarl.train.model import DeviceMicroBatch, PolicyModel, to_device
from megarl.types import Episode, FinishReason, Rollout, TrainSample

_PAD_MULTIPLE = 64
_MODELS = (("1.5B", "qwen2.5-1.5b", 20_480, 20_480), ("7B", "qwen2.5-7b", 10_240, 12_800))
"""Name, public model, tokens of a micro-batch, and of one with a tree; rows apart always get the larger number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    seconds: float
    peak_bytes: int
    num_tokens: int
    """Tokens that are computed."""
    gradient: torch.Tensor


def measure_prefixes(index: int) -> Iterator[Figure]:
    """Yield time and memory of groups, of episodes and of rows without anything in common, for one model."""
    name, public, budget, tree = _MODELS[index]
    shape = PUBLIC_MODELS[public]
    random = np.random.default_rng(0)
    workloads = {
        "16 x 512 tokens on a prompt of 2,048": _group(random, shape.vocab),
        "an episode of ten turns, thinking stripped": _episode(random, shape.vocab),
        "nothing to share": [sample for _ in range(8) for sample in _group(random, shape.vocab, size=1)],
    }
    with alone() as topology:
        (model,) = build_chunks(shape, topology, ActorConfig(pool="gpu"), device="cuda")
        assert isinstance(model, PolicyModel), type(model)
        randomise(model)
        for label, samples in workloads.items():
            passes = []
            for shares_prefixes in (False, True):
                packing = Packing(
                    data_parallel=1,
                    tokens_per_micro_batch=budget if shares_prefixes else tree,
                    tokens_per_tree=tree,
                    samples_per_update=None,
                    pad_multiple=_PAD_MULTIPLE,
                    micro_batch_multiple=1,
                    cost=sequence_cost(shape),
                )
                (share,) = make_shares(samples, packing, temperature=1.0, shares_prefixes=shares_prefixes)
                (mini_batch,) = share.fill().mini_batches
                batches = [to_device(each, topology, temperature=1.0) for each in mini_batch.micro_batches]
                clear_device()
                measured = timed(partial(_update, model, batches), warmups=1, repeats=3)
                gradient = next(each.grad for each in model.parameters() if each.grad is not None and each.dim() == 1)
                passes.append(
                    _Pass(
                        seconds=measured.seconds,
                        peak_bytes=measured.peak_bytes,
                        num_tokens=sum(batch.num_pack_tokens for batch in batches),
                        gradient=gradient.float().clone(),
                    )
                )
            yield from _figures(f"{name}, {label}", passes[0], passes[1])


def _figures(label: str, apart: _Pass, shared: _Pass) -> Iterator[Figure]:
    error = float((shared.gradient - apart.gradient).norm() / apart.gradient.norm())
    yield Figure(
        key=f"prefixes, {label}",
        name=f"{label}: forward and backward of {shared.num_tokens} tokens; gradients differ by {error:.1e}",
        value=1e3 * shared.seconds,
        unit="ms",
        against=f"{apart.num_tokens} tokens apart, {1e3 * apart.seconds:.1f} ms",
        ratio=apart.seconds / shared.seconds,
    )
    yield Figure(
        key=f"prefixes, {label}, memory",
        name=f"{label}: peak memory",
        value=shared.peak_bytes / 1e9,
        unit="GB",
        against=f"apart, {apart.peak_bytes / 1e9:.1f} GB",
        ratio=apart.peak_bytes / shared.peak_bytes,
    )


def _update(model: PolicyModel, batches: Sequence[DeviceMicroBatch]) -> None:
    model.zero_grad(set_to_none=True)
    for batch in batches:
        scores = model(batch)
        (-torch.where(batch.loss_mask, scores.logprobs, 0.0).sum() / 1e4).backward()  # type: ignore[no-untyped-call]


def _group(random: np.random.Generator, vocab: int, *, size: int = 16) -> list[TrainSample]:
    prompt_ids = random.integers(vocab, size=2048, dtype=np.int32)
    return [_sample(prompt_ids, random.integers(vocab, size=512, dtype=np.int32)) for _ in range(size)]


def _episode(
    random: np.random.Generator, vocab: int, *, turns: int = 10, thought: int = 300, answer: int = 100, given: int = 600
) -> list[TrainSample]:
    """Return an episode whose every turn begins a row: the history without thoughts, then a thought and an answer."""
    history = prompt_ids = random.integers(vocab, size=2048, dtype=np.int32)
    parts, starts, masks, num_tokens = [], list[int](), [], 0
    for turn in range(turns):
        own, reply, result = (random.integers(vocab, size=size, dtype=np.int32) for size in (thought, answer, given))
        context = history[:0] if turn == 0 else history
        if turn:
            starts.append(num_tokens)
        row = np.concatenate([context, own, reply])
        masks.append(np.arange(len(row)) >= len(context))
        parts.append(row)
        num_tokens += len(row)
        history = np.concatenate([history, reply, result])
    token_ids = np.concatenate(parts)
    sample = _sample(prompt_ids, token_ids)
    episode = Episode(rows=tuple(starts), shared=row_prefixes(prompt_ids, token_ids, starts))
    return [replace(sample, rollout=replace(sample.rollout, loss_mask=np.concatenate(masks), episode=episode))]


def _sample(prompt_ids: np.ndarray, token_ids: np.ndarray) -> TrainSample:
    num_tokens = len(token_ids)
    rollout = Rollout(
        content=Content(token_ids=token_ids, logprobs=np.zeros(num_tokens, np.float32), text=""),
        versions=np.zeros(num_tokens, np.int32),
        loss_mask=np.ones(num_tokens, np.bool_),
        finish_reason=FinishReason.STOP,
    )
    return TrainSample(prompt_ids=prompt_ids, rollout=rollout, advantages=np.ones(num_tokens, np.float32))
