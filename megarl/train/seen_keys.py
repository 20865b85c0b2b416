"""Attention of queries to keys that lie elsewhere: those of a shared prefix, or of ranks that share a sequence.

The keys that a run of queries sees are gathered by their places, so that one call of a kernel serves all runs. Where
several runs see a key, its gradient is their sum, in float32 and in one order: every pass has the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from megarl.train.flash_attention import Spans, attend_by_flash
from megarl.train.softmax import Softmax, attend_on_host


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenKeys:
    """The keys that each run of queries sees, run after run; the last query of a run sees its last key."""

    places: Tensor  # [K], int32
    order: Tensor  # [K], int32: where each key is in `places`, key after key
    bounds: Tensor  # [keys + 1], int32: where the places of each key begin in `order`
    spans: Spans

    @classmethod
    def of(
        cls,
        places: npt.NDArray[np.integer],
        *,
        num_keys: int,
        query_lengths: npt.NDArray[np.integer],
        key_lengths: npt.NDArray[np.integer],
        device: torch.device,
    ) -> SeenKeys:
        def on_device(array: npt.NDArray[np.integer]) -> Tensor:
            return torch.from_numpy(array.astype(np.int32)).to(device=device, non_blocking=True)

        counts = np.bincount(places, minlength=num_keys)
        return cls(
            places=on_device(places),
            order=on_device(np.argsort(places, kind="stable")),
            bounds=on_device(np.cumsum([0, *counts])),
            spans=Spans(
                query_starts=on_device(np.cumsum([0, *query_lengths])),
                key_starts=on_device(np.cumsum([0, *key_lengths])),
                query_lengths=query_lengths.tolist(),
                key_lengths=key_lengths.tolist(),
            ),
        )


def attend_to_seen(query: Tensor, key: Tensor, value: Tensor, seen: SeenKeys, softmax: Softmax) -> Tensor:
    """Return the output of all queries. [N, heads, width]"""
    keys, values = (_gathered(tensor, seen) for tensor in (key, value))
    spans = seen.spans
    if query.device.type == "cuda":
        return attend_by_flash(query, keys, values, spans, softmax)
    columns = ((query, spans.query_lengths), (keys, spans.key_lengths), (values, spans.key_lengths))
    runs = ([each.transpose(0, 1)[None] for each in torch.split(tensor, sizes)] for tensor, sizes in columns)
    outputs = [attend_on_host(q, k, v, softmax)[0].transpose(0, 1) for q, k, v in zip(*runs, strict=True)]
    return torch.cat(outputs)


def _gathered(tensor: Tensor, seen: SeenKeys) -> Tensor:
    gathered: Tensor = _Gathered.apply(tensor, seen)  # type: ignore[no-untyped-call]
    return gathered


class _GatheredContext(FunctionCtx):
    seen: SeenKeys


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _GatheredContext, tensor: Tensor, seen: SeenKeys) -> Tensor:
        ctx.seen = seen
        return tensor.index_select(0, seen.places)

    @staticmethod
    @once_differentiable
    def backward(ctx: _GatheredContext, grad: Tensor) -> tuple[Tensor, None]:
        seen = ctx.seen
        if grad.is_cuda:
            from megarl.train.kernels import sum_places  # noqa: PLC0415 - triton is only on GPU machines

            return sum_places(grad, seen.order, seen.bounds), None
        nothing = grad.new_zeros((len(seen.bounds) - 1, *grad.shape[1:]))
        return nothing.index_add_(0, seen.places, grad), None
