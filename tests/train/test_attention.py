from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from megarl.config.model import read_model_shape
from megarl.train.attention import PackedAttention, PackedSequences, Rotation, rotated
from megarl.train.rotary_frequencies import rotary_frequencies, rotary_magnitude

HEAD_DIM = 4
LENGTHS = [3, 1, 5, 3, 1]

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}
MAGNIFIED_YARN = {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, "mscale": 0.8, "mscale_all_dim": 0.4}


def attention() -> PackedAttention:
    return PackedAttention(
        config=None,
        layer_number=1,
        attn_mask_type=None,
        attention_type="self",
        cp_comm_type=None,
        softmax_scale=None,
        pg_collection=None,
    )


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    starts = torch.tensor([0, *LENGTHS]).cumsum(0, dtype=torch.int32)
    sequences = PackedSequences(starts=starts, lengths=LENGTHS)
    output: Tensor = attention()(
        query, key, value, None, attn_mask_type=None, attention_bias=None, packed_seq_params=sequences
    )
    return output


def naive(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Token by token, head by head."""
    output = torch.zeros_like(query)
    repeats = query.shape[1] // key.shape[1]
    first = 0
    for length in LENGTHS:
        for position in range(first, first + length):
            seen = slice(first, position + 1)
            for head in range(query.shape[1]):
                scores = key[seen, head // repeats] @ query[position, head] / HEAD_DIM**0.5
                output[position, head] = scores.softmax(dim=0) @ value[seen, head // repeats]
        first += length
    return output


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_each_token_sees_its_own_sequence_up_to_itself(num_kv_heads: int) -> None:
    random = torch.Generator().manual_seed(0)
    query = torch.randn(sum(LENGTHS), 4, HEAD_DIM, generator=random)
    key, value = torch.randn(2, sum(LENGTHS), num_kv_heads, HEAD_DIM, generator=random)
    torch.testing.assert_close(attend(query, key, value), naive(query, key, value), rtol=1e-6, atol=1e-6)


def test_a_rotation_is_a_product_of_complex_numbers() -> None:
    values = torch.randn(5, 2, 8)
    angles = torch.rand(5, 4) * 6
    pairs = torch.complex(values[..., :4], values[..., 4:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    expected = torch.cat((pairs.real, pairs.imag), dim=-1)
    torch.testing.assert_close(rotated(values, Rotation.by(angles)), expected)


@pytest.mark.parametrize(
    "rope",
    [{"rope_type": "default", "rope_theta": 1e6}, LLAMA3, YARN, MAGNIFIED_YARN],
    ids=["default", "llama3", "yarn", "magnified yarn"],
)
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
    shape = read_model_shape(tmp_path)
    torch.testing.assert_close(rotary_frequencies(shape), expected, rtol=1e-6, atol=0)
    assert rotary_magnitude(shape) == pytest.approx(model.model.rotary_emb.attention_scaling)
    if rope is LLAMA3 or rope is YARN:
        unstretched = 1 / shape.rope_theta ** (torch.arange(0, 32, 2) / 32)
        assert 0 < (expected == unstretched).sum() < len(expected), "the stretch should reach some channels only"
