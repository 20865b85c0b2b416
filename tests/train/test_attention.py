from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megarl.train.attention import PackedAttention, PackedSequences

HEAD_DIM = 4
LENGTHS = [3, 1, 5, 3, 1]


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
