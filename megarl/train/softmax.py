"""Causal attention of queries over keys, some within a window, some with sinks, with values of another width than keys.

Here on a CPU, by torch's SDPA with a mask; on a GPU by `flash_attention`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Softmax:
    """The softmax of a layer: its factor, and which logits it is over."""

    scale: float | None = None
    """Factor of the logits; None: one over the root of a key's width."""
    window: int | None = None
    """Tokens before its own that a token sees; None: all."""
    sinks: Tensor | None = None
    """[heads]: a logit that takes its share of the softmax and has no value."""

    @property
    def is_plain(self) -> bool:
        return self.window is None and self.sinks is None


def attend_on_host(query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
    """[sequences, heads, length, width]; the last query sees the last key."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    options: dict[str, Any] = {"scale": softmax.scale, "enable_gqa": True}
    if softmax.is_plain and num_queries == num_keys:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, **options)
    everything, ahead = torch.ones(num_queries, num_keys, dtype=torch.bool), num_keys - num_queries
    visible = everything.tril(ahead)
    if softmax.window is not None:
        visible &= everything.triu(ahead - softmax.window)
    if softmax.sinks is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=visible, **options)
    # One more key of zeros with a value of zeros, whose logit is the sink's.
    hidden = torch.zeros(visible.shape, dtype=query.dtype).masked_fill(~visible, -torch.inf)
    sinks = softmax.sinks.to(query.dtype).view(-1, 1, 1)
    logits = torch.cat((hidden.expand(len(sinks), -1, -1), sinks.expand(-1, num_queries, 1)), dim=-1)
    key, value = F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=logits, **options)
