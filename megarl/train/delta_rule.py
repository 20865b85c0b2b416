"""The gated delta rule (arXiv 2412.06464) over packed sequences, and the short convolution before it, in plain torch.

Each head of a sequence has a state S, a matrix of key channels x value channels. A token with the key k, the value v,
the decay a and the strength b makes of it S' = a S + b k (v - a S^T k)^T; its query reads S'^T q. Here chunks of tokens
are computed at a time: within a chunk the corrections of all tokens are the solution of one triangular system, and
only the states between chunks follow one after the other. Sums are in one order, whatever else is packed.
`delta_fused` has kernels for GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """Sequences of N tokens cut into chunks, of which the last is padded: all first ones, then all second ones.

    Longer sequences come first, so that those with a further chunk are the first of those with one less.
    """

    size: int
    ages: Tensor  # [N], int32: tokens of the same sequence before each
    tokens: Tensor  # [chunks * size], int64: the token at each place, N where there is none
    places: Tensor  # [N], int64: the place of each token
    counts: list[int]
    """Sequences with a first chunk, with a second one, and so on."""


def chunks_of(lengths: list[int], device: torch.device, *, size: int = CHUNK) -> Chunks:
    """Return the chunks of sequences of these lengths, one after the other."""
    sizes = np.array(lengths, np.int64)
    numbers = -(-sizes // size)
    rank = np.argsort(np.argsort(-numbers, kind="stable"), kind="stable")
    counts = [int((numbers > index).sum()) for index in range(int(numbers.max(initial=0)))]
    firsts = np.cumsum([0, *counts])
    ages = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    places = (firsts[ages // size] + np.repeat(rank, sizes)) * size + ages % size
    tokens = np.full(firsts[-1] * size, len(ages), np.int64)
    tokens[places] = np.arange(len(ages))

    def on_device(array: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Tensor:
        return torch.from_numpy(array).to(device=device, non_blocking=True)

    return Chunks(
        size=size, ages=on_device(ages).int(), tokens=on_device(tokens), places=on_device(places), counts=counts
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Sequences of N tokens as the kernels of `delta_triton` go through them."""

    ages: Tensor  # [N], int32: tokens of the same sequence before each
    bounds: Tensor  # [chunks, 2], int32: the first token of each chunk, and the first one behind it
    spans: Tensor  # [sequences, 3], int32: first token, the first one behind it, first chunk; longest first


def blocks_of(lengths: list[int], device: torch.device, *, size: int = CHUNK) -> Blocks:
    """Return where sequences of these lengths, one after the other, and their chunks are."""
    sizes = np.array(lengths, np.int32)
    ends = np.cumsum(sizes, dtype=np.int32)
    numbers = -(-sizes // size)
    first_chunks = np.cumsum(numbers, dtype=np.int32) - numbers
    spans = np.stack((ends - sizes, ends, first_chunks), axis=1)[np.argsort(-sizes, kind="stable")]
    starts = np.repeat(ends - sizes, numbers) + (np.arange(numbers.sum()) - np.repeat(first_chunks, numbers)) * size
    bounds = np.stack((starts, np.minimum(starts + size, np.repeat(ends, numbers))), axis=1)
    ages = np.arange(sizes.sum()) - np.repeat(ends - sizes, sizes)
    tensors = (torch.from_numpy(each.astype(np.int32)).to(device, non_blocking=True) for each in (ages, bounds, spans))
    ages_there, bounds_there, spans_there = tensors
    return Blocks(ages=ages_there, bounds=bounds_there, spans=spans_there)


def short_convolution(values: Tensor, weight: Tensor, ages: Tensor) -> Tensor:
    """Return the weighted sum of a token's channels and of those before it in its sequence. [N, channels]

    The last of the weights, [channels, kernel], is the token's own.
    """
    kernel = weight.shape[-1]
    total = values * weight[:, -1]
    for ago in range(1, kernel):
        earlier = F.pad(values, (0, 0, ago, 0))[: len(values)]
        total = total + torch.where((ages >= ago)[:, None], earlier * weight[:, kernel - 1 - ago], 0)
    return total


def delta_rule(
    query: Tensor,  # [N, heads, key]
    key: Tensor,  # [N, heads, key]
    value: Tensor,  # [N, heads, value]
    decay: Tensor,  # [N, heads], logarithms
    strength: Tensor,  # [N, heads]
    chunks: Chunks,
) -> Tensor:
    """Return what the queries read, in the dtype of the arguments. [N, heads, value]"""

    def cut(values: Tensor) -> Tensor:
        """[chunks, heads, size, ...]; padding is zero and changes no state."""
        padded = torch.cat((values, values.new_zeros(1, *values.shape[1:])))
        return torch.unflatten(padded.index_select(0, chunks.tokens), 0, (-1, chunks.size)).transpose(1, 2)

    query, key, value, strength = cut(query), cut(key), cut(value), cut(strength)[..., None]
    total = cut(decay).cumsum(-1)
    later = torch.ones(chunks.size, chunks.size, dtype=torch.bool, device=query.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
    since_start, until_end = total.exp()[..., None], (total[..., -1:] - total).exp()[..., None]
    corrected = key * strength
    # The correction of a token is its value without what the state and the tokens before it hold for its key.
    system = ((corrected @ key.transpose(-1, -2)) * between).tril(-1)
    both = torch.cat((value * strength, corrected * since_start), dim=-1)
    solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
    fresh, held = torch.split(solved, [value.shape[-1], key.shape[-1]], dim=-1)
    inner = (query @ key.transpose(-1, -2)) * between
    entering, leaving = query * since_start, (key * until_end).transpose(-1, -2)
    kept = since_start[:, :, -1:]

    outputs: list[Tensor] = []
    state = value.new_zeros(max(chunks.counts, default=0), value.shape[1], key.shape[-1], value.shape[-1])
    steps = (torch.split(part, chunks.counts) for part in (entering, inner, fresh, held, leaving, kept))
    for now_entering, now_inner, now_fresh, now_held, now_leaving, now_kept in zip(*steps, strict=True):
        state = state[: len(now_entering)]
        corrections = now_fresh - now_held @ state
        outputs.append(now_entering @ state + now_inner @ corrections)
        state = state * now_kept + now_leaving @ corrections
    return torch.cat(outputs).transpose(1, 2).flatten(0, 1).index_select(0, chunks.places)
