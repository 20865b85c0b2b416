"""Policy and critic as Megatron modules: GPTModel chunks built from a Hugging Face shape, for Llama, Qwen2, Qwen3 and
its mixtures of experts; and the micro-batch that goes through them.

The layers are those of `layers`. Weights are zero until they are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.algo.loss import Segments
from megarl.config.kernels import adds_gradients_in_products, uses_te
from megarl.config.model import ModelShape
from megarl.config.roles import ModelParallelConfig
from megarl.config.section import Device
from megarl.data.packing import zigzag
from megarl.errors import ConfigError, Problem
from megarl.train.attention import PackedSequences, Rotation, packed_sequences, rotary_frequencies, rotary_magnitude
from megarl.train.layer_spec import layer_spec, mixture_fields, precision_fields
from megarl.train.layers import RMSNorm
from megarl.train.likeliest import Head, at_places, candidate_logprobs
from megarl.train.logprob import TokenScores, token_scores, vocab_shard
from megarl.train.routing import rank_routes
from megarl.train.topology import Topology
from megarl.types import FloatArray, MicroBatch
from megarl.weights.executors.tensors import torch_dtype
from megarl.weights.layouts.megatron import MegatronParallel, layout_name, padded_vocab


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMicroBatch:
    """This rank's N tokens of a micro-batch: all of them, or two chunks of each sequence (`data.packing.zigzag`)."""

    token_ids: Tensor  # [1, N], int64
    positions: Tensor  # [1, N], int64
    sequences: PackedSequences
    episode_starts: Tensor  # [E + 1], int32
    episode_loss_tokens: Tensor | None  # [E], int64; None where every sequence is a whole episode
    targets: Tensor  # [N], int64
    loss_places: Tensor | None  # [K], int64, where `loss_mask` is True; None in a forward pass
    loss_mask: Tensor  # [N], bool
    rollout_logprobs: Tensor  # [N]
    advantages: Tensor  # [N]
    old_logprobs: Tensor | None  # [N]
    reference_logprobs: Tensor | None  # [N]
    values: Tensor | None  # [N]
    returns: Tensor | None  # [N]
    versions: Tensor | None  # [N], int32
    teacher: Tensor | None  # [N, 1 + 2K], see `likeliest.top_scores`
    temperature: float
    num_pack_tokens: int
    """Tokens of the whole micro-batch, over all ranks that share it."""

    @property
    def candidates(self) -> Tensor | None:
        """[N, K], int64: the teacher's likeliest tokens; None where it has named none."""
        num_top = 0 if self.teacher is None else self.teacher.shape[1] // 2
        return self.teacher[:, 1 + num_top :].long() if self.teacher is not None and num_top else None

    def segments(self, topology: Topology) -> Segments:
        over_parts = topology.sum_over_context if topology.context > 1 else None
        return Segments.of(self.loss_mask, self.episode_starts, self.episode_loss_tokens, over_parts)


