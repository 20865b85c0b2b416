"""Causal attention over packed sequences: no token sees another sequence. A core attention for Megatron's local spec.

On CPU each sequence is one call of SDPA; on a GPU all of them are one call of the variable-length flash kernel.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn


@dataclass(kw_only=True)
class PackedSequences(PackedSeqParams):
    """Where the sequences of a micro-batch begin and end, as Megatron carries it to the attention of every layer.

    Megatron's own fields for this stay empty: from them it would cut the rotary angles per sequence, layer by layer,
    waiting for the device each time. Ours arrive per position.
    """

    starts: Tensor  # [S + 1], int32, on the device
    lengths: list[int]

    def __post_init__(self) -> None:
        self.qkv_format = "thd"


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
        if query.device.type == "cpu":
            return _per_sequence(query, key, value, packed_seq_params.lengths, self.scale)
        longest = max(packed_seq_params.lengths)
        starts = packed_seq_params.starts
        output = varlen_attn(query, key, value, starts, starts, longest, longest, scale=self.scale, **_CAUSAL_GROUPED)
        assert isinstance(output, Tensor)
        return output


def _per_sequence(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scale: float | None) -> Tensor:
    outputs = [
        F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            is_causal=True,
            scale=scale,
            enable_gqa=True,
        )[0].transpose(0, 1)
        for q, k, v in zip(*(torch.split(tensor, lengths) for tensor in (query, key, value)), strict=True)
    ]
    return torch.cat(outputs)


def _causal_grouped() -> dict[str, Any]:
    """How this torch spells "causal, with fewer key heads than query heads": releases differ."""
    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if "enable_gqa" in known:
        options["enable_gqa"] = True
    return options


_CAUSAL_GROUPED = _causal_grouped()
