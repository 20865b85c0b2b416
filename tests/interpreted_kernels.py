"""Triton's kernels on a CPU, by its interpreter, against torch: without Megatron, which takes long to import.

A script of its own: Triton reads TRITON_INTERPRET when a kernel is defined. Prints the largest differences as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from megarl.families.shape import DeltaWidths
from megarl.train import delta_triton
from megarl.train.delta_fused import convolved, delta_rule_error, delta_rule_fused, gated_norm
from megarl.train.delta_rule import blocks_of, chunks_of, delta_rule, short_convolution
from megarl.train.kernels import gate, grad_gate, grad_rows, rotate, sum_places, sum_rows
from megarl.train.logprob import RowGradients, _grad_logits, _summed
from megarl.weights.algebra.slices import Slice
from megarl.weights.executors import kernels
from megarl.weights.executors.digest import DigestSums, Summand
from megarl.weights.executors.fp8 import LARGEST, quantise
from megarl.weights.executors.kernels import BlockPart, BlockQuantiser
from megarl.weights.executors.tensor_digest import MODULUS, bits_of_matrix


def fused(_: object, left: TensorHandle, right: TensorHandle, addend: TensorHandle) -> TensorHandle:
    """Round once, as a GPU does; the interpreter rounds the product as well."""
    values = left.data.astype("f8") * right.data + addend.data
    return TensorHandle(values.astype(addend.data.dtype), addend.dtype.scalar)


InterpreterBuilder.create_fma = fused


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).abs().max())


def activation() -> float:
    gate_up = torch.randn(5, 1, 2 * 1500, requires_grad=True)
    grad = torch.randn(5, 1, 1500)
    left, right = gate_up.chunk(2, dim=-1)
    output = F.silu(left) * right
    output.backward(grad)  # type: ignore[no-untyped-call]
    assert gate_up.grad is not None
    inputs = gate_up.detach()
    return max(distance(gate(inputs), output), distance(grad_gate(inputs, grad), gate_up.grad))


def rotation() -> float:
    angles = torch.rand(32, 7).T * 6  # transposed, as those of images are
    values = torch.randn(7, 3, 20, 64)[:, 1, 2:16].requires_grad_()  # heads that do not lie side by side
    values.retain_grad()  # type: ignore[no-untyped-call]
    grad = torch.randn(7, 14, 64)
    pairs = torch.complex(values[..., :32], values[..., 32:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    output = torch.cat((pairs.real, pairs.imag), dim=-1)
    output.backward(grad)  # type: ignore[no-untyped-call]
    assert values.grad is not None
    there = rotate(values.detach(), angles.cos(), angles.sin(), direction=1.0)
    back = rotate(grad, angles.cos(), angles.sin(), direction=-1.0)
    return max(distance(there, output), distance(back, values.grad))


def scores() -> float:
    logits = torch.randn(3, 5000) * 3
    columns = torch.tensor([4, -1, 4999])
    sums = _summed(logits, columns, 0.7)
    worst = max(distance(*pair) for pair in zip(sum_rows(logits, columns, 0.7), sums, strict=True))
    rows = RowGradients(
        log_norms=sums.maximum + sums.total.log(),
        entropy=sums.total.log() - sums.weighted / sums.total,
        logprobs=torch.randn(3),
        entropies=torch.randn(3),
    )
    expected = _grad_logits(logits, columns, rows, 0.7)
    return max(worst, distance(grad_rows(logits.clone(), columns, rows, 0.7), expected))


def furthest(calls: tuple[Callable[..., list[torch.Tensor]], ...], inputs: list[torch.Tensor]) -> float:
    """Return the largest difference between two calls' outputs, and between the gradients of their inputs."""
    found = []
    for call in calls:
        leaves = [each.clone().requires_grad_() for each in inputs]
        outputs = call(*leaves)
        torch.manual_seed(1)
        total = torch.stack([(each * torch.randn_like(each)).sum() for each in outputs]).sum()
        found.append([*outputs, *torch.autograd.grad(total, leaves)])
    return max(distance(one, other) for one, other in zip(*found, strict=True))


