"""Where the time of a step goes: a roofline from stated rates, for responses of an assumed mean length."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.algorithm import SftConfig
from megarl.config.model import ModelShape
from megarl.config.recipe import Recipe
from megarl.planner.hardware import (
    DECODE_EFFICIENCY,
    DISK_GB_PER_S_PER_NODE,
    PREFILL_EFFICIENCY,
    TRAIN_EFFICIENCY,
    Gpu,
)
from megarl.planner.memory import EngineMemory
from megarl.planner.placement import Placement
from megarl.weights.canonical import num_active_parameters, num_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What the recipe bounds but does not say."""

    mean_prompt_tokens: int
    mean_response_tokens: int

    @classmethod
    def half(cls, recipe: Recipe) -> Workload:
        """Half of what is allowed, until measured."""
        return cls(
            mean_prompt_tokens=max(1, recipe.data.max_prompt_tokens // 2),
            mean_response_tokens=max(1, recipe.sampling.max_response_tokens // 2),
        )

    @property
    def sequence_tokens(self) -> int:
        return self.mean_prompt_tokens + self.mean_response_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    rollout_s: float
    logprobs_s: float
    update_s: float
    publish_s: float
    save_s: float
    """Of one checkpoint of the weights; not part of a step."""
    bubble: float
    """Share of the update in which a pipeline stage waits for the others."""
    num_micro_batches: int
    """Per rank and update."""
    running_requests: int
    """Per engine, as far as its cache and its limit allow."""
    trained_tokens: int

    @property
    def step_s(self) -> float:
        return self.rollout_s + self.logprobs_s + self.update_s + self.publish_s


def estimate(
    recipe: Recipe,
    shape: ModelShape,
    placement: Placement,
    gpu: Gpu,
    workload: Workload,
    *,
    engine: EngineMemory | None,
    publish_s: float,
) -> Timing:
    """Generating and training take turns (`max_staleness: 0`)."""
    is_sft = isinstance(recipe.algorithm, SftConfig)
    sequences = recipe.train.prompts_per_step * (1 if is_sft else recipe.sampling.rollouts_per_prompt)
    trained_tokens = sequences * workload.sequence_tokens
    updates = recipe.train.updates_per_step
    parallel = placement.parallel
    per_update = trained_tokens / updates / parallel.data
    micro_batches = max(1, -(-int(per_update) // recipe.train.tokens_per_micro_batch))
    bubble = (parallel.pipeline - 1) / (parallel.virtual_pipeline * micro_batches)
    forward = _forward_flops(shape, workload, sequences)
    rate = len(placement.ranks) * gpu.flops * TRAIN_EFFICIENCY
    running, rollout_s = 0, 0.0
    if engine is not None and not is_sft:
        running = _running_requests(recipe, placement, workload, engine, sequences)
        rollout_s = _rollout_s(recipe, shape, placement, gpu, workload, engine, sequences, running)
    model_bytes = 2 * num_parameters(shape)
    return Timing(
        rollout_s=rollout_s,
        # The first update's own forward pass serves as the old policy where there is only one.
        logprobs_s=forward / rate * (1 + bubble) if updates > 1 else 0.0,
        update_s=3 * forward / rate * (1 + bubble),
        publish_s=publish_s,
        save_s=model_bytes / (DISK_GB_PER_S_PER_NODE * 1e9 * _num_trainer_nodes(placement)),
        bubble=bubble / (1 + bubble),
        num_micro_batches=micro_batches,
        running_requests=running,
        trained_tokens=trained_tokens,
    )


def _forward_flops(shape: ModelShape, workload: Workload, sequences: int) -> float:
    """Two per weight and token, and the causal half of the attention matrix."""
    tokens = workload.sequence_tokens
    attention = 2 * shape.num_layers * shape.num_heads * shape.head_dim * tokens
    return float(sequences * tokens * (2 * _num_multiplied(shape) + attention))


def _running_requests(
    recipe: Recipe, placement: Placement, workload: Workload, engine: EngineMemory, sequences: int
) -> int:
    rollout = recipe.roles.rollout
    assert rollout is not None, "an engine without a role"
    mean_context = workload.mean_prompt_tokens + workload.mean_response_tokens // 2
    wanted = -(-sequences // placement.num_engines)
    return max(1, min(wanted, rollout.max_running_requests, engine.cached_tokens // mean_context))


def _rollout_s(
    recipe: Recipe,
    shape: ModelShape,
    placement: Placement,
    gpu: Gpu,
    workload: Workload,
    engine: EngineMemory,
    sequences: int,
    running: int,
) -> float:
    """Prefill of each prompt once, then steps of decoding: each reads the weights and the cache of all that runs."""
    num_gpus = len(placement.engine_ranks)
    tensor = num_gpus // placement.num_engines
    weights = _num_multiplied(shape)
    prompts = recipe.train.prompts_per_step * workload.mean_prompt_tokens
    prefill_s = 2 * weights * prompts / (num_gpus * gpu.flops * PREFILL_EFFICIENCY)
    mean_context = workload.mean_prompt_tokens + workload.mean_response_tokens // 2
    read = _read_bytes(shape, engine, running) + running * mean_context * engine.cache_bytes_per_token
    read_s = read / (gpu.memory_gb_per_s * 1e9 * DECODE_EFFICIENCY)
    compute_s = 2 * weights * running / (tensor * gpu.flops * PREFILL_EFFICIENCY)
    per_engine = sequences / placement.num_engines
    # The longest response cannot be shared out: it takes a step per token however few others are left.
    steps = max(per_engine * workload.mean_response_tokens / running, recipe.sampling.max_response_tokens)
    return prefill_s + steps * max(read_s, compute_s)


def _num_multiplied(shape: ModelShape) -> int:
    """Weights that a token is multiplied with: its experts, but no embedding that is only looked up."""
    looked_up = 0 if shape.has_tied_embeddings else shape.vocab * shape.hidden
    return num_active_parameters(shape) - looked_up


def _read_bytes(shape: ModelShape, engine: EngineMemory, running: int) -> float:
    """Weights that a step of decoding reads: of the experts those that any of the running requests is sent to."""
    if shape.experts is None:
        return engine.weight_bytes
    missed = (1 - shape.experts.per_token / shape.experts.num) ** running
    return engine.weight_bytes - missed * engine.expert_bytes


def _num_trainer_nodes(placement: Placement) -> int:
    return len({rank.place.node for rank in placement.ranks})
