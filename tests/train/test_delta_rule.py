"""The gated delta rule by chunks and the short convolution, against one token after the other."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from megarl.families.shape import DeltaWidths
from megarl.train import delta_fused
from megarl.train.delta_rule import Chunks, blocks_of, chunks_of, delta_rule, short_convolution

HEADS, KEY, VALUE = 2, 4, 3
CPU = torch.device("cpu")
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def inputs_of(num_tokens: int, *, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Return queries, keys of unit length, values, logarithms of decays, and strengths."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(num_tokens, HEADS, *shape, generator=generator, dtype=torch.float64).to(dtype)

    key = F.normalize(random(KEY), dim=-1)
    return random(KEY), key, random(VALUE), -F.softplus(random()), torch.sigmoid(random())


def one_by_one(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor) -> Tensor:
    """Return the outputs of one sequence by the definition."""
    state, outputs = query.new_zeros(HEADS, KEY, VALUE), []
    for q, k, v, g, b in zip(query, key, value, decay, strength, strict=True):
        state = state * g.exp()[:, None, None]
        held = torch.einsum("hkv,hk->hv", state, k)
        state = state + torch.einsum("hk,hv->hkv", k, (v - held) * b[:, None])
        outputs.append(torch.einsum("hkv,hk->hv", state, q))
    return torch.stack(outputs)


def split(inputs: Inputs, lengths: list[int]) -> list[Inputs]:
    queries, keys, values, decays, strengths = (torch.split(each, lengths) for each in inputs)
    return list(zip(queries, keys, values, decays, strengths, strict=True))


def joined(sequences: list[Inputs]) -> Inputs:
    queries, keys, values, decays, strengths = (torch.cat(parts) for parts in zip(*sequences, strict=True))
    return queries, keys, values, decays, strengths


def test_chunks_compute_what_one_token_after_the_other_does() -> None:
    lengths = [1, 70, 3, 130, 64]
    inputs = inputs_of(sum(lengths), dtype=torch.float64)
    expected = torch.cat([one_by_one(*each) for each in split(inputs, lengths)])
    found = delta_rule(*inputs, chunks_of(lengths, CPU))
    assert (found - expected).abs().max() < 1e-12
    in_float32 = delta_rule(*inputs_of(sum(lengths), dtype=torch.float32), chunks_of(lengths, CPU))
    assert (in_float32 - expected).abs().max() < 1e-5 * expected.abs().max()


def test_it_is_the_recurrence_of_transformers() -> None:
    query, key, value, decay, strength = inputs_of(90, dtype=torch.float32)
    expected, _ = torch_recurrent_gated_delta_rule(
        query[None], key[None], value[None], decay[None], strength[None], None, False
    )
    found = delta_rule(query * KEY**-0.5, key, value, decay, strength, chunks_of([90], CPU))
    assert (found - expected[0]).abs().max() < 1e-6


def test_its_gradients_are_right_within_chunks_and_between_them() -> None:
    lengths = [3, 5, 1]
    chunks = chunks_of(lengths, CPU, size=2)
    inputs = [each.requires_grad_() for each in inputs_of(sum(lengths), dtype=torch.float64)]
    assert torch.autograd.gradcheck(lambda q, k, v, g, b: delta_rule(q, k, v, g, b, chunks), inputs, fast_mode=True)


@pytest.mark.patient
@settings(max_examples=10, deadline=None)
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any), seed=st.integers(0, 99))
def test_no_state_passes_from_one_packed_sequence_to_another(lengths: list[int], seed: int) -> None:
    """A sequence has the outputs that it has alone, in any order of the pack."""
    inputs = inputs_of(sum(lengths), dtype=torch.float64, seed=seed)
    packed = torch.split(delta_rule(*inputs, chunks_of(lengths, CPU, size=4)), lengths)
    order: list[int] = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed)).tolist()
    sequences = split(inputs, lengths)
    shuffled = joined([sequences[index] for index in order])
    sizes = [lengths[index] for index in order]
    others = torch.split(delta_rule(*shuffled, chunks_of(sizes, CPU, size=4)), sizes)
    for place, index in enumerate(order):
        if lengths[index]:
            alone = delta_rule(*sequences[index], chunks_of([lengths[index]], CPU, size=4))
            assert (packed[index] - alone).abs().max() < 1e-12
            assert (others[place] - alone).abs().max() < 1e-12


def test_a_convolution_begins_anew_with_every_sequence() -> None:
    lengths, channels, kernel = [2, 7, 1, 5], 3, 4
    values = torch.randn(sum(lengths), channels, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(channels, kernel, dtype=torch.float64, requires_grad=True)
    ages = chunks_of(lengths, CPU).ages
    expected = torch.cat(
        [
            F.conv1d(F.pad(part.T, (kernel - 1, 0)), weight[:, None], groups=channels).T
            for part in torch.split(values, lengths)
        ]
    )
    assert (short_convolution(values, weight, ages) - expected).abs().max() < 1e-12
    assert torch.autograd.gradcheck(lambda v, w: short_convolution(v, w, ages), (values, weight), fast_mode=True)


def test_chunks_hold_every_token_once() -> None:
    lengths = [5, 0, 9, 4]
    chunks: Chunks = chunks_of(lengths, CPU, size=4)
    assert chunks.counts == [3, 2, 1]
    assert chunks.tokens[chunks.places].tolist() == list(range(sum(lengths)))
    assert sorted(chunks.tokens.tolist())[: sum(lengths)] == list(range(sum(lengths)))
    assert chunks.ages.tolist() == [age for length in lengths for age in range(length)]


def test_plain_torch_is_taken_where_kernels_are_wrong(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A GPU is pretended; kernels are right or wrong by its own measurement, and only for widths that have blocks."""
    widths = DeltaWidths(key_heads=2, value_heads=4, key=64, value=128, kernel=4)
    errors = {(64, 128): 0.01, (128, 128): 0.5}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(delta_fused, "find_spec", lambda _: object())
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="9.9"))
    monkeypatch.setattr(delta_fused, "delta_rule_error", lambda key, value, *_: errors[key, value])
    delta_fused._is_right.cache_clear()
    assert delta_fused.is_usable(widths)
    assert not delta_fused.is_usable(replace(widths, key=16))
    assert not caplog.text
    assert not delta_fused.is_usable(replace(widths, key=128))
    assert "Triton 9.9 on this GPU their kernels are wrong by 0.5" in caplog.text
    delta_fused._is_right.cache_clear()


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any))
def test_kernels_go_through_every_token_once_and_leave_no_sequence(lengths: list[int]) -> None:
    blocks = blocks_of(lengths, CPU, size=4)
    sequences = [index for index, length in enumerate(lengths) for _ in range(length)]
    bounds = blocks.bounds.tolist()
    assert [token for start, end in bounds for token in range(start, end)] == list(range(sum(lengths)))
    assert all(end - start <= 4 and len(set(sequences[start:end])) == 1 for start, end in bounds)
    spans = sorted((start, end, chunk) for start, end, chunk in blocks.spans.tolist() if end > start)
    assert [end - start for start, end, _ in spans] == [length for length in lengths if length]
    assert [bounds[chunk][0] for _, _, chunk in spans] == [start for start, _, _ in spans]
    assert blocks.ages.tolist() == [age for length in lengths for age in range(length)]
