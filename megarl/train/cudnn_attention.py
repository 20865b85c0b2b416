"""Causal attention over packed sequences by cuDNN: on Hopper and later nearly twice as fast as torch's flash kernels.

torch calls cuDNN right for rectangles only, so each sequence is a rectangle here: from its start, its length rounded up
so that the packs of a run need few kernels, each of which is compiled when it is first used. What follows a sequence in
its rectangle comes after all its tokens; they do not see it, and it is thrown away.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

logger = logging.getLogger(__name__)

_HOPPER = (9, 0)
_MAX_HEAD_DIM = 128
_LENGTH_STEP = 512
_MIN_WORK = 3000**2
"""Of a rectangle, in squares of tokens: below it, what each costs besides is more than flash kernels lose."""
_TOLERANCE = 2e-2
"""Relative, of bfloat16 against float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rectangle:
    """Sequences of one length that follow each other."""

    start: int
    """The first one's first token."""
    num_sequences: int
    length: int
    rounded: int
    """Its length in the rectangle; more than `length` only where there is one sequence."""

    @property
    def tokens(self) -> slice:
        return slice(self.start, self.start + self.num_sequences * self.length)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rectangles:
    """A whole pack."""

    parts: tuple[Rectangle, ...]
    num_tokens: int
    """That its last rectangle reaches to, some of them not in the pack."""


def rectangles_of(lengths: list[int]) -> Rectangles | None:
    """None where the sequences are too short to gain anything."""
    found = _all_rectangles(lengths)
    return found if sum(length**2 for length in lengths) >= _MIN_WORK * len(found.parts) else None


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
    """Whether it is there and computes what it should; tried once per kind of model."""
    if torch.cuda.get_device_capability(device) < _HOPPER or dtype == torch.float32 or head_dim > _MAX_HEAD_DIM:
        return False
    try:
        error = _error(device, dtype, heads, kv_heads, head_dim)
    except RuntimeError as failure:
        logger.info("no attention by cuDNN: %s", str(failure).strip().splitlines()[0])
        return False
    if error > _TOLERANCE:
        logger.warning("attention by cuDNN is off by %.2g, flash kernels are used instead", error)
    return error <= _TOLERANCE


def attend(query: Tensor, key: Tensor, value: Tensor, rectangles: Rectangles, scale: float | None) -> Tensor:
    """[N, heads, head_dim]"""
    output: Tensor = _Attention.apply(query, key, value, rectangles, scale)  # type: ignore[no-untyped-call]
    return output


def _error(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> float:
    """The largest of output and gradients, relative to their size, on a few sequences."""
    lengths = [_LENGTH_STEP, _LENGTH_STEP, 70, 700, 830]
    generator = torch.Generator(device).manual_seed(0)

    def random(num_heads: int) -> Tensor:
        return torch.randn(sum(lengths), num_heads, head_dim, generator=generator, device=device)

    exact = [random(number).requires_grad_() for number in (heads, kv_heads, kv_heads)]
    rounded = [tensor.detach().to(dtype).requires_grad_() for tensor in exact]
    grad = random(heads)
    rectangles = _all_rectangles(lengths)
    with torch.enable_grad():
        found = attend(rounded[0], rounded[1], rounded[2], rectangles, None)
        found.backward(grad.to(dtype))  # type: ignore[no-untyped-call]
        parts, start = [], 0
        for length in lengths:
            q, k, v = (tensor[start : start + length].transpose(0, 1)[None] for tensor in exact)
            parts.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
            start += length
        expected = torch.cat(parts)
        expected.backward(grad)  # type: ignore[no-untyped-call]
    errors = [_distance(found, expected)]
    errors += [_distance(mine.grad, right.grad) for mine, right in zip(rounded, exact, strict=True)]
    return max(errors)


def _distance(found: Tensor | None, expected: Tensor | None) -> float:
    assert found is not None, "no gradient"
    assert expected is not None, "no gradient"
    return float(((found.float() - expected).norm() / expected.norm()).nan_to_num(nan=torch.inf))


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
        # Zeros, not whatever memory holds: a weight of zero times NaN is NaN.
        padded = [F.pad(tensor, (0, 0, 0, 0, 0, missing)) if missing else tensor for tensor in (query, key, value)]
        kept: list[Tensor] = []
        outputs = []
        for part in rectangles.parts:
            q, k, v = (_rectangle(tensor, part) for tensor in padded)
            found = _forward(q, k, v, scale)
            kept += found
            outputs.append(_tokens(found[0], part))
        ctx.save_for_backward(*padded, *kept)
        ctx.rectangles, ctx.scale = rectangles, scale
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        padded, kept = ctx.saved_tensors[:3], ctx.saved_tensors[3:]
        found: list[list[Tensor]] = [[], [], []]
        for index, part in enumerate(ctx.rectangles.parts):
            q, k, v = (_rectangle(tensor, part) for tensor in padded)
            arrived = grad[part.tokens]
            if part.rounded > part.length:
                arrived = F.pad(arrived, (0, 0, 0, 0, 0, part.rounded - part.length))
            arrived = _rectangle(arrived, replace(part, start=0))
            grads = _backward(arrived, q, k, v, kept[_NUM_KEPT * index : _NUM_KEPT * (index + 1)], ctx.scale)
            for column, gradient in zip(found, grads, strict=True):
                column.append(_tokens(gradient, part))
        query, key, value = (column[0] if len(column) == 1 else torch.cat(column) for column in found)
        return query, key, value, None, None


_NUM_KEPT = 4


def _forward(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, ...]:
    """The output first, then what the backward pass needs besides. [sequences, heads, length, head_dim]"""
    output, statistics, _, _, _, _, seed, offset, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, True, False, scale=scale
    )
    return output, statistics, seed, offset


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, kept: tuple[Tensor, ...], scale: float | None
) -> tuple[Tensor, ...]:
    longest = query.shape[2]
    grads: tuple[Tensor, ...] = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad, query, key, value, *kept, None, None, None, longest, longest, 0.0, True, scale=scale
    )
    return grads


def _rectangle(tensor: Tensor, part: Rectangle) -> Tensor:
    """[sequences, heads, length, head_dim], without a copy where the channels lie side by side."""
    taken = tensor[part.start : part.start + part.num_sequences * part.rounded]
    return taken.view(part.num_sequences, part.rounded, *tensor.shape[1:]).transpose(1, 2)


def _tokens(rectangle: Tensor, part: Rectangle) -> Tensor:
    """The inverse: [tokens, heads, head_dim] of the sequences themselves."""
    return rectangle.transpose(1, 2).flatten(0, 1)[: part.num_sequences * part.length]
