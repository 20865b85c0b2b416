"""The optimizer of a role with `offload`: states, and with "everything" the weights, that leave the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from megarl.config.roles import OptimizerConfig, TrainedModelConfig
from megarl.train.host_memory import Offload
from megarl.train.memory import free_cache
from megarl.train.model import Model
from megarl.train.optimizer import ModelOptimizer
from megarl.train.shards import HostStates, Shard


def build_optimizer(chunks: Sequence[Model], config: OptimizerConfig, split: TrainedModelConfig) -> ModelOptimizer:
    """Return the optimizer of the model chunks, as `offload` of the role says."""
    return (ModelOptimizer if split.offload == "nothing" else OffloadedOptimizer)(chunks, config, split)


class OffloadedOptimizer(ModelOptimizer):
    """Keeps its states in host memory; gradients take device memory from `zero_grad` until `trim`."""

    def __init__(self, chunks: Sequence[Model], config: OptimizerConfig, split: TrainedModelConfig) -> None:
        super().__init__(chunks, config, split)
        self._has_offloaded_weights = split.offload == "everything"
        self._offload = Offload(self._device)
        self._states = [HostStates(optimizer, self._device) for optimizer in self._optimizer.chained_optimizers]
        free_cache(self._device)

    def _shards(self) -> Iterator[tuple[torch.nn.Parameter, Shard]]:
        for states in self._states:
            yield from states.shards.items()

    def trim(self) -> None:
        """Free what only passes need, and the gradients, which the next `zero_grad` allocates again."""
        for gradient in self._gradients():
            gradient.untyped_storage().resize_(0)
        super().trim()

    def release(self) -> None:
        """Free device memory for engines: as `trim` does, and the weights if they are offloaded."""
        if self._has_offloaded_weights:
            self._offload.release(self._weights())
        self.trim()
        self.is_released = True
        self.has_weights = not self._has_offloaded_weights

    def reload(self) -> None:
        self._offload.reload()
        self.is_released = False
        self.has_weights = True

    def at_hand(self, tensor: Tensor) -> Tensor:
        return self._offload.at_hand(tensor)

    def adopt_weights(self) -> None:
        for states in self._states:
            states.adopt_weights()

    def zero_grad(self) -> None:
        for gradient in self._gradients():
            if not gradient.untyped_storage().nbytes():
                gradient.untyped_storage().resize_(gradient.nbytes)
        super().zero_grad()

    def _update(self) -> None:
        """Do the same as Megatron's own step, with states that are in host memory."""
        grad_norm, clip = self.grad_norm(), self._config.clip_grad_norm
        for optimizer in self._optimizer.chained_optimizers:
            if clip > 0 and optimizer.get_parameters():
                clip_grad_by_total_norm_fp32(optimizer.get_parameters(), max_norm=clip, total_norm=grad_norm)
        for states in self._states:
            states.step()
        if not self.chunks[0].ddp_config.overlap_param_gather:
            for chunk in self.chunks:
                chunk.start_param_sync()

    def _weights(self) -> list[Tensor]:
        frozen = [each.data for chunk in self.chunks for each in chunk.module.parameters() if not each.requires_grad]
        return [*(buffer.param_data for chunk in self.chunks for buffer in _buffers(chunk)), *frozen]

    def _gradients(self) -> list[Tensor]:
        return [buffer.grad_data for chunk in self.chunks for buffer in _buffers(chunk)]


def _buffers(chunk: DistributedDataParallel) -> list[_ParamAndGradBuffer]:
    return [*chunk.buffers, *chunk.expert_parallel_buffers]
