"""Where a mixture sends each token: Megatron's top-k router with a gate that needs no Transformer Engine.

Megatron's own gate calls a kernel of Transformer Engine by a name that is only defined where that is installed:
https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/transformer/moe/moe_utils.py
"""

from __future__ import annotations

import torch.nn.functional as F
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


class Fp32Router(TopKRouter):
    def gating(self, input: Tensor) -> Tensor:
        """In float32 whatever the weights are: close logits would be in another order after rounding."""
        return F.linear(input.float(), self.weight.float())
