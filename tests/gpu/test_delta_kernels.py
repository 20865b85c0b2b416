"""The kernels of gated delta nets against plain torch in float64. Kernels round operands of products to bfloat16."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.families.shape import DeltaWidths
from megarl.train import delta_triton
from megarl.train.delta_fused import convolved, delta_rule_error, delta_rule_fused, gated_norm, is_usable
from megarl.train.delta_rule import blocks_of, chunks_of, delta_rule, short_convolution
from tests.gpu.test_kernels import distance

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
LENGTHS = [1, 63, 64, 65, 700, 200]
NAMES = ("output", "query", "key", "value", "decay", "strength")
EPS = 1e-6


def inputs_of(lengths: list[int], key_heads: int, heads: int, key: int, value: int) -> list[Tensor]:
    """Return queries and keys of unit length, values (these rounded), decays and strengths."""
    torch.manual_seed(0)
    num_tokens = sum(lengths)
    query, keys = (F.normalize(torch.randn(num_tokens, key_heads, key, device=CUDA) + 0.5, dim=-1) for _ in range(2))
    values = torch.randn(num_tokens, heads, value, device=CUDA)
    rounded = [each.bfloat16().float() for each in (query, keys, values)]
    decay, strength = -0.2 * torch.rand(num_tokens, heads, device=CUDA), torch.rand(num_tokens, heads, device=CUDA)
    return [*rounded, decay, strength]


def computed(call: Callable[..., Tensor], inputs: list[Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the output and the gradients."""
    leaves = [each.to(dtype).requires_grad_() for each in (each.clone() for each in inputs)]
    output = call(*leaves)
    weight = torch.randn(output.shape, generator=torch.Generator(CUDA).manual_seed(1), device=CUDA)
    grads = torch.autograd.grad((output.to(dtype) * weight).sum(), leaves)
    return dict(zip(NAMES, (output.detach(), *grads), strict=True))


def exactly(lengths: list[int]) -> Callable[..., Tensor]:
    def call(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor) -> Tensor:
        repeats = value.shape[1] // key.shape[1]
        query, key = (each.repeat_interleave(repeats, dim=1) for each in (query, key))
        chunks = chunks_of(lengths, query.device)
        return delta_rule(query * query.shape[-1] ** -0.5, key, value, decay, strength, chunks)

    return call


def by_own(lengths: list[int]) -> Callable[..., Tensor]:
    def call(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor) -> Tensor:
        blocks = blocks_of(lengths, query.device, size=delta_triton.SIZE)
        return delta_rule_fused(query.bfloat16(), key.bfloat16(), value.bfloat16(), decay, strength, blocks)

    return call


