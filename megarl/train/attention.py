"""Causal attention over packed sequences, none of which sees another: a core attention for Megatron's local spec.

Queries and keys are rotated here, by one angle per position: Megatron would cut the angles per sequence and layer, and
wait for the device each time. On a CPU all sequences of one length are one call of SDPA. On a GPU long sequences go to
cuDNN if it is usable, packs of short ones to torch's flash kernel.
"""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from megarl.train import cudnn_attention
from megarl.train.layers import Rotation, rotated


@dataclass(kw_only=True)
class PackedSequences(PackedSeqParams):
    """Starts and lengths of a micro-batch's sequences. Megatron passes it to the attention of every layer.

    Megatron's own fields for this stay empty.
    """

    starts: Tensor  # [S + 1], int32, on the device
    lengths: list[int]
    rotation: Rotation | None = None
    """Set by the model; None leaves queries and keys unrotated."""

    def __post_init__(self) -> None:
        self.qkv_format = "thd"

    @cached_property
    def by_length(self) -> LengthGroups:
        return _group_by_length(self.lengths)

    @cached_property
    def longest(self) -> int:
        return max(self.lengths)

    @cached_property
    def rectangles(self) -> cudnn_attention.Rectangles | None:
        return cudnn_attention.rectangles_of(self.lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthGroups:
    """Positions ordered by the length of their sequence: sequences of one length form one rectangle."""

    order: Tensor  # [N]
    inverse: Tensor  # [N]
    rectangles: list[tuple[int, int]]
    """(number of sequences, their length), shortest first."""


class PackedAttention(torch.nn.Module):
    def __init__(
        self,
        *,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: object,
        attention_type: str,
        cp_comm_type: str | None,
        softmax_scale: float | None,
        pg_collection: object,
    ) -> None:
        super().__init__()
        del config, layer_number, attn_mask_type, cp_comm_type, pg_collection
        assert attention_type == "self", attention_type
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,  # [N, heads, head_dim]
        key: Tensor,  # [N, kv heads, head_dim]
        value: Tensor,
        attention_mask: None,
        *,
        attn_mask_type: object,
        attention_bias: None,
        packed_seq_params: PackedSequences,
    ) -> Tensor:
        del attention_mask, attn_mask_type, attention_bias
        rotation = packed_seq_params.rotation
        if rotation is not None:
            query, key = rotated(query, rotation), rotated(key, rotation)
        if query.device.type == "cpu":
            return _attend_by_length(query, key, value, packed_seq_params.by_length, self.scale)
        rectangles = packed_seq_params.rectangles
        if rectangles is not None and cudnn_attention.is_usable(
            query.device, query.dtype, query.shape[1], key.shape[1], query.shape[2]
        ):
            return cudnn_attention.attend(query, key, value, rectangles, self.scale)
        starts, longest = packed_seq_params.starts, packed_seq_params.longest
        output = varlen_attn(query, key, value, starts, starts, longest, longest, scale=self.scale, **_CAUSAL_GROUPED)
        assert isinstance(output, Tensor)
        return output


def _attend_by_length(query: Tensor, key: Tensor, value: Tensor, groups: LengthGroups, scale: float | None) -> Tensor:
    def rectangles(tensor: Tensor) -> list[Tensor]:
        """Return rectangles of [sequences, heads, length, head_dim]."""
        sizes = [num * length for num, length in groups.rectangles]
        parts = torch.split(tensor.index_select(0, groups.order), sizes)
        shapes = [(num, length, *tensor.shape[1:]) for num, length in groups.rectangles]
        return [part.view(shape).transpose(1, 2) for part, shape in zip(parts, shapes, strict=True)]

    outputs = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        for q, k, v in zip(rectangles(query), rectangles(key), rectangles(value), strict=True)
    ]
    return torch.cat([output.transpose(1, 2).flatten(0, 1) for output in outputs]).index_select(0, groups.inverse)


def _group_by_length(lengths: list[int]) -> LengthGroups:
    # Stable: sequences of one length keep their order, and each its tokens together.
    order = torch.tensor(lengths).repeat_interleave(torch.tensor(lengths)).argsort(stable=True)
    counts = Counter(lengths)
    return LengthGroups(
        order=order,
        inverse=order.argsort(),
        rectangles=[(counts[length], length) for length in sorted(counts)],
    )


def _causal_grouped() -> dict[str, Any]:
    """Return the options for causal attention with grouped key heads, whose names differ between torch releases."""
    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if "enable_gqa" in known:
        options["enable_gqa"] = True
    return options


_CAUSAL_GROUPED = _causal_grouped()
