"""Attention over long sequences: by cuDNN, and by context-parallel ranks that share each sequence.

cuDNN is nearly twice as fast as torch's flash kernels on Hopper and later. torch calls it correctly for rectangles
only, so each sequence becomes a rectangle whose length is rounded up: a run then needs few kernels, each of which is
compiled at its first use. The positions behind a sequence in its rectangle are invisible to its tokens under the causal
mask, and their output is discarded.

Where ranks share each sequence, a rank gathers the keys and values of all, and its two chunks of a sequence attend to
those up to their own positions (`seen_keys`); or Transformer Engine exchanges them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from megarl.data.context_parts import zigzag
from megarl.train.seen_keys import SeenKeys
from megarl.train.topology import Topology

logger = logging.getLogger(__name__)

_HOPPER = (9, 0)
_MAX_HEAD_DIM = 128
_LENGTH_STEP = 512
_MIN_WORK = 3000**2
"""Tokens squared per rectangle; below it the overhead of a rectangle exceeds the gain over flash kernels."""
_TOLERANCE = 2e-2
"""Relative error allowed in bfloat16 against float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rectangle:
    """Consecutive sequences of one length."""

    start: int
    """First token of the first sequence."""
    num_sequences: int
    length: int
    rounded: int
    """Length in the rectangle; above `length` only with a single sequence."""

    @property
    def tokens(self) -> slice:
        return slice(self.start, self.start + self.num_sequences * self.length)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rectangles:
    """A whole pack."""

    parts: tuple[Rectangle, ...]
    num_tokens: int
    """Tokens that the rectangles cover, including padding behind the pack."""


def rectangles_of(lengths: list[int]) -> Rectangles | None:
    """Return the rectangles of a pack; None if the sequences are too short to gain anything."""
    rectangles = _all_rectangles(lengths)
    # A short end is mostly the padding of the pack, which alone is no reason to do without.
    num_parts = len(rectangles.parts) - (lengths[-1] < _LENGTH_STEP)
    return rectangles if sum(length**2 for length in lengths) >= _MIN_WORK * max(num_parts, 1) else None


def _all_rectangles(lengths: list[int]) -> Rectangles:
    parts: list[Rectangle] = []
    start = 0
    for length, run in groupby(lengths):
        count = len(list(run))
        is_whole = length % _LENGTH_STEP == 0
        for number in (count,) if is_whole else (1,) * count:
            rounded = -(-length // _LENGTH_STEP) * _LENGTH_STEP
            parts.append(Rectangle(start=start, num_sequences=number, length=length, rounded=rounded))
            start += number * length
    reach = max(part.start + part.num_sequences * part.rounded for part in parts)
    return Rectangles(parts=tuple(parts), num_tokens=max(reach, start))


@cache
def is_usable(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> bool:
    """Whether cuDNN supports these sizes and computes correctly; tested once per kind of model."""
    if torch.cuda.get_device_capability(device) < _HOPPER or dtype == torch.float32 or head_dim > _MAX_HEAD_DIM:
        return False
    try:
        error = _error(device, dtype, heads, kv_heads, head_dim)
    except RuntimeError as failure:
        logger.info("cuDNN attention is not available: %s", str(failure).strip().splitlines()[0])
        return False
    if error > _TOLERANCE:
        logger.warning("cuDNN attention has a relative error of %.2g; using flash kernels instead", error)
    return error <= _TOLERANCE


def attend_by_cudnn(query: Tensor, key: Tensor, value: Tensor, rectangles: Rectangles, scale: float | None) -> Tensor:
    """[N, heads, head_dim]"""
    output: Tensor = _Attention.apply(query, key, value, rectangles, scale)  # type: ignore[no-untyped-call]
    return output


def _error(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> float:
    """Return the largest relative error of output and gradients on a few sequences."""
    lengths = [_LENGTH_STEP, _LENGTH_STEP, 70, 700, 830]
    generator = torch.Generator(device).manual_seed(0)

    def random(num_heads: int) -> Tensor:
        return torch.randn(sum(lengths), num_heads, head_dim, generator=generator, device=device)

    exact = [random(number).requires_grad_() for number in (heads, kv_heads, kv_heads)]
    rounded = [tensor.detach().to(dtype).requires_grad_() for tensor in exact]
    grad = random(heads)
    rectangles = _all_rectangles(lengths)
    with torch.enable_grad():
        output = attend_by_cudnn(rounded[0], rounded[1], rounded[2], rectangles, None)
        output.backward(grad.to(dtype))  # type: ignore[no-untyped-call]
        parts, start = [], 0
        for length in lengths:
            q, k, v = (tensor[start : start + length].transpose(0, 1)[None] for tensor in exact)
            parts.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
            start += length
        expected = torch.cat(parts)
        expected.backward(grad)  # type: ignore[no-untyped-call]
    errors = [_distance(output, expected)]
    errors += [_distance(mine.grad, right.grad) for mine, right in zip(rounded, exact, strict=True)]
    return max(errors)


def _distance(values: Tensor | None, expected: Tensor | None) -> float:
    assert values is not None, "no gradient"
    assert expected is not None, "no gradient"
    return float(((values.float() - expected).norm() / expected.norm()).nan_to_num(nan=torch.inf))


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    rectangles: Rectangles
    scale: float | None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context, query: Tensor, key: Tensor, value: Tensor, rectangles: Rectangles, scale: float | None
    ) -> Tensor:
        num_tokens = len(query)
        missing = rectangles.num_tokens - num_tokens
        # Zeros, not uninitialised memory: a weight of zero times NaN is NaN.
        padded = [F.pad(tensor, (0, 0, 0, 0, 0, missing)) if missing else tensor for tensor in (query, key, value)]
        saved: list[Tensor] = []
        outputs = []
        for part in rectangles.parts:
            q, k, v = (_rectangle(tensor, part) for tensor in padded)
            results = _forward(q, k, v, scale)
            saved += results
            outputs.append(_tokens(results[0], part))
        ctx.save_for_backward(*padded, *saved)
        ctx.rectangles, ctx.scale = rectangles, scale
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        padded, saved = ctx.saved_tensors[:3], ctx.saved_tensors[3:]
        columns: list[list[Tensor]] = [[], [], []]
        for index, part in enumerate(ctx.rectangles.parts):
            q, k, v = (_rectangle(tensor, part) for tensor in padded)
            arrived = grad[part.tokens]
            if part.rounded > part.length:
                arrived = F.pad(arrived, (0, 0, 0, 0, 0, part.rounded - part.length))
            arrived = _rectangle(arrived, replace(part, start=0))
            grads = _backward(arrived, q, k, v, saved[_NUM_SAVED * index : _NUM_SAVED * (index + 1)], ctx.scale)
            for column, gradient in zip(columns, grads, strict=True):
                column.append(_tokens(gradient, part))
        query, key, value = (column[0] if len(column) == 1 else torch.cat(column) for column in columns)
        return query, key, value, None, None


_NUM_SAVED = 4


def _forward(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, ...]:
    """Return the output, then what the backward pass needs. [sequences, heads, length, head_dim]"""
    output, statistics, _, _, _, _, seed, offset, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, True, False, scale=scale
    )
    return output, statistics, seed, offset


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, saved: tuple[Tensor, ...], scale: float | None
) -> tuple[Tensor, ...]:
    longest = query.shape[2]
    grads: tuple[Tensor, ...] = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad, query, key, value, *saved, None, None, None, longest, longest, 0.0, True, scale=scale
    )
    return grads


