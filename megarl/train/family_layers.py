"""Parts of layers that few families have: a norm behind a layer, and biases of experts."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import RowParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.train.layers import RMSNorm


def with_post_norm(base: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """Return a linear layer with a norm behind it, before the residual is added."""

    class Normed(base):  # type: ignore[misc, valid-type]
        def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: object) -> None:
            super().__init__(input_size, output_size, config=config, **options)
            self.post_layernorm = RMSNorm(config, output_size, config.layernorm_epsilon)

        def forward(self, values: Tensor) -> tuple[Tensor, Tensor | None]:
            output, bias = super().forward(values)
            return self.post_layernorm(output), bias

    return Normed


class BiasedExpertOutput(RowParallelLinear):
    """The second matrix of an expert with biases. Megatron adds the bias in place, which torch refuses for a view."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: object) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        # Ranks of a tensor-parallel group have different experts: Megatron would sum their gradients, and count those
        # of the first alone in the norm.
        self.bias.sequence_parallel = False
        set_tensor_model_parallel_attributes(self.bias, True, 0, 1)

    def forward(self, values: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(values)
        return output.clone(), bias
