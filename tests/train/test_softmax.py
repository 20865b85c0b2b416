"""Windows, sinks and values of another width than keys, against a loop over tokens and heads."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from megarl.train import flash_attention
from megarl.train.attention import PackedSequences
from megarl.train.flash_attention import Spans, attend_by_flash
from megarl.train.length_groups import attend_by_length
from megarl.train.softmax import Softmax, attend_on_host

LENGTHS = [7, 1, 12, 7]
HEADS, KV_HEADS, WIDTH = 4, 2, 6
KINDS = {"window": (3, False), "sinks": (None, True), "both": (3, True), "none": (None, False), "wide": (50, True)}


def random_inputs(value_width: int, *, has_sinks: bool) -> list[Tensor]:
    """Return queries, keys, values, and sinks if there are some, in double precision."""
    generator = torch.Generator().manual_seed(0)
    num_tokens = sum(LENGTHS)
    sizes: list[tuple[int, ...]] = [
        (num_tokens, HEADS, WIDTH),
        (num_tokens, KV_HEADS, WIDTH),
        (num_tokens, KV_HEADS, value_width),
    ]
    sizes += [(HEADS,)] if has_sinks else []
    return [torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_() for size in sizes]


def naive(inputs: list[Tensor], *, window: int | None, scale: float) -> Tensor:
    """Compute token by token and head by head."""
    query, key, value = inputs[:3]
    rows, first = [], 0
    for length in LENGTHS:
        for position in range(first, first + length):
            seen = slice(first if window is None else max(first, position - window), position + 1)
            for head in range(HEADS):
                logits = key[seen, head // 2] @ query[position, head] * scale
                if len(inputs) == 4:
                    logits = torch.cat((logits, inputs[3][head : head + 1]))
                weights = logits.softmax(dim=0)[: seen.stop - seen.start]
                rows.append(weights @ value[seen, head // 2])
        first += length
    return torch.stack(rows).view(len(query), HEADS, -1)


def assert_same(found: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    """Compare outputs and the gradients of all inputs."""
    torch.testing.assert_close(found, expected)
    grad = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=found.dtype)
    for mine, right in zip(
        torch.autograd.grad(found, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True
    ):
        torch.testing.assert_close(mine, right)


@pytest.mark.parametrize("value_width", [WIDTH, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pack_on_a_cpu_equals_the_loop(kind: str, value_width: int) -> None:
    window, has_sinks = KINDS[kind]
    inputs = random_inputs(value_width, has_sinks=has_sinks)
    over = Softmax(scale=0.4, window=window, sinks=inputs[3] if has_sinks else None)
    starts = torch.tensor([0, *LENGTHS]).cumsum(0, dtype=torch.int32)
    groups = PackedSequences(starts=starts, lengths=LENGTHS).by_length
    found = attend_by_length(inputs[0], inputs[1], inputs[2], groups, over)
    assert_same(found, naive(inputs, window=window, scale=0.4), inputs)


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_queries_alone_see_what_they_see_among_all(kind: str) -> None:
    """A rank that shares a sequence has some of its queries, and the keys up to the last of them."""
    window, has_sinks = KINDS[kind]
    inputs = random_inputs(WIDTH, has_sinks=has_sinks)
    over = Softmax(scale=0.4, window=window, sinks=inputs[3] if has_sinks else None)
    query, key, value = (tensor[8:20].transpose(0, 1)[None] for tensor in inputs[:3])  # the third sequence
    found = attend_on_host(query[:, :, 5:], key, value, over)[0].transpose(0, 1)
    torch.testing.assert_close(found, naive(inputs, window=window, scale=0.4)[13:20])


def flash_logits(query: Tensor, key: Tensor, spans: Spans, scale: float | None, window: int | None) -> Tensor:
    """Return the logits of all pairs that see each other, -inf elsewhere. [heads, N, N]"""
    assert scale is not None
    logits = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(HEADS // KV_HEADS, dim=1)) * scale
    places = torch.arange(len(query))
    sequence = torch.bucketize(places, spans.query_starts[1:], right=True)
    ago = places[:, None] - places
    is_hidden = (sequence[:, None] != sequence) | (ago < 0) | (ago > (len(query) if window is None else window))
    return logits.masked_fill(is_hidden, -torch.inf)


def flash_forward(
    query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float | None, window: int | None
) -> tuple[Tensor, ...]:
    logits = flash_logits(query, key, spans, scale, window)
    output = torch.einsum("hqk,khd->qhd", logits.softmax(-1), value.repeat_interleave(HEADS // KV_HEADS, dim=1))
    return output, logits.logsumexp(-1), torch.empty(0), torch.empty(0)


def flash_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    saved: tuple[Tensor, ...],
    spans: Spans,
    scale: float | None,
    window: int | None,
) -> tuple[Tensor, ...]:
    """Compute as the kernel does: weights from the saved sums, the inner product from the saved output."""
    assert scale is not None
    output, log_sums = saved[:2]
    repeated = partial(torch.repeat_interleave, repeats=HEADS // KV_HEADS, dim=1)
    weights = (flash_logits(query, key, spans, scale, window) - log_sums[..., None]).exp()
    inner = (grad * output).sum(-1).t()[..., None]
    grad_logits = weights * (torch.einsum("qhd,khd->hqk", grad, repeated(value)) - inner) * scale

    def summed(tensor: Tensor) -> Tensor:
        return torch.unflatten(tensor, 1, (KV_HEADS, -1)).sum(2)

    return (
        torch.einsum("hqk,khd->qhd", grad_logits, repeated(key)),
        summed(torch.einsum("hqk,qhd->khd", grad_logits, query)),
        summed(torch.einsum("hqk,qhd->khd", weights, grad)),
    )


@pytest.mark.parametrize("value_width", [WIDTH, 4])
@pytest.mark.parametrize("kind", ["sinks", "both"])
def test_a_kernel_without_sinks_gets_them_from_its_sums(
    kind: str, value_width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flash kernels are replaced by what they compute, so that the arithmetic around them is seen."""
    monkeypatch.setattr(flash_attention, "_forward", flash_forward)
    monkeypatch.setattr(flash_attention, "_backward", flash_backward)
    window, has_sinks = KINDS[kind]
    inputs = random_inputs(value_width, has_sinks=has_sinks)
    starts = torch.tensor([0, *LENGTHS]).cumsum(0, dtype=torch.int32)
    spans = Spans(query_starts=starts, key_starts=starts, query_lengths=LENGTHS, key_lengths=LENGTHS)
    over = Softmax(scale=0.4, window=window, sinks=inputs[3])
    found = attend_by_flash(inputs[0], inputs[1], inputs[2], spans, over)
    grad = torch.randn(found.shape, dtype=found.dtype, generator=torch.Generator().manual_seed(1))
    expected = naive(inputs, window=window, scale=0.4)
    # Shares of the softmax are in float32, as the sums of the kernel are.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for mine, right in zip(
        torch.autograd.grad(found, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True
    ):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-5)
