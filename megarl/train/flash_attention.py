"""Causal attention on a GPU: torch's flash kernel, which knows windows and no sinks.

With sinks its output is multiplied by the share of the softmax that is not the sink's.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn.attention.varlen import varlen_attn

from megarl.errors import MachineError
from megarl.train.softmax import Softmax


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """The queries and keys of each sequence of a pack; the last query sees the last key."""

    query_starts: Tensor  # [S + 1], int32, on the device
    key_starts: Tensor  # [S + 1], int32, on the device
    query_lengths: list[int]
    key_lengths: list[int]

    @property
    def most_queries(self) -> int:
        return max(self.query_lengths)

    @property
    def most_keys(self) -> int:
        return max(self.key_lengths)


def attend_by_flash(query: Tensor, key: Tensor, value: Tensor, spans: Spans, softmax: Softmax) -> Tensor:
    """[N, heads, width]; on a GPU."""
    width = value.shape[-1]
    if width < key.shape[-1]:
        value = F.pad(value, (0, key.shape[-1] - width))  # the kernel has one width for both
    if softmax.sinks is not None:
        sunk: Tensor = _Sunk.apply(  # type: ignore[no-untyped-call]
            query, key, value, softmax.sinks, spans, softmax.scale, softmax.window
        )
        return sunk[..., :width]
    output = varlen_attn(
        query,
        key,
        value,
        spans.query_starts,
        spans.key_starts,
        spans.most_queries,
        spans.most_keys,
        scale=softmax.scale,
        **_kernel_options(softmax.window),
    )
    assert isinstance(output, Tensor)
    return output[..., :width]


def _kernel_options(window: int | None) -> dict[str, Any]:
    """Return the options for causal attention with grouped key heads, whose names differ between torch releases."""
    options: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in _PARAMETERS else {}
    if "window_size" in _PARAMETERS:
        return options | {"window_size": (-1 if window is None else window, 0)}
    if window is not None:
        raise MachineError(f"the flash kernel of torch {torch.__version__} has no windows; install a later release")
    return options | {"is_causal": True}


_PARAMETERS = inspect.signature(varlen_attn).parameters


class _SunkContext(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    spans: Spans
    scale: float | None
    window: int | None


class _Sunk(torch.autograd.Function):
    """With p the softmax over keys and s the share that the sink leaves them, the weights of keys are s p.

    The kernel's backward pass computes p (dp - sum(output * grad)) from its own p. With s times the output and s times
    the gradient it is s p (dp - sum(output * grad)) of the true ones.
    """

    @staticmethod
    def forward(
        ctx: _SunkContext,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor,
        spans: Spans,
        scale: float | None,
        window: int | None,
    ) -> Tensor:
        output, log_sums, state, unused = _forward(query, key, value, spans, scale, window)
        output = output * _share(log_sums, sinks).to(output.dtype)
        ctx.save_for_backward(query, key, value, sinks, output, log_sums, state, unused)
        ctx.spans, ctx.scale, ctx.window = spans, scale, window
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: _SunkContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, log_sums, state, unused = ctx.saved_tensors
        share = _share(log_sums, sinks)
        saved = (output, log_sums, state, unused)
        arrived = (grad * share.to(grad.dtype)).contiguous()
        grads = _backward(arrived, query, key, value, saved, ctx.spans, ctx.scale, ctx.window)
        inner = (grad.float() * output.float()).sum(dim=-1, keepdim=True)
        grad_sinks = -((1 - share) * inner).sum(dim=(0, 2))
        return *grads, grad_sinks.to(sinks.dtype), None, None, None


def _share(log_sums: Tensor, sinks: Tensor) -> Tensor:
    """Return the share of the softmax that sinks leave to keys. [N, heads, 1], float32"""
    assert log_sums.shape[0] == len(sinks), f"sums of {tuple(log_sums.shape)} for {len(sinks)} heads"
    return torch.sigmoid(log_sums - sinks.float()[:, None]).t()[..., None]


def _forward(
    query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float | None, window: int | None
) -> tuple[Tensor, ...]:
    """Return the output, the logarithms of the sums of exponentials [heads, N], and what the backward pass needs."""
    left = -1 if window is None else window
    results: tuple[Tensor, ...] = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        spans.query_starts,
        spans.key_starts,
        spans.most_queries,
        spans.most_keys,
        0.0,
        window is None,
        False,
        scale=scale,
        window_size_left=left,
        window_size_right=0,
    )
    return results[:4]


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    saved: tuple[Tensor, ...],
    spans: Spans,
    scale: float | None,
    window: int | None,
) -> tuple[Tensor, ...]:
    output, log_sums, state, unused = saved
    grads: tuple[Tensor, ...] = torch.ops.aten._flash_attention_backward(
        grad,
        query,
        key,
        value,
        output,
        log_sums,
        spans.query_starts,
        spans.key_starts,
        spans.most_queries,
        spans.most_keys,
        0.0,
        window is None,
        state,
        unused,
        scale=scale,
        window_size_left=-1 if window is None else window,
        window_size_right=0,
    )
    return grads