def _rectangle(tensor: Tensor, part: Rectangle) -> Tensor:
    """[sequences, heads, length, head_dim], without a copy if the channels are contiguous."""
    taken = tensor[part.start : part.start + part.num_sequences * part.rounded]
    return taken.view(part.num_sequences, part.rounded, *tensor.shape[1:]).transpose(1, 2)


def _tokens(rectangle: Tensor, part: Rectangle) -> Tensor:
    """Inverse of `_rectangle`, without padding. [tokens, heads, head_dim]"""
    return rectangle.transpose(1, 2).flatten(0, 1)[: part.num_sequences * part.length]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextPart:
    """This rank's two chunks of each sequence, and the tokens of all ranks."""

    group: dist.ProcessGroup
    places: Tensor  # [ranks * N], places of the tokens of all sequences among the gathered ones
    gathered: Tensor  # [ranks * N], the inverse: where each gathered token is in the sequences
    lengths: list[int]  # of the whole sequences
    seen: SeenKeys  # of the gathered ones
    whole: PackedSeqParams  # the sequences of all ranks, for Transformer Engine


def context_part(starts: npt.NDArray[np.int32], topology: Topology) -> ContextPart:
    """Return this rank's part of sequences that start at `starts` as a whole. [S + 1]"""

    def on_device(array: npt.NDArray[np.integer], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(array).to(device=topology.device, dtype=dtype, non_blocking=True)

    whole, longest = on_device(starts, torch.int32), int(np.diff(starts).max())
    of_ranks = zigzag(starts, topology.context)
    gathered = of_ranks.ravel()
    places = np.argsort(gathered)
    return ContextPart(
        group=topology.context_group,
        places=on_device(places, torch.int64),
        gathered=on_device(gathered, torch.int64),
        lengths=np.diff(starts).tolist(),
        seen=SeenKeys.of(
            starts,
            of_ranks[topology.context_rank],
            places,
            num_keys=len(places),
            device=topology.device,
            group=topology.context_group,
        ),
        whole=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=whole,
            cu_seqlens_kv=whole,
            cu_seqlens_q_padded=whole,
            cu_seqlens_kv_padded=whole,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        ),
    )
