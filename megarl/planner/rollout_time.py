"""Time in which engines generate the responses of a step: one engine is simulated, all get equal shares.

Requests start as others end, so an engine is full at first and empties towards the longest response.
"""

from __future__ import annotations

import heapq

from megarl.config.model import ModelShape
from megarl.planner.deployment import Deployment
from megarl.planner.hardware import (
    DECODE_EFFICIENCY,
    DECODE_LAYER_S,
    DECODE_REQUEST_S,
    DECODE_STEP_S,
    DETERMINISTIC_SLOWDOWN,
    LINK_EFFICIENCY,
    NETWORK_ALL_REDUCE_S,
    NODE_ALL_REDUCE_S,
    PREFILL_EFFICIENCY,
)
from megarl.planner.memory import EngineMemory
from megarl.planner.training_time import num_multiplied
from megarl.planner.workload import StepWorkload

_MAX_SIMULATED = 2048
"""Requests; further ones run while the engine is full."""


class RolloutTime:
    """Time of generating all sequences of a step."""

    def __init__(self, deployment: Deployment, workload: StepWorkload, *, num_sequences: int) -> None:
        rollout, engine = deployment.roles.rollout, deployment.engine
        assert rollout is not None, "an engine without a role"
        assert engine is not None, "no engine"
        placement, gpu = deployment.placement, deployment.gpu
        self._shape = deployment.models["actor"].work.shape
        self._gpu = gpu
        self._engine = engine
        self._workload = workload
        self._tensor = rollout.tensor
        self._num_engines = placement.num_engines
        nodes = {rank.place.node for rank in placement.engine_ranks if rank.engine == 0}
        self._all_reduce_s = NODE_ALL_REDUCE_S if len(nodes) == 1 else NETWORK_ALL_REDUCE_S
        self._link_bytes_per_s = (
            1e9 * LINK_EFFICIENCY * (gpu.node_gb_per_s if len(nodes) == 1 else gpu.network_gb_per_s * rollout.tensor)
        )
        self._slowdown = (
            DETERMINISTIC_SLOWDOWN if rollout.is_deterministic_on(deployment.device) else 1.0
        ) / gpu.reached
        self._num_requests = max(1, -(-num_sequences // self._num_engines))
        mean_context = workload.mean_prompt_tokens + workload.mean_response_tokens // 2
        self.num_running = max(
            1, min(self._num_requests, rollout.max_running_requests, engine.cached_tokens // mean_context)
        )
        """Requests that run per engine, limited by its cache and its own limit."""

    def seconds(self, *, num_prompts: int) -> float:
        """Return the time of one prefill per prompt and of all decoding steps."""
        prompts = num_prompts * self._workload.mean_prompt_tokens
        rate = self._num_engines * self._tensor * self._gpu.flops * PREFILL_EFFICIENCY
        return 2 * num_multiplied(self._shape) * prompts / rate + self._decoding_s()

    def _decoding_s(self) -> float:
        """Simulate one engine from one end of a request to the next."""
        count = min(self._num_requests, max(_MAX_SIMULATED, 4 * self.num_running))
        waiting = iter(self._workload.lengths(count))
        prompt = self._workload.mean_prompt_tokens
        # By the step at which a request ends, with the step at which it began.
        running: list[tuple[int, int]] = []
        step, total_began, seconds, full_s, num_full = 0, 0, 0.0, 0.0, 0
        while True:
            while len(running) < self.num_running and (length := next(waiting, None)) is not None:
                heapq.heappush(running, (step + length, step))
                total_began += step
            if not running:
                break
            end, began = heapq.heappop(running)
            num_steps, num_running = end - step, len(running) + 1
            context = num_running * (prompt + step + num_steps / 2) - total_began
            spent = num_steps * self._step_s(num_running, context)
            seconds += spent
            if num_running == self.num_running:
                full_s, num_full = full_s + spent, num_full + 1
            step, total_began = end, total_began - began
        left = self._num_requests - count
        return self._slowdown * (seconds + (left * full_s / num_full if left else 0.0))

    def _step_s(self, running: int, context_tokens: float) -> float:
        """Return the time of one token for each running request: the weights and all contexts are read."""
        gpu, shape, tensor = self._gpu, self._shape, self._tensor
        read = _read_bytes(shape, self._engine, running) + context_tokens * self._engine.cache_bytes_per_token
        read_s = read / (gpu.memory_gb_per_s * 1e9 * DECODE_EFFICIENCY)
        compute_s = 2 * num_multiplied(shape) * running / (tensor * gpu.flops * PREFILL_EFFICIENCY)
        overhead_s = DECODE_STEP_S + shape.num_layers * DECODE_LAYER_S + running * DECODE_REQUEST_S
        if tensor > 1:
            reduced = 2 * running * shape.hidden * 2
            overhead_s += 2 * shape.num_layers * (self._all_reduce_s + reduced / self._link_bytes_per_s)
        return max(read_s, compute_s) + overhead_s


def _read_bytes(shape: ModelShape, engine: EngineMemory, running: int) -> float:
    """Return the weights that a decoding step reads; experts that no running request uses are not read."""
    if shape.experts is None:
        return engine.weight_bytes
    missed = (1 - shape.experts.per_token / shape.experts.num) ** running
    return engine.weight_bytes - missed * engine.expert_bytes
