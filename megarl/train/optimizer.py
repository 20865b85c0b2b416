"""Megatron's gradient buffers and distributed Adam around the model chunks, and the learning rate of a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import assert_never

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.config.roles import OptimizerConfig, TrainedModelConfig
from megarl.train.build import accumulate_in_products, drop_fp8_weights
from megarl.train.model import Model, named_weights
from megarl.train.optimizer_states import Shard, shards_of
from megarl.train.topology import free_cache


class ModelOptimizer:
    """Owns the wrapped chunks. Parameters and gradients are in their buffers, moments and master weights in shards."""

    is_released = False
    """Whether device memory that training needs is given to engines."""
    has_weights = True
    """Whether the weights are on the device."""

    def __init__(self, chunks: Sequence[Model], config: OptimizerConfig, split: TrainedModelConfig) -> None:
        self._config = config
        self._device = next(chunks[0].parameters()).device
        model_config = chunks[0].config
        model_config.finalize_model_grads_func = _sum_gradients
        buffers = buffer_config(split.megatron_ddp)
        self.chunks: list[DistributedDataParallel] = [
            DistributedDataParallel(model_config, buffers, chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(chunks)
        ]
        for chunk in chunks:
            accumulate_in_products(chunk)
        if buffers.overlap_grad_reduce:
            # Buckets are reduced during the backward pass of the last micro-batch only.
            hooks = [chunk.no_sync for chunk in self.chunks]
            model_config.no_sync_func = hooks if len(hooks) > 1 else hooks[0]
        self.trim()  # makes room for the master weights, which Megatron puts on the device
        self._optimizer = get_megatron_optimizer(
            optimizer_config(config, model_config, split.megatron_optimizer),
            self.chunks,
            use_gloo_process_groups=False,
        )
        for group in self._optimizer.param_groups:
            # Norms and biases are in their own group with multiplier 0, which Megatron leaves to the caller to apply.
            group["weight_decay"] = config.weight_decay * group["wd_mult"]
        free_cache(self._device)

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that are trained, by their names in the weights' layout."""
        weights = named_weights([chunk.module for chunk in self.chunks])
        return {
            name: weight
            for name, weight in weights.items()
            if isinstance(weight, torch.nn.Parameter) and weight.requires_grad
        }

    def shards(self) -> dict[str, Shard]:
        """Return the states of this rank's Adam by the name of their parameter."""
        names = {parameter: name for name, parameter in self.parameters().items()}
        return {names[parameter]: shard for parameter, shard in self._shards()}

    def _shards(self) -> Iterator[tuple[torch.nn.Parameter, Shard]]:
        for optimizer in self._optimizer.chained_optimizers:
            yield from shards_of(optimizer)

    def trim(self) -> None:
        """Free what only passes need."""
        for chunk in self.chunks:
            drop_fp8_weights(chunk)
        free_cache(self._device)

    def release(self) -> None:
        """Free device memory for engines."""
        self.trim()

    def reload(self) -> None:
        """Take back what `release` freed."""

    def at_hand(self, tensor: Tensor) -> Tensor:
        """Return a weight, from host memory while it is released."""
        return tensor

    def adopt_weights(self) -> None:
        """Copy the model's weights, changed from outside, to the master weights."""
        self._optimizer.reload_model_params()

    @torch.no_grad()
    def adopt_masters(self) -> None:
        """Round this rank's master weights, changed from outside, to the model's, and gather those of the replicas.

        The model then has the bits that an update leaves.
        """
        for parameter, shard in self._shards():
            parameter.detach().view(-1)[slice(*shard.range)].copy_(shard.master)
        for chunk in self.chunks:
            chunk.start_param_sync()

    def zero_grad(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()

    def grad_norm(self) -> float:
        """Return the norm of all gradients together, before clipping."""
        self._optimizer.prepare_grads()
        return float(self._optimizer.get_grad_norm())

    def spoil_gradients(self) -> None:
        """Set all of this rank's gradients to NaN, for a fault of `system.faults`."""
        for parameter in self.parameters().values():
            parameter.main_grad.fill_(torch.nan)  # type: ignore[attr-defined]  # Megatron's

    def step(self, learning_rate: float) -> None:
        """Clip the gradients, update the weights and gather them."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._update()

    def _update(self) -> None:
        self._optimizer.step()


def buffer_config(native: Mapping[str, object]) -> DistributedDataParallelConfig:
    """`native` are the recipe's own fields; the recipe's check refuses those that are set here."""
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
    """Reduce like Megatron, but do not divide by tokens: each loss already has the global denominator."""
    del num_tokens
    finalize_model_grads(model, None, pg_collection=pg_collection, force_all_reduce=force_all_reduce)


def learning_rate(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """Return the rate of `step`, 0 .. total_steps - 1: a linear warm-up that ends at the peak, then the decay.

    Pure, so that a resumed run continues the same curve. No step has a rate of zero: the warm-up begins one increment
    above it, and the decay would end at `total_steps`.
    """
    assert step >= 0, f"step {step}"
    peak, floor = config.learning_rate, config.min_learning_rate
    warmup_steps = config.warmup_steps or int(config.warmup_share * total_steps)
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    decay_steps = max(total_steps - warmup_steps, 1)
    progress = min((step - warmup_steps) / decay_steps, 1.0)
    match config.decay:
        case "constant":
            return peak
        case "linear":
            return peak + (floor - peak) * progress
        case "cosine":
            return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * progress))
        case _:
            assert_never(config.decay)
