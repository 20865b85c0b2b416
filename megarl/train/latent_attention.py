"""Attention whose queries, keys and values come from small latent vectors (DeepSeek's MLA), for Megatron's layers.

Parameters have the names of Megatron's own `MLASelfAttention`, which rotates positions by a table for each sequence,
duplicates the down projections where Transformer Engine has them, and leaves out a sum of gradients: the keys' rotated
channels are one vector for all heads, and each tensor-parallel rank has its own heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.families.shape import LatentWidths
from megarl.train.layers import RMSNorm


class _Linear(Protocol):
    def __call__(self, values: Tensor) -> tuple[Tensor, Tensor | None]: ...


@dataclass(kw_only=True)
class LatentSubmodules:
    core_attention: Callable[..., torch.nn.Module]
    linear_proj: type[torch.nn.Module]
    linear: type[torch.nn.Module]
    """Every other projection: a column-parallel one."""


class LatentAttention(Attention):
    def __init__(
        self,
        config: TransformerConfig,
        submodules: LatentSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.padding,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        widths: LatentWidths,
    ) -> None:
        super().__init__(
            config, submodules, layer_number, attn_mask_type, "self", cp_comm_type, pg_collection=pg_collection
        )
        self.widths = widths
        self.q_layernorm: RMSNorm | None = None
        self.k_layernorm = None  # of Megatron's other attention

        def linear(name: str, columns: int, rows: int) -> None:
            layer = submodules.linear(
                columns,
                rows,
                config=config,
                init_method=config.init_method,
                gather_output=False,
                bias=False,
                skip_bias_add=False,
                is_expert=False,
                tp_comm_buffer_name=name,
                tp_group=self.pg_collection.tp,
            )
            self.add_module(f"linear_{name}", layer)

        hidden, heads = config.hidden_size, config.num_attention_heads
        if widths.query_rank is None:
            linear("q_proj", hidden, heads * widths.query)
        else:
            linear("q_down_proj", hidden, widths.query_rank)
            linear("q_up_proj", widths.query_rank, heads * widths.query)
            self.q_layernorm = RMSNorm(config, widths.query_rank, config.layernorm_epsilon)
        linear("kv_down_proj", hidden, widths.key_rank + widths.rotary)
        linear("kv_up_proj", widths.key_rank, heads * (widths.plain + widths.value))
        self.kv_layernorm = RMSNorm(config, widths.key_rank, config.layernorm_epsilon)

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: None = None, **_options: object
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return [N, 1, heads, width] of each; the channels that turn with the position come first."""
        del key_value_states
        widths = self.widths
        if self.q_layernorm is None:
            query = self.linear_q_proj(hidden_states)[0]
        else:
            query = self._latent(self.linear_q_down_proj, hidden_states)
            query = self.linear_q_up_proj(self.q_layernorm(self._scattered(query)))[0]
        query = torch.unflatten(query, -1, (-1, widths.query))
        plain, turned = torch.split(query, [widths.plain, widths.rotary], dim=-1)
        query = torch.cat((_by_halves(turned), plain), dim=-1)

        down = self._latent(self.linear_kv_down_proj, hidden_states)
        latent, shared = torch.split(down, [widths.key_rank, widths.rotary], dim=-1)
        both = self.linear_kv_up_proj(self.kv_layernorm(self._scattered(latent)))[0]
        both = torch.unflatten(both, -1, (-1, widths.plain + widths.value))
        plain, value = torch.split(both, [widths.plain, widths.value], dim=-1)
        # Each rank has the gradient of its own heads.
        shared = copy_to_tensor_model_parallel_region(shared, group=self.pg_collection.tp)
        turned = _by_halves(shared)[:, :, None].expand(*plain.shape[:-1], widths.rotary)
        return query, torch.cat((turned, plain), dim=-1), value

    def _latent(self, down: _Linear, hidden: Tensor) -> Tensor:
        """Return the whole latent vectors of all tokens."""
        return gather_from_tensor_model_parallel_region(down(hidden)[0], group=self.pg_collection.tp)  # type: ignore[no-any-return]

    def _scattered(self, latent: Tensor) -> Tensor:
        """Return this rank's tokens with sequence parallelism: the up projection gathers them."""
        if self.config.sequence_parallel:
            latent = scatter_to_sequence_parallel_region(latent, group=self.pg_collection.tp)
        return latent


def _by_halves(values: Tensor) -> Tensor:
    """Return channels that are pairs by turns in the order that `rotated` takes: all firsts, then all seconds."""
    return torch.unflatten(values, -1, (-1, 2)).transpose(-1, -2).flatten(-2)
