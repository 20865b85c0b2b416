from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.train.norm import RMSNorm


@pytest.mark.parametrize("is_sequence_parallel", [False, True])
def test_equals_the_formula_and_marks_its_weight_for_megatron(is_sequence_parallel: bool) -> None:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        use_cpu_initialization=True,
        sequence_parallel=is_sequence_parallel,
        tensor_model_parallel_size=2,
    )
    norm = RMSNorm(config, hidden_size=8, eps=1e-5)
    with torch.no_grad():
        norm.weight.copy_(torch.arange(8) / 4)
    hidden = torch.randn(5, 1, 8, generator=torch.Generator().manual_seed(0))
    expected = hidden / (hidden.pow(2).mean(dim=-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    torch.testing.assert_close(norm(hidden), expected)
    assert norm.weight.sequence_parallel is is_sequence_parallel  # type: ignore[attr-defined]
