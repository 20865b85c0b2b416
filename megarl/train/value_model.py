"""A model whose last chunk returns a value for every position."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from megarl.train.model import DeviceMicroBatch, Model


class ValueModel(Model):
    """The last chunk returns a value per position."""

    def _set_head(self) -> None:
        del self.output_layer
        self.value_head = torch.nn.Linear(self._shape.hidden, 1, bias=False, dtype=self.config.params_dtype)
        self.value_head.to(self._topology.device)

    def forward(self, micro_batch: DeviceMicroBatch) -> Tensor:
        hidden = self.decode(micro_batch)
        if not self.post_process:
            return hidden
        values, places = self._values(hidden), micro_batch.computed_places
        return values if places is None else values[places]

    def _values(self, hidden: Tensor) -> Tensor:
        # Every tensor-parallel rank computes every value: the head's gradients are equal and need no sum.
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self._topology.tensor_group
            )
        return F.linear(hidden[:, 0].float(), self.value_head.weight.float())[:, 0]
