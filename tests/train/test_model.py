from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megarl.config.model import read_model_shape
from megarl.train.model import rotary_frequencies

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 1e6}, LLAMA3], ids=["default", "llama3"])
def test_rotary_frequencies_are_those_of_transformers(rope: dict[str, object], tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        num_hidden_layers=1,
        intermediate_size=8,
        vocab_size=8,
        max_position_embeddings=512,
        rope_parameters=rope,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    expected = model.model.rotary_emb.inv_freq
    torch.testing.assert_close(rotary_frequencies(read_model_shape(tmp_path)), expected, rtol=1e-6, atol=0)
    if rope is LLAMA3:
        unstretched = 1 / 500000.0 ** (torch.arange(0, 32, 2) / 32)
        assert 0 < (expected == unstretched).sum() < len(expected), "the stretch should reach some channels only"
