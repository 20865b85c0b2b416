"""A gated delta net in the place of a layer's attention, for Megatron's layers (Qwen3-Next, Qwen3.5).

Megatron's own refuses packed sequences and context parallelism, and needs flash-linear-attention. Tensor-parallel ranks
have their own key heads, with the value heads that belong to them; ranks that share sequences exchange their tokens for
some of these heads, since a state follows from all tokens before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    all_to_all,
    copy_to_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megarl.families.shape import DeltaWidths
from megarl.train.attention import PackedSequences
from megarl.train.delta_fused import convolved, delta_rule_fused, gated_norm, is_usable
from megarl.train.delta_rule import delta_rule, short_convolution

_NORM_EPS = 1e-6
"""Added to the squared length of queries and keys, as in engines."""


@dataclass(kw_only=True)
class DeltaSubmodules:
    in_proj: type[torch.nn.Module]
    out_proj: type[torch.nn.Module]


class GatedDeltaNet(MegatronModule):
    def __init__(
        self,
        config: TransformerConfig,
        submodules: DeltaSubmodules,
        layer_number: int,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        widths: DeltaWidths,
        is_fused: bool = True,
    ) -> None:
        super().__init__(config)
        assert pg_collection is not None, "a delta net without its groups"
        del layer_number, cp_comm_type
        self.widths, self._groups = widths, pg_collection
        self.is_fused = is_fused and is_usable(widths)
        num_ranks = pg_collection.tp.size()
        self.in_proj = submodules.in_proj(
            config.hidden_size,
            widths.projected,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_comm_buffer_name="qkv",
            tp_group=pg_collection.tp,
        )
        self.out_proj = submodules.out_proj(
            widths.values,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_comm_buffer_name="proj",
            tp_group=pg_collection.tp,
        )
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()

        def parameter(*shape: int, dtype: torch.dtype = config.params_dtype) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))

        heads = widths.value_heads // num_ranks
        self.conv_weight = parameter(widths.convolved // num_ranks, 1, widths.kernel)
        self.A_log = parameter(heads, dtype=torch.float32)
        self.dt_bias = parameter(heads)
        for each in (self.conv_weight, self.A_log, self.dt_bias):
            set_tensor_model_parallel_attributes(each, True, 0, 1)
        self.norm_weight = parameter(widths.value)  # that of every head

    def forward(
        self,
        hidden_states: Tensor,  # [N, 1, hidden], or a tensor-parallel rank's part of the tokens
        attention_mask: None,
        *,
        packed_seq_params: PackedSequences,
        **_options: object,
    ) -> tuple[Tensor, Tensor | None]:
        del attention_mask
        projected, _ = self.in_proj(hidden_states)
        if torch.is_grad_enabled() and self.config.recompute_granularity != "full":
            # Tensors of chunks x chunks in float32 for each head: too many to keep until the backward pass.
            computed = checkpoint(
                self._compute, projected[:, 0], packed_seq_params, use_reentrant=False, preserve_rng_state=False
            )
        else:
            computed = self._compute(projected[:, 0], packed_seq_params)
        output: tuple[Tensor, Tensor | None] = self.out_proj(computed[:, None])
        return output

    def _compute(self, projected: Tensor, sequences: PackedSequences) -> Tensor:
        """Return the gated output of this rank's heads. [N, rows] -> [N, value channels]"""
        widths, part = self.widths, sequences.part
        per_key = widths.value_heads // widths.key_heads
        by_key = torch.unflatten(
            projected, -1, (-1, widths.projected // widths.key_heads)
        )  # [N, key heads, rows of one]
        mine = slice(None)
        if part is not None:
            share = by_key.shape[1] // part.group.size()
            mine = slice(part.group.rank() * share, (part.group.rank() + 1) * share)
            by_key = _whole_sequences(by_key, part.group).index_select(0, part.places)
        rows = [widths.convolved // widths.key_heads, per_key * widths.value, per_key, per_key]
        values, gate, strength, speed = torch.split(by_key, rows, dim=-1)
        dtype = torch.promote_types(projected.dtype, torch.float32)
        bias, rate = (each.view(-1, per_key)[mine].to(dtype) for each in (self.dt_bias, self.A_log))
        decay = (-rate.exp() * F.softplus(speed.to(dtype) + bias)).flatten(1)
        numbers = decay, torch.sigmoid(strength.to(dtype)).flatten(1)
        weight = self._convolution_weight()[mine].to(dtype)
        # Each rank has the gradient of its own heads.
        norm_weight = copy_to_tensor_model_parallel_region(self.norm_weight, group=self._groups.tp)
        if self.is_fused and projected.is_cuda and projected.dtype != dtype:
            gated = self._by_kernels(values, weight, gate, numbers, norm_weight, sequences)
        else:
            gated = self._in_torch(values, weight, gate, numbers, norm_weight, sequences)
        if part is not None:
            gated = _own_tokens(gated.index_select(0, part.gathered), part.group)
        return gated.flatten(1)

    def _by_kernels(
        self,
        values: Tensor,
        weight: Tensor,
        gate: Tensor,
        numbers: tuple[Tensor, Tensor],
        norm_weight: Tensor,
        sequences: PackedSequences,
    ) -> Tensor:
        blocks = sequences.blocks
        query, key, value = convolved(values, weight, self.widths, blocks.ages, _NORM_EPS)
        output = delta_rule_fused(query, key, value, *numbers, blocks)
        return gated_norm(output, gate, norm_weight, self.config.layernorm_epsilon)

    def _in_torch(
        self,
        values: Tensor,
        weight: Tensor,
        gate: Tensor,
        numbers: tuple[Tensor, Tensor],
        norm_weight: Tensor,
        sequences: PackedSequences,
    ) -> Tensor:
        widths, chunks, dtype = self.widths, sequences.chunks, weight.dtype
        per_key = widths.value_heads // widths.key_heads
        summed = F.silu(short_convolution(values.flatten(1).to(dtype), weight.flatten(0, 1), chunks.ages))
        # Rounded as engines round it.
        summed = torch.unflatten(summed.to(values.dtype).to(dtype), -1, (values.shape[1], -1))
        query, key, value = torch.split(summed, [widths.key, widths.key, per_key * widths.value], dim=-1)
        query, key = _unit(query), _unit(key)
        value, gate = (torch.unflatten(each, -1, (per_key, widths.value)).flatten(1, 2) for each in (value, gate))
        query, key = (each.repeat_interleave(per_key, dim=1) for each in (query, key))
        output = delta_rule(query * widths.key**-0.5, key, value, *numbers, chunks)
        output = output.to(values.dtype).to(dtype)
        normed = F.rms_norm(output, output.shape[-1:], norm_weight.to(dtype), self.config.layernorm_epsilon)
        return (normed * F.silu(gate.to(dtype))).to(values.dtype)

    def _convolution_weight(self) -> Tensor:
        """Return the weights by key head, which the parameter has as all queries, all keys and all values."""
        widths, heads = self.widths, self.widths.key_heads // self._groups.tp.size()
        keys, values = heads * widths.key, heads * widths.values // widths.key_heads
        parts = torch.split(self.conv_weight[:, 0], [keys, keys, values])
        return torch.cat([torch.unflatten(part, 0, (heads, -1)) for part in parts], dim=1)


def _unit(values: Tensor) -> Tensor:
    return values * torch.rsqrt(values.square().sum(dim=-1, keepdim=True) + _NORM_EPS)


def _whole_sequences(values: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    """Return some heads of all ranks' tokens, rank after rank. [N, heads, ...] -> [ranks * N, heads / ranks, ...]"""
    by_rank = torch.unflatten(values, 1, (group.size(), -1)).transpose(0, 1)
    return all_to_all(group, by_rank.flatten(0, 1))  # type: ignore[no-any-return]


def _own_tokens(values: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    """Return all heads of this rank's tokens: the inverse of `_whole_sequences`."""
    exchanged: Tensor = all_to_all(group, values)
    return torch.unflatten(exchanged, 0, (group.size(), -1)).transpose(0, 1).flatten(1, 2)
