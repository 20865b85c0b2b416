"""Attention of queries to keys that lie elsewhere: those of a shared prefix, or of context-parallel ranks.

The keys that a run of queries sees are gathered by their places, so that one call of a kernel serves all runs. Where
several runs see a key, its gradient is their sum, in float32 and in one order: every pass has the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from megarl.data.packing import runs
from megarl.train.flash_attention import Spans, attend_by_flash
from megarl.train.softmax import Softmax, attend_on_host


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenKeys:
    """The keys that each run of queries sees, run after run; the last query of a run sees its last key."""

    places: Tensor  # [K], int32
    order: Tensor  # [K], int32: where each key is in `places`, key after key
    bounds: Tensor  # [keys + 1], int32: where the places of each key begin in `order`
    spans: Spans
    group: dist.ProcessGroup | None
    """The ranks whose keys lie end to end; None: the keys are this rank's own."""

    @classmethod
    def of(
        cls,
        starts: npt.NDArray[np.integer],
        own: npt.NDArray[np.integer],
        places: npt.NDArray[np.integer],
        *,
        num_keys: int,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> SeenKeys:
        """Return what the positions `own` see, in ascending order, of the sequences that begin at `starts`. [S + 1]

        `places` says of each position where its key is. [N]
        """

        def on_device(array: npt.NDArray[np.integer]) -> Tensor:
            return torch.from_numpy(array.astype(np.int32)).to(device=device, non_blocking=True)

        sequences = np.searchsorted(starts, own, "right") - 1
        goes_on = (np.diff(own) == 1) & (np.diff(sequences) == 0)
        begins = np.concatenate([[0], np.flatnonzero(~goes_on) + 1])
        ends = np.append(begins[1:], len(own))
        firsts = starts[sequences[begins]]
        query_lengths, key_lengths = ends - begins, own[ends - 1] + 1 - firsts
        seen = places[runs(firsts, key_lengths)]
        return cls(
            places=on_device(seen),
            order=on_device(np.argsort(seen, kind="stable")),
            bounds=on_device(np.cumsum([0, *np.bincount(seen, minlength=num_keys)])),
            spans=Spans(
                query_starts=on_device(np.cumsum([0, *query_lengths])),
                key_starts=on_device(np.cumsum([0, *key_lengths])),
                query_lengths=query_lengths.tolist(),
                key_lengths=key_lengths.tolist(),
            ),
            group=group,
        )


def attend_to_seen(query: Tensor, key: Tensor, value: Tensor, seen: SeenKeys, softmax: Softmax) -> Tensor:
    """Return the output of all queries. [N, heads, width]"""
    if seen.group is not None:
        # Gradients are summed over the ranks.
        whole = gather_from_sequence_parallel_region(torch.cat((key, value), dim=-1), group=seen.group)
        key, value = whole.split((key.shape[-1], value.shape[-1]), dim=-1)
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