@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize(
    ("key_heads", "heads", "key", "value"),
    [(16, 32, 128, 128), (4, 4, 64, 64), (2, 4, 256, 256), (2, 6, 64, 128), (2, 2, 128, 64)],
)
def test_gradients_are_right_at_every_width(
    key_heads: int, heads: int, key: int, value: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compilers for Hopper got gradients of such kernels wrong by half, at some chunk sizes only."""
    monkeypatch.setattr(delta_triton, "SIZE", size)
    inputs = inputs_of(LENGTHS, key_heads, heads, key, value)
    found = computed(by_own(LENGTHS), inputs, torch.float32)
    expected = computed(exactly(LENGTHS), inputs, torch.float64)
    distances = {name: distance(found[name], expected[name]) for name in NAMES}
    assert max(distances.values()) < 1.5e-2, distances


def test_a_run_measures_that_they_are_right() -> None:
    assert is_usable(DeltaWidths(key_heads=16, value_heads=32, key=128, value=128, kernel=4))
    assert 0 < delta_rule_error(128, 128, CUDA, torch.bfloat16) < 1.5e-2


def test_no_state_or_gradient_passes_from_one_packed_sequence_to_another() -> None:
    """A sequence has the bits that it has alone, also beside one of numbers that are not finite."""
    lengths, own = [70, 300, 129], slice(70, 370)
    inputs = inputs_of(lengths, 2, 4, 128, 128)

    def of(lengths: list[int], own: slice, inputs: list[Tensor]) -> list[Tensor]:
        """Return output and gradients of one sequence, of which alone there is a loss."""
        leaves = [each.clone().requires_grad_() for each in inputs]
        output = by_own(lengths)(*leaves)[own]
        return [output.detach(), *(grad[own] for grad in torch.autograd.grad(output.float().square().sum(), leaves))]

    alone = of([300], slice(None), [each[own] for each in inputs])
    for each in inputs:
        each[: own.start] = torch.nan
        each[own.stop :] = torch.inf
    assert all(torch.equal(found, right) for found, right in zip(of(lengths, own, inputs), alone, strict=True))


def test_the_same_bits_every_time() -> None:
    inputs = inputs_of(LENGTHS, 4, 8, 128, 128)
    first, second = (computed(by_own(LENGTHS), inputs, torch.float32) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in NAMES)


@pytest.mark.parametrize(("key_heads", "per_key", "key", "value"), [(4, 2, 128, 128), (3, 1, 64, 256), (2, 3, 256, 64)])
def test_the_convolution_and_the_gated_norm(key_heads: int, per_key: int, key: int, value: int) -> None:
    torch.manual_seed(0)
    widths = DeltaWidths(key_heads=key_heads, value_heads=key_heads * per_key, key=key, value=value, kernel=4)
    channels, gates = 2 * key + per_key * value, per_key * value
    num_tokens, blocks = sum(LENGTHS), blocks_of(LENGTHS, CUDA)
    heads = key_heads * per_key
    inputs = [
        torch.randn(num_tokens, key_heads, channels + gates + 3, device=CUDA).bfloat16(),
        torch.randn(key_heads, channels, 4, device=CUDA),
        torch.randn(num_tokens, heads, value, device=CUDA).bfloat16(),
        torch.rand(value, device=CUDA) + 0.5,
    ]
    weights = [
        torch.randn(num_tokens, count, width, device=CUDA)
        for count, width in ((key_heads, key), (key_heads, key), (heads, value), (heads, value))
    ]

    def by_kernels(rows: Tensor, weight: Tensor, output: Tensor, norm: Tensor) -> list[Tensor]:
        values, gate, _ = torch.split(rows, [channels, gates, 3], dim=-1)
        return [*convolved(values, weight, widths, blocks.ages, EPS), gated_norm(output, gate, norm, EPS)]

    def plainly(rows: Tensor, weight: Tensor, output: Tensor, norm: Tensor) -> list[Tensor]:
        values, gate, _ = torch.split(rows, [channels, gates, 3], dim=-1)
        summed = F.silu(short_convolution(values.flatten(1), weight.flatten(0, 1), blocks.ages))
        query, keys, given = torch.split(torch.unflatten(summed, -1, (key_heads, -1)), [key, key, gates], dim=-1)
        query, keys = (each * torch.rsqrt(each.square().sum(dim=-1, keepdim=True) + EPS) for each in (query, keys))
        given, gate = (torch.unflatten(each, -1, (per_key, value)).flatten(1, 2) for each in (given, gate))
        return [query, keys, given, F.rms_norm(output, (value,), norm, EPS) * F.silu(gate)]

    def run(call: Callable[..., list[Tensor]], dtype: torch.dtype | None) -> list[Tensor]:
        leaves = [each.clone().to(dtype or each.dtype).requires_grad_() for each in inputs]
        outputs = call(*leaves)
        total = torch.stack([(output.double() * weight).sum() for output, weight in zip(outputs, weights, strict=True)])
        return [*(output.detach() for output in outputs), *torch.autograd.grad(total.sum(), leaves)]

    distances = [
        distance(found, right) for found, right in zip(run(by_kernels, None), run(plainly, torch.float64), strict=True)
    ]
    assert max(distances) < 1e-2, distances