def delta_rules() -> float:
    """Two sequences, one of them of two chunks, and two heads of values for each key."""
    delta_triton.SIZE, lengths = 32, [3, 40]
    device = torch.device("cpu")
    blocks, chunks = blocks_of(lengths, device, size=32), chunks_of(lengths, device, size=32)

    def by_kernels(*inputs: torch.Tensor) -> list[torch.Tensor]:
        query, key, value, decay, strength = inputs
        return [delta_rule_fused(query, key, value, -decay, strength, blocks)]

    def plainly(*inputs: torch.Tensor) -> list[torch.Tensor]:
        query, key, value, decay, strength = inputs
        query, key = query.repeat_interleave(2, dim=1) / 4, key.repeat_interleave(2, dim=1)
        return [delta_rule(query, key, value, -decay, strength, chunks)]

    query, key = (F.normalize(torch.randn(43, 1, 16) + 0.5, dim=-1) for _ in range(2))
    return furthest(
        (by_kernels, plainly), [query, key, torch.randn(43, 2, 32), torch.rand(43, 2) / 5, torch.rand(43, 2)]
    )


def a_wrong_delta_rule() -> float:
    """Gradients of keys that are wrong by half: what runs measure says so, and nothing without it."""
    size, right = (32, 32), delta_triton.compute_gradients
    error = delta_rule_error(*size, torch.device("cpu"), torch.float32)

    def wrong(inputs: delta_triton.RuleInputs, kept: delta_triton.Kept, grad: torch.Tensor) -> delta_triton.Gradients:
        gradients = right(inputs, kept, grad)
        return gradients._replace(key=gradients.key / 2)

    delta_triton.compute_gradients = wrong
    found = delta_rule_error(*size, torch.device("cpu"), torch.float32)
    delta_triton.compute_gradients = right
    return max(error, abs(found - 0.5))


def convolutions_and_gated_norms() -> float:
    widths = DeltaWidths(key_heads=2, value_heads=4, key=16, value=32, kernel=4)
    ages = blocks_of([3, 40, 1], torch.device("cpu")).ages
    parts = [2 * 16 + 2 * 32, 2 * 32, 1]

    def by_kernels(
        rows: torch.Tensor, weight: torch.Tensor, read: torch.Tensor, norm: torch.Tensor
    ) -> list[torch.Tensor]:
        values, gate, _ = torch.split(rows, parts, dim=-1)
        return [*convolved(values, weight, widths, ages, 1e-6), gated_norm(read, gate, norm, 1e-6)]

    def plainly(rows: torch.Tensor, weight: torch.Tensor, read: torch.Tensor, norm: torch.Tensor) -> list[torch.Tensor]:
        values, gate, _ = torch.split(rows, parts, dim=-1)
        summed = F.silu(short_convolution(values.flatten(1), weight.flatten(0, 1), ages))
        query, key, value = torch.split(torch.unflatten(summed, -1, (2, -1)), [16, 16, 64], dim=-1)
        query, key = (each * torch.rsqrt(each.square().sum(dim=-1, keepdim=True) + 1e-6) for each in (query, key))
        value, gate = (torch.unflatten(each, -1, (2, 32)).flatten(1, 2) for each in (value, gate))
        return [query, key, value, F.rms_norm(read, (32,), norm, 1e-6) * F.silu(gate)]

    inputs = [torch.randn(44, 2, sum(parts)), torch.randn(2, parts[0], 4), torch.randn(44, 4, 32), torch.rand(32) + 0.5]
    return furthest((by_kernels, plainly), inputs)


def places() -> float:
    order = torch.tensor([0, 2, 4, 1, 3, 5], dtype=torch.int32)
    bounds = torch.tensor([0, 3, 3, 5, 6], dtype=torch.int32)
    values = torch.randn(6, 3, 200)
    expected = torch.stack([values[order[first:end]].sum(dim=0) for first, end in ((0, 3), (3, 3), (3, 5), (5, 6))])
    return distance(sum_places(values.transpose(1, 2).contiguous().transpose(1, 2), order, bounds), expected)


