"""Policy and critic as Megatron modules, GPTModel chunks; and the micro-batch that goes through them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.algo.loss import Segments
from megarl.data.context_parts import computed_parts, scored_parts
from megarl.data.image_places import places_in_space
from megarl.data.packing import runs
from megarl.families.shape import ModelShape
from megarl.tokens import PackedColumns
from megarl.train.attention import PackedSequences, Rotation, packed_sequences
from megarl.train.likeliest import Head, at_places, candidate_logprobs
from megarl.train.logprob import Places, TokenScores, token_scores, vocab_shard
from megarl.train.rotary_frequencies import rotary_frequencies, rotary_magnitude
from megarl.train.routing import rank_routes
from megarl.train.topology import Topology
from megarl.train.tower import ImageTokens, Seen, Tower, image_tokens
from megarl.types import FloatArray, MicroBatch
from megarl.weights.layouts.megatron import layout_name, padded_vocab

_COLUMNS = tuple(each.name for each in fields(PackedColumns))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMicroBatch(PackedColumns[Tensor, Tensor, Tensor]):
    """This rank's N tokens of a micro-batch: all of them, or its part of each sequence (`data.context_parts`).

    A model computes M of them, the others have the result of an equal one.
    """

    token_ids: Tensor  # [1, M], int64
    positions: Tensor  # [1, M], int64
    places_in_space: Tensor | None  # [3, M], int64: time, row and column; None where positions are all three
    images: ImageTokens | None  # None where there are none
    sequences: PackedSequences
    episode_starts: Tensor  # [E + 1], int32
    episode_loss_tokens: Tensor | None  # [E], int64; None where every sequence is a whole episode
    targets: Tensor  # [N], int64
    loss_places: Tensor | None  # [K], int64, where `loss_mask` is True; None in a forward pass
    computed_places: Tensor | None  # [N], int32, where each is among the M; None where all are computed
    temperature: float
    num_pack_tokens: int
    """Tokens of the whole micro-batch that are computed, over all ranks that share it."""

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
    device, shared = topology.device, micro_batch.shared
    mine, inputs, computed_places = _own_positions(micro_batch, topology)

    def tensor(array: npt.NDArray[np.generic], dtype: torch.dtype | None = None) -> Tensor:
        return torch.from_numpy(array[mine]).to(device=device, dtype=dtype, non_blocking=True)

    def inputs_of(array: npt.NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(array[inputs]).to(device=device, dtype=torch.int64, non_blocking=True)[None]

    def column(array: npt.NDArray[np.generic] | None) -> Tensor | None:
        """Return zeros for a column that every pass has and this one does not need."""
        if array is None or array.size:
            return None if array is None else tensor(array)
        return torch.zeros(int(episode_starts[-1]), device=device, dtype=torch.from_numpy(array).dtype)

    num_tokens, rows = len(micro_batch.token_ids), micro_batch.rows
    sequences = packed_sequences(micro_batch.sequence_starts, topology, shared)
    if micro_batch.routes is not None:
        sequences.routes = rank_routes(micro_batch.routes, inputs, topology)
    episode_starts = micro_batch.sequence_starts if rows is None else rows.episode_starts
    if not isinstance(mine, slice):
        episode_starts = np.searchsorted(mine, episode_starts).astype(np.int32)
    columns: dict[str, Any] = {name: column(getattr(micro_batch, name)) for name in _COLUMNS}
    return DeviceMicroBatch(
        token_ids=inputs_of(micro_batch.token_ids),
        positions=inputs_of(micro_batch.positions),
        places_in_space=inputs_of(_places_of(micro_batch).T)[0].T if micro_batch.images else None,
        images=image_tokens(micro_batch, inputs, device) if micro_batch.images else None,
        sequences=sequences,
        episode_starts=torch.from_numpy(episode_starts).to(device=device, non_blocking=True),
        episode_loss_tokens=None if rows is None else torch.from_numpy(rows.num_loss_tokens).to(device=device),
        targets=tensor(micro_batch.targets, torch.int64),
        loss_places=_loss_places(micro_batch, mine, device),
        computed_places=None
        if computed_places is None
        else torch.from_numpy(computed_places).to(device=device, non_blocking=True),
        temperature=temperature,
        num_pack_tokens=num_tokens if shared is None else len(shared.computed),
        **columns,
    )


def _places_of(micro_batch: MicroBatch) -> npt.NDArray[np.int32]:
    return places_in_space(micro_batch.positions, micro_batch.sequence_starts, micro_batch.images)


_Positions: TypeAlias = npt.NDArray[np.int64] | slice


def _own_positions(
    micro_batch: MicroBatch, topology: Topology
) -> tuple[_Positions, _Positions, npt.NDArray[np.int32] | None]:
    """Return the positions that this rank scores, those that it computes, and where the former are among the latter."""
    context, rank, shared = topology.context, topology.context_rank, micro_batch.shared
    if context == 1:
        return (slice(None), slice(None), None) if shared is None else (slice(None), shared.computed, shared.places)
    mine = scored_parts(micro_batch, context)[rank]
    if shared is None:
        return mine, mine, None
    part = computed_parts(shared, context)[rank]
    return mine, shared.computed[part], np.searchsorted(part, shared.places[mine]).astype(np.int32)


def _loss_places(micro_batch: MicroBatch, mine: _Positions, device: torch.device) -> Tensor | None:
    """Return the places of loss tokens, found on the host: on a GPU they would have to be waited for.

    In a forward pass those of all response tokens where prompts are shared, or None.
    """
    if micro_batch.loss_mask.size:
        is_scored = micro_batch.loss_mask
    elif micro_batch.shared is None:
        return None
    else:
        is_scored = np.zeros(len(micro_batch.token_ids), np.bool_)
        is_scored[runs(micro_batch.response_starts, micro_batch.response_ends - micro_batch.response_starts)] = True
    return torch.from_numpy(np.flatnonzero(is_scored[mine])).to(device)


def whole_column(column: Tensor, micro_batch: MicroBatch, topology: Topology) -> FloatArray:
    """Return a column of this rank's tokens for all tokens of the micro-batch; the ranks that share it call it.

    [N], or [N, K] where each token has several numbers.
    """
    if topology.context == 1:
        return column.float().cpu().numpy()
    parts = scored_parts(micro_batch, topology.context)
    most = max(map(len, parts))
    own = torch.zeros((most, *column.shape[1:]), dtype=torch.float32, device=column.device)
    own[: len(column)] = column
    gathered = torch.empty((len(parts) * most, *column.shape[1:]), dtype=torch.float32, device=column.device)
    dist.all_gather_into_tensor(gathered, own, group=topology.context_group)
    whole = np.empty((len(micro_batch.token_ids), *column.shape[1:]), np.float32)
    for part, numbers in zip(parts, gathered.view(len(parts), most, *column.shape[1:]).cpu().numpy(), strict=True):
        whole[part] = numbers[: len(part)]
    return whole


class Model(GPTModel):
    """One chunk; the first has the embedding, and in the last a subclass turns hidden states into its output."""

    is_fused = True
    """Whether kernels of Triton are used, where there is a GPU."""
    tower: Tower | None = None
    """Set on a model that sees images."""

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
        self._rotary = [(rotary_frequencies(shape), rotary_magnitude(shape))]
        if shape.window_theta is not None:
            near = replace(shape, rope_theta=shape.window_theta, rope_scaling=None)
            self._rotary.append((rotary_frequencies(near), rotary_magnitude(near)))
        self._axes = None if shape.vision is None else torch.tensor(shape.vision.axes)
        if self.pre_process and shape.vision is not None:
            num_deep = len(shape.vision.deep_layers)
            assert num_deep <= len(self.decoder.layers), f"{num_deep} layers to add to, {len(self.decoder.layers)} here"
            for index, layer in enumerate(self.decoder.layers[:num_deep]):
                layer.register_forward_hook(partial(_add_deep, index), with_kwargs=True)
        if self.post_process:
            self._set_head()

    def _set_head(self) -> None:
        """Replace the output layer of the last chunk, where it is not a language model's."""

    def decode(self, micro_batch: DeviceMicroBatch) -> Tensor:
        """Return hidden states for the next chunk; normed in the last."""
        embedded = self.embedding(micro_batch.token_ids, micro_batch.positions) if self.pre_process else None
        if embedded is not None and self._shape.embedding_scale != 1:
            embedded = embedded * self._shape.embedding_scale
        if embedded is not None and torch.is_grad_enabled() and not embedded.requires_grad:
            # Layers that are recomputed have gradients only if their input has: that of a frozen embedding does not.
            embedded.requires_grad_()
        seen = None
        if embedded is not None and micro_batch.images is not None:
            embedded, seen = self._with_images(embedded, micro_batch.images)
        sequences = replace(micro_batch.sequences, rotations=self._rotations(micro_batch), seen_images=seen)
        hidden: Tensor = self.decoder(hidden_states=embedded, attention_mask=None, packed_seq_params=sequences)
        return hidden

    def _with_images(self, embedded: Tensor, images: ImageTokens) -> tuple[Tensor, Seen]:
        assert self.tower is not None, "images for a model without a tower"
        num_tokens, topology = len(embedded), self._topology
        first = topology.tensor_rank * num_tokens if self.config.sequence_parallel else 0
        return self.tower.place(embedded, images, range(first, first + num_tokens))

    def _rotations(self, micro_batch: DeviceMicroBatch) -> tuple[Rotation, ...]:
        positions = micro_batch.positions[0][:, None]
        if micro_batch.places_in_space is not None:
            assert self._axes is not None, "images for a model that sees none"
            positions = micro_batch.places_in_space[self._axes.to(positions.device)].T
        self._rotary = [(frequencies.to(positions.device), magnitude) for frequencies, magnitude in self._rotary]
        return tuple(
            Rotation.by(positions * frequencies, magnitude, is_fused=self.is_fused)
            for frequencies, magnitude in self._rotary
        )


def _add_deep(
    index: int, _: torch.nn.Module, arguments: tuple[object, ...], options: dict[str, object], output: Any
) -> Any:
    """Add what the tower made beside its last layer, behind layer `index`: a forward hook."""
    del arguments
    sequences = options["packed_seq_params"]
    assert isinstance(sequences, PackedSequences), f"sequences are {sequences}"
    if sequences.seen_images is None:
        return output
    hidden, context = output
    seen = sequences.seen_images
    return hidden.index_add(0, seen.places, seen.deep[index][:, None].to(hidden.dtype)), context


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
        is_about_loss = torch.is_grad_enabled() or self.teaching is not None or micro_batch.computed_places is not None
        places = Places.of(micro_batch.loss_places if is_about_loss else None, micro_batch.computed_places)
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


def named_weights(chunks: Sequence[torch.nn.Module]) -> dict[str, Tensor]:
    """Return all parameters and saved buffers (the bias of a router) by their names in the weights' layout."""
    return {
        f"chunk{index}.{layout_name(name)}": tensor
        for index, chunk in enumerate(chunks)
        for name, tensor in chain(chunk.named_parameters(), _saved_buffers(chunk))
    }


def _saved_buffers(chunk: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in chunk.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer
