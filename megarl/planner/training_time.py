"""Time of a model's passes: arithmetic by kind of work, and the traffic between its ranks, which nothing hides."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from megarl.config.model import ModelShape
from megarl.planner.activations import recomputed_share
from megarl.planner.deployment import PlannedModel, StepWorkload
from megarl.planner.hardware import (
    ALL_TO_ALL_EFFICIENCY,
    ATTENTION_EFFICIENCY,
    DENSE_EFFICIENCY,
    EXPERT_EFFICIENCY,
    FLOAT32_SLOWDOWN,
    FP8_SPEEDUP,
    HOST_GB_PER_S,
    LINK_EFFICIENCY,
    PASS_S,
    GpuModel,
)
from megarl.planner.ledger import offload_of
from megarl.weights.layouts.canonical import num_active_parameters

_ITEM_BYTES = 2
"""Activations are bfloat16."""
_GRADIENT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardWork:
    """Operations of a forward pass, by kind."""

    dense: float
    expert: float
    attention: float

    @property
    def total(self) -> float:
        return self.dense + self.expert + self.attention


def forward_work(shape: ModelShape, *, num_tokens: float, num_squared_tokens: float) -> ForwardWork:
    """Return two operations per weight and token, and those of the causal half of the attention matrix.

    `num_squared_tokens` is the sum over all sequences of their length squared.
    """
    in_experts = 0
    if shape.experts is not None:
        in_experts = shape.num_layers * shape.experts.per_token * 3 * shape.ffn_hidden * shape.hidden
    return ForwardWork(
        dense=2.0 * (num_multiplied(shape) - in_experts) * num_tokens,
        expert=2.0 * in_experts * num_tokens,
        attention=2.0 * shape.num_layers * shape.num_heads * shape.head_dim * num_squared_tokens,
    )


def _in_fp8(work: ForwardWork, shape: ModelShape, speedup: float, *, num_tokens: float) -> ForwardWork:
    """Return the work in bfloat16 that takes as long; the head is not in FP8."""
    head = 0.0 if shape.has_value_head else 2.0 * shape.vocab * shape.hidden * num_tokens
    return replace(work, dense=head + (work.dense - head) / speedup, expert=work.expert / speedup)


def forward_flops(shape: ModelShape, *, num_tokens: float, num_squared_tokens: float) -> float:
    """Return the operations of a forward pass, of all kinds."""
    return forward_work(shape, num_tokens=num_tokens, num_squared_tokens=num_squared_tokens).total


@cache
def num_multiplied(shape: ModelShape) -> int:
    """Return the weights that a token is multiplied with: those of its experts, without an embedding table."""
    looked_up = 0 if shape.has_tied_embeddings else shape.vocab * shape.hidden
    return num_active_parameters(shape) - looked_up


class TrainingTime:
    """Times of one model for all sequences of a step."""

    def __init__(
        self,
        model: PlannedModel,
        gpu: GpuModel,
        workload: StepWorkload,
        *,
        num_sequences: int,
        tokens_per_micro_batch: int,
        num_mini_batches: int,
    ) -> None:
        parallel = model.placement.parallel
        self._model = model
        self._work = model.work
        self._gpu = gpu
        self._num_mini_batches = num_mini_batches
        self._weight_bytes = max(stage.num_bytes for stage in model.bare_weights)
        self._gpus_per_node = _most_on_a_node(model)
        num_tokens = num_sequences * workload.sequence_tokens
        self._rank_tokens = num_tokens / parallel.replicas
        self.num_micro_batches = max(
            1, -(-int(num_tokens / num_mini_batches / parallel.data) // tokens_per_micro_batch)
        )
        self.bubble = (parallel.pipeline - 1) / (parallel.virtual_pipeline * self.num_micro_batches)
        work = forward_work(
            model.work.shape,
            num_tokens=num_tokens,
            num_squared_tokens=num_sequences * workload.mean_squared_tokens,
        )
        if self._work.split.precision == "fp8":
            work = _in_fp8(work, model.work.shape, FP8_SPEEDUP[self._work.split.fp8_scaling], num_tokens=num_tokens)
        if self._work.split.precision == "fp32":
            work = replace(work, dense=FLOAT32_SLOWDOWN * work.dense, expert=FLOAT32_SLOWDOWN * work.expert)
        self._compute_s = (
            work.dense / DENSE_EFFICIENCY + work.expert / EXPERT_EFFICIENCY + work.attention / ATTENTION_EFFICIENCY
        ) / (len(model.placement.ranks) * gpu.flops * gpu.reached)

    @property
    def forward_s(self) -> float:
        """Time of one pass without gradients."""
        traffic_s = self._tensor_s() + self._expert_s() + self._context_s()
        return PASS_S + (1 + self.bubble) * (self._compute_s + traffic_s)

    @property
    def update_s(self) -> float:
        """Time of one epoch: forward and twice as much backward, repeated passes, and per update one reduction and the
        optimizer's way through the GPU, if it is in host memory."""
        repeats = recomputed_share(self._work)
        compute_s = (3 + repeats) * self._compute_s
        # Backward passes of a sequence-parallel model gather the inputs of its layers once more.
        tensor = (2.5 if self._work.split.is_sequence_parallel else 2) + repeats
        traffic_s = tensor * self._tensor_s() + (2 + repeats) * (self._expert_s() + self._context_s())
        per_update_s = self._reduction_s() + self._offload_s()
        return PASS_S + (1 + self.bubble) * (compute_s + traffic_s) + self._num_mini_batches * per_update_s

    @property
    def traffic_s(self) -> float:
        """Part of an epoch in which ranks only exchange data."""
        repeats = recomputed_share(self._work)
        in_passes_s = (2 + repeats) * (self._tensor_s() + self._expert_s() + self._context_s())
        return in_passes_s + self._num_mini_batches * self._reduction_s()

    @property
    def exchange_s(self) -> float:
        """Time to swap the weights on the GPU and in host memory, for a pass and back; one direction at a time."""
        return 4 * self._weight_bytes / (HOST_GB_PER_S * 1e9)

    def _tensor_s(self) -> float:
        """Return the traffic of tensor parallelism in a forward pass: two gathers and two scatters per layer."""
        parallel, shape = self._model.placement.parallel, self._work.shape
        if parallel.tensor == 1:
            return 0.0
        layers = shape.num_layers / parallel.pipeline
        share = (parallel.tensor - 1) / parallel.tensor
        num_bytes = 4 * share * self._rank_tokens * shape.hidden * _ITEM_BYTES * layers
        return num_bytes / self._rate(spans_nodes=parallel.tensor > self._gpus_per_node)

    def _context_s(self) -> float:
        """Return the gathering of keys and values in a forward pass; a backward pass scatters as many gradients."""
        parallel, shape = self._model.placement.parallel, self._work.shape
        heads = -(-shape.num_kv_heads // parallel.tensor)
        layers = shape.num_layers / parallel.pipeline
        others_tokens = (parallel.context - 1) * self._rank_tokens
        num_bytes = others_tokens * 2 * heads * shape.head_dim * _ITEM_BYTES * layers
        return num_bytes / self._rate(spans_nodes=parallel.tensor * parallel.context > self._gpus_per_node)

    def _expert_s(self) -> float:
        """Return the all-to-all of a mixture in a forward pass: every copy of a token goes to its expert and back."""
        parallel, shape = self._model.placement.parallel, self._work.shape
        if shape.experts is None or parallel.expert == 1:
            return 0.0
        layers = shape.num_layers / parallel.pipeline
        tokens = self._rank_tokens / parallel.tensor * parallel.ranks_per_expert
        copies = 2 * shape.experts.per_token * tokens * shape.hidden * _ITEM_BYTES * layers
        ranks = parallel.expert * parallel.ranks_per_expert
        num_nodes = -(-ranks // self._gpus_per_node)
        elsewhere = copies * (1 - 1 / num_nodes)
        nearby = copies * (1 / num_nodes - 1 / parallel.expert)
        efficiency = ALL_TO_ALL_EFFICIENCY * 1e9
        return elsewhere / (self._gpu.network_gb_per_s * efficiency) + max(0.0, nearby) / (
            self._gpu.node_gb_per_s * efficiency
        )

    def _reduction_s(self) -> float:
        """Return the time of summing float32 gradients and gathering weights between replicas, once per update."""
        parallel = self._model.placement.parallel
        if parallel.replicas == 1 or not self._model.is_trained:
            return 0.0
        num_elements = max(stage.gradient_bytes for stage in self._model.stages) / _GRADIENT_BYTES
        share = (parallel.replicas - 1) / parallel.replicas
        spans_nodes = parallel.tensor * parallel.replicas > self._gpus_per_node
        return 6 * share * num_elements / self._rate(spans_nodes=spans_nodes)

    def _offload_s(self) -> float:
        """Return the time in which an optimizer in host memory is copied to the GPU, and back at the same time."""
        if offload_of(self._model) == "nothing":
            return 0.0
        return max(stage.optimizer_bytes for stage in self._model.stages) / (HOST_GB_PER_S * 1e9)

    def _rate(self, *, spans_nodes: bool) -> float:
        rate = self._gpu.network_gb_per_s if spans_nodes else self._gpu.node_gb_per_s
        return rate * 1e9 * LINK_EFFICIENCY


def _most_on_a_node(model: PlannedModel) -> int:
    nodes = [rank.place.node for rank in model.placement.ranks]
    return max(nodes.count(node) for node in set(nodes))
