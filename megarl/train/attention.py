"""Causal attention over packed sequences, none of which sees another: a core attention for Megatron's local spec.

Queries and keys are rotated here, by one angle per position: Megatron would cut the angles per sequence and layer, and
wait for the device each time. On a CPU all sequences of one length are one call of SDPA. On a GPU packs of short
sequences go to torch's flash kernel (`flash_attention`); `long_attention` has what long ones need.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from megarl.data.context_parts import computed_parts
from megarl.train.delta_rule import Blocks, Chunks, blocks_of, chunks_of
from megarl.train.flash_attention import Spans, attend_by_flash
from megarl.train.length_groups import LengthGroups, attend_by_length, group_by_length
from megarl.train.long_attention import (
    ContextPart,
    Rectangles,
    attend_by_cudnn,
    context_part,
    is_usable,
    rectangles_of,
)
from megarl.train.routing import RankRoutes
from megarl.train.seen_keys import SeenKeys, attend_to_seen
from megarl.train.softmax import Softmax
from megarl.train.topology import Topology
from megarl.train.tower import Seen
from megarl.types import SharedPositions


@dataclass(kw_only=True)
class PackedSequences(PackedSeqParams):
    """Starts and lengths of a micro-batch's sequences. Megatron passes it to the attention of every layer.

    Megatron's own fields for this stay empty.
    """

    starts: Tensor  # [S + 1], int32, on the device
    lengths: list[int]
    rotations: tuple[Rotation, ...] = ()
    """Set by the model, one for each base of frequencies; none leaves queries and keys unrotated."""
    part: ContextPart | None = None
    """None where the sequences are whole."""
    seen: SeenKeys | None = None
    """None where each sequence sees only its own keys."""
    seen_images: Seen | None = None  # on ranks with the embedding, where there are images
    routes: RankRoutes | None = None  # None where the router of a mixture chooses
    dropout_keys: Tensor | None = None  # [N], int32, see `lora.dropout_keys`; None where adapters get all inputs

    def __post_init__(self) -> None:
        self.qkv_format = "thd"

    @cached_property
    def by_length(self) -> LengthGroups:
        return group_by_length(self.lengths)

    @cached_property
    def chunks(self) -> Chunks:
        """Chunks of the whole sequences."""
        return chunks_of(self._whole_lengths, self.starts.device)

    @cached_property
    def blocks(self) -> Blocks:
        """The whole sequences, as kernels go through them."""
        return blocks_of(self._whole_lengths, self.starts.device)

    @property
    def _whole_lengths(self) -> list[int]:
        assert self.seen is None, "a state has no branches: layers with one share no prefixes"
        return self.lengths if self.part is None else self.part.lengths

    @cached_property
    def rectangles(self) -> Rectangles | None:
        return rectangles_of(self.lengths)


def packed_sequences(
    starts: npt.NDArray[np.int32], topology: Topology, shared: SharedPositions | None = None
) -> PackedSequences:
    """Return the sequences of a micro-batch as this rank has them; `starts` are those of the whole ones. [S + 1]"""
    if shared is not None:
        return _sharing_sequences(starts, topology, shared)
    own = starts // topology.context
    return PackedSequences(
        starts=torch.from_numpy(own).to(device=topology.device, dtype=torch.int32, non_blocking=True),
        lengths=np.diff(own).tolist(),
        part=context_part(starts, topology) if topology.context > 1 else None,
    )


def _sharing_sequences(starts: npt.NDArray[np.int32], topology: Topology, shared: SharedPositions) -> PackedSequences:
    """Return the runs that this rank computes of each row: its end, or parts of it, whose queries see the whole row."""
    own, group = shared.computed, None
    places: npt.NDArray[np.integer] = shared.places
    if topology.context > 1:
        of_ranks = computed_parts(shared, topology.context)
        own, group = own[of_ranks[topology.context_rank]], topology.context_group
        places = np.argsort(of_ranks.ravel())[places]
    seen = SeenKeys.of(starts, own, places, num_keys=len(shared.computed), device=topology.device, group=group)
    return PackedSequences(starts=seen.spans.query_starts, lengths=seen.spans.query_lengths, seen=seen)


class PackedAttention(torch.nn.Module):
    softmax_offset: torch.nn.Parameter | None
    """The sinks, by Megatron's name for them."""

    def __init__(
        self,
        *,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: object,
        attention_type: str,
        cp_comm_type: str | None,
        softmax_scale: float | None,
        pg_collection: ProcessGroupCollection | None,
        window: int | None = None,
        has_sinks: bool = False,
        base: int = 0,
    ) -> None:
        """`window` and sinks as in `Softmax`; `base` is the number of the rotation."""
        super().__init__()
        del attn_mask_type
        assert attention_type == "self", attention_type
        self.scale, self.window, self.base = softmax_scale, window, base
        self.register_parameter("softmax_offset", _sinks(config, pg_collection) if has_sinks else None)
        self.exchanging: torch.nn.Module | None = None
        if cp_comm_type is not None and config.context_parallel_size > 1:
            assert window is None, "Transformer Engine exchanges no windows here"
            assert not has_sinks, "Transformer Engine exchanges no sinks here"
            from megatron.core.extensions.transformer_engine import (  # noqa: PLC0415 - on GPU machines only
                TEDotProductAttention,
            )

            self.exchanging = TEDotProductAttention(
                config,
                layer_number,
                AttnMaskType.padding_causal,
                attention_type,
                softmax_scale=softmax_scale,
                cp_comm_type=cp_comm_type,
                pg_collection=pg_collection,
            )

    def forward(
        self,
        query: Tensor,  # [N, heads, head_dim]
        key: Tensor,  # [N, kv heads, head_dim]
        value: Tensor,  # [N, kv heads, width]
        attention_mask: None,
        *,
        attn_mask_type: object,
        attention_bias: None,
        packed_seq_params: PackedSequences,
    ) -> Tensor:
        del attention_mask, attn_mask_type, attention_bias
        if packed_seq_params.rotations:
            rotation = packed_seq_params.rotations[self.base]
            query, key = rotated(query, rotation), rotated(key, rotation)
        if query.is_cuda and query.dtype == torch.float32:
            # Flash kernels have no float32.
            query, key, value = query.bfloat16(), key.bfloat16(), value.bfloat16()
            return self._attend(query, key, value, packed_seq_params).float()
        return self._attend(query, key, value, packed_seq_params)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, packed_seq_params: PackedSequences) -> Tensor:
        softmax = Softmax(scale=self.scale, window=self.window, sinks=self.softmax_offset)
        part = packed_seq_params.part
        if part is not None and self.exchanging is not None:
            whole, mask = part.whole, AttnMaskType.padding_causal
            attended: Tensor = self.exchanging(query, key, value, None, attn_mask_type=mask, packed_seq_params=whole)
            return attended.view(query.shape)
        seen = packed_seq_params.seen if part is None else part.seen
        if seen is not None:
            return attend_to_seen(query, key, value, seen, softmax)
        if query.device.type == "cpu":
            return attend_by_length(query, key, value, packed_seq_params.by_length, softmax)
        rectangles = packed_seq_params.rectangles
        is_usual = softmax.is_plain and key.shape == value.shape
        if (
            rectangles is not None
            and is_usual
            and is_usable(query.device, query.dtype, query.shape[1], key.shape[1], query.shape[2])
        ):
            return attend_by_cudnn(query, key, value, rectangles, self.scale)
        starts, lengths = packed_seq_params.starts, packed_seq_params.lengths
        spans = Spans(query_starts=starts, key_starts=starts, query_lengths=lengths, key_lengths=lengths)
        return attend_by_flash(query, key, value, spans, softmax)


def _sinks(config: TransformerConfig, groups: ProcessGroupCollection | None) -> torch.nn.Parameter:
    """Return the logits of this rank's heads."""
    assert groups is not None, "attention with sinks without its groups"
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    num_heads = config.num_attention_heads // groups.tp.size()
    sinks = torch.nn.Parameter(torch.zeros(num_heads, dtype=config.params_dtype, device=device))
    set_tensor_model_parallel_attributes(sinks, True, 0, 1)
    return sinks


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """Rotary angles per position of a pack."""

    cosines: Tensor  # [N, pairs], float32
    sines: Tensor  # [N, pairs], float32
    is_fused: bool = True
    """Whether a kernel of Triton rotates, where there is a GPU."""

    @classmethod
    def by(cls, angles: Tensor, magnitude: float = 1.0, *, is_fused: bool = True) -> Rotation:
        """Return the rotation by these angles, which also multiplies by `magnitude`."""
        angles = angles.contiguous()  # once, not in each layer: those of images come transposed
        return cls(cosines=angles.cos() * magnitude, sines=angles.sin() * magnitude, is_fused=is_fused)


def rotated(values: Tensor, rotation: Rotation) -> Tensor:
    """Rotary position embedding, the two halves of the channels as pairs. [N, heads, head_dim]

    With fewer angles than pairs the first channels turn, and the others stay.
    """
    num_turned = 2 * rotation.cosines.shape[-1]
    if num_turned < values.shape[-1]:
        return torch.cat((rotated(values[..., :num_turned], rotation), values[..., num_turned:]), dim=-1)
    if values.is_cuda and rotation.is_fused:
        return _Rotated.apply(values, rotation.cosines, rotation.sines)  # type: ignore[no-any-return, no-untyped-call]
    halves = rotation.cosines, rotation.sines
    cosines, sines = (torch.cat((half, half), dim=-1)[:, None].to(values.dtype) for half in halves)
    first, second = values.chunk(2, dim=-1)
    return values * cosines + torch.cat((-second, first), dim=-1) * sines


class _RotationContext(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _RotationContext, values: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        from megarl.train.kernels import rotate  # noqa: PLC0415 - triton is only on GPU machines

        ctx.save_for_backward(cosines, sines)
        return rotate(values, cosines, sines, direction=1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: _RotationContext, grad: Tensor) -> tuple[Tensor, None, None]:
        from megarl.train.kernels import rotate  # noqa: PLC0415 - triton is only on GPU machines

        cosines, sines = ctx.saved_tensors
        return rotate(grad, cosines, sines, direction=-1.0), None, None