def digests_in_one_launch() -> float:
    fp8 = torch.float8_e4m3fn
    mixed = (fp8, torch.float32, torch.bfloat16, fp8)
    for dtypes in ((torch.bfloat16,) * 4, (torch.float32,) * 4, (fp8,) * 4, mixed):
        a, b, c, d = (torch.randn(10, 640).to(dtype) for dtype in dtypes)
        boxes = [
            ("x", a, Slice(name="a", offsets=(3, 16), shape=(10, 640))),
            ("y", b[:, 64:128], Slice(name="b", offsets=(0, 2), shape=(10, 64))),
            ("x", c[5], Slice(name="c", offsets=(8,), shape=(640,))),
            ("y", d[:3, 2:38], Slice(name="d", offsets=(2, 10), shape=(3, 36))),
        ]
        if fp8 not in dtypes:  # bytes are never cut between two that count as one
            boxes.append(("y", d[:3, 1:38], Slice(name="d", offsets=(2, 49), shape=(3, 37))))
        parts = [
            Summand(key=key, dtype=part.dtype, box=box, canonical_shape=(4000, 4000)[: part.dim()])
            for key, part, box in boxes
        ]
        sums = DigestSums(parts)
        copies = [torch.zeros(part.shape, dtype=part.dtype) for _, part, _ in boxes]
        kernel = sums._prepared([part for _, part, _ in boxes])

        def bits_of(tensors: Sequence[torch.Tensor], parts: Sequence[Summand[str]] = parts) -> list[torch.Tensor]:
            return [bits_of_matrix(each, part.canonical_shape) for each, part in zip(tensors, parts, strict=True)]

        found = kernel.compute(bits_of([part for _, part, _ in boxes]), bits_of(copies))
        if not all(torch.equal(copy.float(), part.float()) for copy, (_, part, _) in zip(copies, boxes, strict=True)):
            return 1.0
        again = kernel.compute(bits_of([part for _, part, _ in boxes]))
        if not torch.equal(found, again):
            return 1.0
        if {key: int(value) % MODULUS for key, value in zip("xy", found, strict=True)} != sums.compute(
            [part for _, part, _ in boxes]
        ):
            return 1.0
    return 0.0


def fp8_blocks() -> float:
    """Compare elements before they are rounded, which the interpreter does wrongly, and scales."""
    wholes = [(matrix_of(rows, columns), 1) for rows, columns in ((256, 384), (130, 140))]
    # Whose blocks of rows lie apart, as those of a key and its queries do; one begins at an odd address.
    apart = matrix_of(512, 160)
    expected, found, parts = [], [], []
    for matrix, step in (*wholes, (apart[:256], 2), (apart[256:, 1:129], 2), (matrix_of(128, 128).float(), 1)):
        height = 128 if step == 2 else len(matrix)
        places = [slice(start, start + height) for start in range(0, len(matrix), step * height)]
        whole = torch.cat([matrix[place] for place in places])
        shapes = whole.shape, tuple(-(-size // 128) for size in whole.shape)
        elements, scales = torch.zeros(shapes[0], dtype=torch.float8_e4m3fn), torch.zeros(shapes[1])
        quantise(whole, elements, scales)
        expected.append((elements, scales))
        found.append((torch.zeros(shapes[0]), torch.zeros(shapes[1])))
        for number, place in enumerate(places):
            into, scale = found[-1][0][number * height :][:height], found[-1][1][number * height // 128 :]
            parts.append(BlockPart(matrix[place], into, scale))
    quantiser = BlockQuantiser(parts, block=128, largest=LARGEST)
    quantiser.run()
    return max(
        max(distance(ours.to(torch.float8_e4m3fn).float(), elements.float()), distance(our_scales, scales))
        for (ours, our_scales), (elements, scales) in zip(found, expected, strict=True)
    )


def matrix_of(rows: int, columns: int) -> torch.Tensor:
    """Return numbers of many sizes, the first block without any, in a wider matrix."""
    matrix = (torch.randn(rows, columns + 8) * torch.logspace(-6, 2, rows)[:, None]).bfloat16()[:, :columns]
    matrix[:128, :128] = 0
    return matrix


CHECKS = (
    activation,
    rotation,
    scores,
    places,
    delta_rules,
    a_wrong_delta_rule,
    convolutions_and_gated_norms,
    digests_in_one_launch,
    fp8_blocks,
)

if __name__ == "__main__":
    torch.manual_seed(0)
    kernels._TILE_ROWS = 8  # the interpreter takes milliseconds for two rows of a tile
    print(json.dumps({check.__name__: check() for check in CHECKS}))  # noqa: T201
