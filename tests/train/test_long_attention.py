from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.train import long_attention
from megarl.train.long_attention import _all_rectangles, rectangles_of

HEADS, KV_HEADS, SIZE = 4, 2, 8


@pytest.mark.parametrize(
    ("lengths", "is_worth_it"),
    [
        ([100] * 80, False),
        ([512] * 16, False),
        ([2000] * 4, False),
        ([4096, 4096], True),
        ([5000, 4000], True),
        ([4099, 5], True),
    ],
)
def test_sequences_that_are_too_short_are_left_to_others(lengths: list[int], is_worth_it: bool) -> None:
    assert (rectangles_of(lengths) is not None) is is_worth_it


def test_equal_whole_lengths_are_one_rectangle_and_others_one_each() -> None:
    found = _all_rectangles([1024, 1024, 700, 700, 512])
    shapes = [(part.start, part.num_sequences, part.length, part.rounded) for part in found.parts]
    assert shapes == [(0, 2, 1024, 1024), (2048, 1, 700, 1024), (2748, 1, 700, 1024), (3448, 1, 512, 512)]
    assert found.num_tokens == 3960


def test_the_last_rectangle_may_reach_beyond_the_pack() -> None:
    assert _all_rectangles([600, 700]).num_tokens == 600 + 1024


def dense(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, ...]:
    output = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    return output, output, output, output


def dense_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, _saved: tuple[Tensor, ...], scale: float | None
) -> tuple[Tensor, ...]:
    inputs = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    with torch.enable_grad():
        output, *_ = dense(inputs[0], inputs[1], inputs[2], scale)
    return torch.autograd.grad(output, inputs, grad)


@pytest.mark.patient
@pytest.mark.parametrize("lengths", [[512, 512], [600, 700], [512, 512, 70, 1500, 1], [3000]])
def test_every_sequence_sees_itself_alone(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace cuDNN's kernels by torch's own, on the same rectangles."""
    monkeypatch.setattr(long_attention, "_forward", dense)
    monkeypatch.setattr(long_attention, "_backward", dense_backward)
    rectangles = _all_rectangles(lengths)
    mixed = torch.randn(sum(lengths), HEADS + 2 * KV_HEADS, SIZE, requires_grad=True)
    sizes = [HEADS, KV_HEADS, KV_HEADS]
    grad = torch.randn(sum(lengths), HEADS, SIZE)
    query, key, value = torch.split(mixed, sizes, dim=1)
    found = long_attention.attend_by_cudnn(query, key, value, rectangles, 0.3)
    (found_grad,) = torch.autograd.grad(found, mixed, grad)
    parts, start = [], 0
    for length in lengths:
        parts_of = torch.split(mixed[start : start + length].transpose(0, 1)[None], sizes, dim=1)
        parts.append(dense(parts_of[0], parts_of[1], parts_of[2], 0.3)[0][0].transpose(0, 1))
        start += length
    expected = torch.cat(parts)
    (expected_grad,) = torch.autograd.grad(expected, mixed, grad)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found_grad, expected_grad)
