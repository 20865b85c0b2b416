"""Attention with a gate for each channel of its output, for Megatron's layers (Qwen3-Next, Qwen3.5).

Megatron's own has the gates of a group behind its queries, where files and engines have a head's gate behind its query;
and it does not divide the gates where several ranks share a key head.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor


class GatedAttention(SelfAttention):
    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: None = None, **_options: object
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return queries, keys, values and gates. [N, 1, heads, head_dim]"""
        del key_value_states
        mixed, _ = self.linear_qkv(hidden_states)
        width, group = self.hidden_size_per_attention_head, self.pg_collection.tp
        # Ranks that share a key head have some rows of it each.
        num_sharing = max(1, group.size() // self.config.num_query_groups)
        if num_sharing > 1:
            mixed = all_gather_last_dim_from_tensor_parallel_region(mixed, group=group)
            mixed = mixed.chunk(self.config.num_query_groups, dim=-1)[group.rank() // num_sharing]
        mixed = torch.unflatten(mixed, -1, (self.num_query_groups_per_partition, -1))
        both, key, value = torch.split(mixed, [mixed.shape[-1] - 2 * width, width, width], dim=-1)
        both = torch.unflatten(both, -1, (-1, 2, width)).flatten(2, 3)  # [N, 1, heads, 2, head_dim]
        query, gate = both.chunk(num_sharing, dim=2)[group.rank() % num_sharing].unbind(-2)
        return self.q_layernorm(query), self.k_layernorm(key), value, gate

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        return (x * torch.sigmoid(gate.float()).view_as(x)).type_as(x)