def to_device(micro_batch: MicroBatch, topology: Topology, *, temperature: float) -> DeviceMicroBatch:
    """Copy this rank's tokens to its device."""
    device, context = topology.device, topology.context
    mine = zigzag(micro_batch.sequence_starts, context)[topology.context_rank] if context > 1 else slice(None)

    def tensor(array: npt.NDArray[np.generic], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(array[mine]).to(device=device, dtype=dtype, non_blocking=True)

    def column(array: FloatArray | None) -> Tensor | None:
        return None if array is None else tensor(array, torch.float32)

    def padded(array: npt.NDArray[np.generic], dtype: torch.dtype) -> Tensor:
        """Return zeros for a column that a forward pass does not have."""
        return tensor(array, dtype) if array.size else torch.zeros(num_tokens // context, device=device, dtype=dtype)

    num_tokens, rows = len(micro_batch.token_ids), micro_batch.rows
    has_loss = micro_batch.loss_mask.size > 0
    sequences = packed_sequences(micro_batch.sequence_starts, topology)
    if micro_batch.routes is not None:
        sequences.routes = rank_routes(micro_batch.routes, mine, topology)
    episode_starts = micro_batch.sequence_starts if rows is None else rows.episode_starts
    return DeviceMicroBatch(
        token_ids=tensor(micro_batch.token_ids, torch.int64)[None],
        positions=tensor(micro_batch.positions, torch.int64)[None],
        sequences=sequences,
        episode_starts=torch.from_numpy(episode_starts // context).to(device=device, non_blocking=True),
        episode_loss_tokens=None if rows is None else torch.from_numpy(rows.num_loss_tokens).to(device=device),
        targets=tensor(micro_batch.targets, torch.int64),
        # Found on the host: on a GPU it would have to be waited for.
        loss_places=torch.from_numpy(np.flatnonzero(micro_batch.loss_mask[mine])).to(device) if has_loss else None,
        loss_mask=padded(micro_batch.loss_mask, torch.bool),
        rollout_logprobs=padded(micro_batch.rollout_logprobs, torch.float32),
        advantages=padded(micro_batch.advantages, torch.float32),
        old_logprobs=column(micro_batch.old_logprobs),
        reference_logprobs=column(micro_batch.reference_logprobs),
        values=column(micro_batch.values),
        returns=column(micro_batch.returns),
        versions=None if micro_batch.versions is None else tensor(micro_batch.versions, torch.int32),
        teacher=column(micro_batch.teacher),
        temperature=temperature,
        num_pack_tokens=num_tokens,
    )


def whole_column(column: Tensor, micro_batch: MicroBatch, topology: Topology) -> FloatArray:
    """Return a column of this rank's tokens for all tokens of the micro-batch; the ranks that share it call it.

    [N], or [N, K] where each token has several numbers.
    """
    if topology.context == 1:
        return column.float().cpu().numpy()
    shape = (len(micro_batch.token_ids), *column.shape[1:])
    gathered = torch.empty(shape, dtype=torch.float32, device=column.device)
    dist.all_gather_into_tensor(gathered, column.float(), group=topology.context_group)
    whole = np.empty(shape, np.float32)
    whole[zigzag(micro_batch.sequence_starts, topology.context).ravel()] = gathered.cpu().numpy()
    return whole


class Model(GPTModel):
    """One chunk; the first has the embedding, and in the last a subclass turns hidden states into its output."""

    is_fused = True
    """Whether kernels of Triton are used, where there is a GPU."""

    def __init__(
        self,
        config: TransformerConfig,
        block: TransformerBlockSubmodules,
        shape: ModelShape,
        topology: Topology,
        chunk: int,
    ) -> None:
        super().__init__(
            config=config,
            transformer_layer_spec=block,
            vocab_size=padded_vocab(shape.vocab, topology.tensor),
            max_sequence_length=shape.max_context_tokens,
            pre_process=topology.is_first_chunk(chunk),
            post_process=topology.is_last_chunk(chunk),
            share_embeddings_and_output_weights=shape.has_tied_embeddings,
            position_embedding_type="none",
            vp_stage=chunk if topology.virtual_pipeline > 1 else None,
        )
        self._shape = shape
        self._topology = topology
        self._frequencies, self._magnitude = rotary_frequencies(shape), rotary_magnitude(shape)
        if self.post_process:
            self._set_head()

    def _set_head(self) -> None:
        """Replace the output layer of the last chunk, where it is not a language model's."""

    def decode(self, micro_batch: DeviceMicroBatch) -> Tensor:
        """Return hidden states for the next chunk; normed in the last."""
        embedded = self.embedding(micro_batch.token_ids, micro_batch.positions) if self.pre_process else None
        if embedded is not None and torch.is_grad_enabled() and not embedded.requires_grad:
            # Layers that are recomputed have gradients only if their input has: that of a frozen embedding does not.
            embedded.requires_grad_()
        sequences = replace(micro_batch.sequences, rotation=self._rotation(micro_batch.positions))
        hidden: Tensor = self.decoder(hidden_states=embedded, attention_mask=None, packed_seq_params=sequences)
        return hidden

    def _rotation(self, positions: Tensor) -> Rotation:
        self._frequencies = self._frequencies.to(positions.device)
        return Rotation.by(positions[0, :, None] * self._frequencies, self._magnitude, is_fused=self.is_fused)


class PolicyModel(Model):
    """The last chunk returns the scores of the targets; that of a teacher also its likeliest tokens."""

    has_float32_head = False
    teaching: Callable[[Tensor, Tensor, Head], Tensor] | None = None

    def forward(self, micro_batch: DeviceMicroBatch) -> Tensor | TokenScores:
        hidden = self.decode(micro_batch)
        return self._scores(hidden, micro_batch) if self.post_process else hidden

    def _scores(self, hidden: Tensor, micro_batch: DeviceMicroBatch) -> Tensor | TokenScores:
        group = self._topology.tensor_group
        # Every tensor-parallel rank computes some columns of every token's logits; the backward pass sums their
        # gradients and, with sequence parallelism, splits the sum.
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=group)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=group)
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        shard = vocab_shard(
            vocab=self._shape.vocab,
            rows=weight.shape[0],
            rank=self._topology.tensor_rank,
            size=self._topology.tensor,
            group=group,
        )
        temperature, is_float32, is_fused = micro_batch.temperature, self.has_float32_head, self.is_fused
        head = Head(weight, shard, temperature=temperature, has_float32_logits=is_float32, is_fused=is_fused)
        # A pass without gradients is about all tokens of the responses, or about those that are learnt.
        places = micro_batch.loss_places if torch.is_grad_enabled() or self.teaching is not None else None
        if self.teaching is not None:
            return at_places(self.teaching, hidden[:, 0], micro_batch.targets, places, head)
        scores = token_scores(
            hidden[:, 0],
            weight,
            micro_batch.targets,
            shard=shard,
            temperature=temperature,
            scored=places,
            has_float32_logits=is_float32,
            is_fused=is_fused,
        )
        candidates = micro_batch.candidates
        if candidates is None:
            return scores
        return scores._replace(candidates=at_places(candidate_logprobs, hidden[:, 0], candidates, places, head))


class ValueModel(Model):
    """The last chunk returns a value per position."""

    def _set_head(self) -> None:
        del self.output_layer
        self.value_head = torch.nn.Linear(self._shape.hidden, 1, bias=False, dtype=self.config.params_dtype)
        self.value_head.to(self._topology.device)

    def forward(self, micro_batch: DeviceMicroBatch) -> Tensor:
        hidden = self.decode(micro_batch)
        return self._values(hidden) if self.post_process else hidden

    def _values(self, hidden: Tensor) -> Tensor:
        # Every tensor-parallel rank computes every value: the head's gradients are equal and need no sum.
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self._topology.tensor_group
            )
        return F.linear(hidden[:, 0].float(), self.value_head.weight.float())[:, 0]


