"""Gradients and weights: Megatron's gradient buffers and distributed Adam around the model chunks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import assert_never

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.config.roles import OptimizerConfig, TrainedModelConfig
from megarl.train.model import Model
from megarl.train.offload import Offload
from megarl.train.shards import Shard, shards_of


class ModelOptimizer:
    """Owns the wrapped chunks: parameters and gradients live in its buffers, moments and master weights in shards."""

    def __init__(self, chunks: Sequence[Model], config: OptimizerConfig, split: TrainedModelConfig) -> None:
        self._config = config
        self._offloads = split.offload
        self._offload = Offload(next(chunks[0].parameters()).device)
        model_config = chunks[0].config
        model_config.finalize_model_grads_func = _sum_gradients
        buffers = buffer_config(split.megatron_ddp)
        self.chunks: list[DistributedDataParallel] = [
            DistributedDataParallel(model_config, buffers, chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(chunks)
        ]
        if buffers.overlap_grad_reduce:
            # Buckets travel during the backward pass of the last micro-batch, and of no other.
            hooks = [chunk.no_sync for chunk in self.chunks]
            model_config.no_sync_func = hooks if len(hooks) > 1 else hooks[0]
        self._optimizer = get_megatron_optimizer(
            optimizer_config(config, model_config, split.megatron_optimizer),
            self.chunks,
            use_gloo_process_groups=False,
        )
        for group in self._optimizer.param_groups:
            # Norms and biases are in a group of their own with multiplier 0; applying it is the caller's business.
            group["weight_decay"] = config.weight_decay * group["wd_mult"]

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """By the names the weights' layout knows them by."""
        return {
            f"chunk{index}.{name}": parameter
            for index, chunk in enumerate(self.chunks)
            for name, parameter in chunk.module.named_parameters()
        }

    def shards(self) -> dict[str, Shard]:
        """What this rank's Adam keeps, by the name of the parameter it belongs to; see `at_hand`."""
        self._offload.wait()
        names = {parameter: name for name, parameter in self.parameters().items()}
        return {
            names[parameter]: shard
            for optimizer in self._optimizer.chained_optimizers
            for parameter, shard in shards_of(optimizer)
        }

    @property
    def is_away(self) -> bool:
        return self._offload.is_away

    @property
    def has_weights(self) -> bool:
        """Whether they are on the device."""
        return not (self._offload.is_away and self._offloads == "everything")

    def release(self) -> None:
        """Leave the device to others, as far as the recipe says."""
        if self._offloads != "nothing":
            self._offload.release(self.tensors_to_offload(), self._gradients())

    def tensors_to_offload(self) -> list[Tensor]:
        """All but the gradients, which nobody wants back."""
        weights = self._weights()
        kept = {tensor.untyped_storage()._cdata for tensor in weights}
        # On a CPU the weights are their own master.
        states = [tensor for tensor in self._states() if tensor.untyped_storage()._cdata not in kept]
        return [*weights, *states] if self._offloads == "everything" else states

    def reload(self) -> None:
        """The weights are there for whatever comes next; the optimizer's states arrive meanwhile."""
        if self._offload.is_away:
            self._offload.reload(first=self._weights())

    def at_hand(self, tensor: Tensor) -> Tensor:
        """One of the weights or of the optimizer's states, where its values are now."""
        return self._offload.at_hand(tensor)

    def adopt_weights(self) -> None:
        """Take the model's weights, changed from outside, as the new master weights."""
        self._optimizer.reload_model_params()

    def zero_grad(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()

    def grad_norm(self) -> float:
        """Of all gradients together, before clipping."""
        self._optimizer.prepare_grads()
        return float(self._optimizer.get_grad_norm())

    def spoil_gradients(self) -> None:
        """Make all of this rank's NaN, as `faults` asks for."""
        for parameter in self.parameters().values():
            parameter.main_grad.fill_(torch.nan)  # type: ignore[attr-defined]  # Megatron's

    def step(self, learning_rate: float) -> None:
        """Clip, update, share the new weights."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._offload.wait()
        self._optimizer.step()

    def _weights(self) -> list[Tensor]:
        return [buffer.param_data for chunk in self.chunks for buffer in _buffers(chunk)]

    def _gradients(self) -> list[Tensor]:
        return [buffer.grad_data for chunk in self.chunks for buffer in _buffers(chunk)]

    def _states(self) -> list[Tensor]:
        """Master weights, and moments where there are some yet."""
        found: list[Tensor] = []
        for optimizer in self._optimizer.chained_optimizers:
            inner = optimizer.optimizer
            masters = [master for group in inner.param_groups for master in group["params"]]
            moments = [value for state in inner.state.values() for value in state.values() if _is_moment(value)]
            found += [*masters, *moments]
        return found


def _buffers(chunk: DistributedDataParallel) -> list[_ParamAndGradBuffer]:
    return [*chunk.buffers, *chunk.expert_parallel_buffers]


def _is_moment(value: object) -> bool:
    """Not a count of steps."""
    return isinstance(value, Tensor) and value.dim() > 0


def buffer_config(native: Mapping[str, object]) -> DistributedDataParallelConfig:
    """`native` are fields that the recipe passes on, none of them one that is set here."""
    return DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True, **native)


def optimizer_config(
    config: OptimizerConfig, model_config: TransformerConfig, native: Mapping[str, object]
) -> MegatronOptimizerConfig:
    """`native` as in `buffer_config`."""
    return MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.eps,
        clip_grad=config.clip_grad_norm,
        bf16=model_config.bf16,
        params_dtype=model_config.params_dtype,
        use_distributed_optimizer=True,
        **native,
    )


def _sum_gradients(
    model: list[torch.nn.Module],
    num_tokens: Tensor | None,
    pg_collection: ProcessGroupCollection | None = None,
    force_all_reduce: bool = False,
) -> None:
    """Megatron's reduction without its division by tokens: each loss already has the global denominator."""
    del num_tokens
    finalize_model_grads(model, None, pg_collection=pg_collection, force_all_reduce=force_all_reduce)


def learning_rate(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """For `step` of 0 .. total_steps - 1: a linear warm-up that ends at the peak, then the decay.

    No step is wasted on a rate of zero: the warm-up begins one notch above it, the decay would reach its end at
    `total_steps`.
    """
    assert step >= 0, f"step {step}"
    peak, floor = config.learning_rate, config.min_learning_rate
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    decay_steps = max(total_steps - config.warmup_steps, 1)
    progress = min((step - config.warmup_steps) / decay_steps, 1.0)
    match config.decay:
        case "constant":
            return peak
        case "linear":
            return peak + (floor - peak) * progress
        case "cosine":
            return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * progress))
        case _:
            assert_never(config.decay)