def build_chunks(
    shape: ModelShape,
    topology: Topology,
    split: ModelParallelConfig,
    *,
    device: Device,
    is_adapted: bool = False,
    has_float32_head: bool = False,
) -> list[Model]:
    """Return this rank's chunks in the order of their layers, on the device; a shape with a value head is a critic.

    With `is_adapted` adapters can be attached to the linear layers outside of experts.
    """
    is_te = uses_te(split, has_experts=shape.experts is not None, device=device)
    try:
        config = transformer_config(shape, split, device=device, is_te=is_te)
    except (ValueError, AssertionError) as error:
        if not split.megatron:
            raise
        problem = Problem(key="roles.actor.megatron", message=f"Megatron refuses {split.megatron}: {error}")
        raise ConfigError(problem.key, (problem,)) from error
    kind = ValueModel if shape.has_value_head else PolicyModel
    parallel = MegatronParallel.of(split, data=topology.data)
    chunks: list[Model] = []
    for chunk in range(split.virtual_pipeline):
        layers = parallel.chunk_layers(shape.num_layers, stage=topology.pipeline_rank, chunk=chunk)
        spec = layer_spec(shape, is_te=is_te, is_adapted=is_adapted, is_fused=split.is_fused)
        block = TransformerBlockSubmodules(layer_specs=[spec] * len(layers), layer_norm=RMSNorm)
        model = kind(config, block, shape, topology, chunk)
        model.is_fused = split.is_fused
        if isinstance(model, PolicyModel):
            model.has_float32_head = has_float32_head
        # Megatron makes routers on the host, and its gradient buffers move them only where there are some.
        chunks.append(model.to(topology.device))
    return chunks


def named_weights(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    """Return all parameters by their names in the weights' layout."""
    return {
        f"chunk{index}.{layout_name(name)}": parameter
        for index, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }


def transformer_config(
    shape: ModelShape, split: ModelParallelConfig, *, device: Device, is_te: bool = False
) -> TransformerConfig:
    """Return Megatron's options; the recipe's check refuses those in `split.megatron` that are set here."""
    is_cuda = device == "cuda"
    dtype = torch_dtype(split.dtype_on(device))
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn_hidden,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        qk_layernorm=shape.has_qk_norm,
        add_bias_linear=False,
        add_qkv_bias=shape.has_qkv_bias,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=split.tensor,
        context_parallel_size=split.context,
        cp_comm_type={"gather": None, "ring": "p2p", "all_to_all": "a2a"}[split.context_exchange],
        pipeline_model_parallel_size=split.pipeline,
        virtual_pipeline_model_parallel_size=split.virtual_pipeline if split.virtual_pipeline > 1 else None,
        num_layers_in_first_pipeline_stage=split.first_stage_layers,
        num_layers_in_last_pipeline_stage=split.last_stage_layers,
        sequence_parallel=split.is_sequence_parallel and split.tensor > 1,
        # Interleaved stages exchange activations and gradients at the same time. A batch of transfers between the same
        # two ranks (pipeline 2) would confuse them; one by one, both sides post them in the same order.
        batch_p2p_comm=split.virtual_pipeline == 1,
        overlap_p2p_comm=split.virtual_pipeline > 1,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        # Gradients are summed over micro-batches and ranks, not averaged: the loss carries its global denominator.
        calculate_per_token_loss=True,
        # Loading does not write the rows that pad the vocabulary, and a NaN there would reach the gradient of the
        # hidden states. Initialisation also marks parameters as split over tensor-parallel ranks; without the mark the
        # gradient norm would leave out most of them.
        init_method=torch.nn.init.zeros_,
        output_layer_init_method=torch.nn.init.zeros_,
        embedding_init_method=torch.nn.init.zeros_,
        use_cpu_initialization=not is_cuda,
        # Makes Megatron take the activation from the layer spec. It is not Transformer Engine's.
        use_te_activation_func=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        # Transformer Engine's layers have their own: `layers.accumulate_in_products`.
        gradient_accumulation_fusion=is_cuda and not is_te and split.is_fused and adds_gradients_in_products(),
        **precision_fields(split),
        **mixture_fields(shape, split, is_te=is_te),
        **split.megatron,
    )
