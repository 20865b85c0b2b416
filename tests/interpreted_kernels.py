"""Triton's kernels on a CPU, by its interpreter, against torch: without Megatron, which takes long to import.

A script of its own: Triton reads TRITON_INTERPRET when a kernel is defined. Prints the largest differences as JSON.
"""

from __future__ import annotations

import json

import torch
import torch.nn.functional as F

from megarl.train.kernels import gate, grad_gate, grad_rows, rotate, sum_places, sum_rows
from megarl.train.logprob import RowGradients, _grad_logits, _summed
from megarl.weights.algebra.slices import Slice
from megarl.weights.executors import kernels
from megarl.weights.executors.digest import MODULUS, DigestSums, Summand, bits_of_matrix
from megarl.weights.executors.fp8 import LARGEST, quantise
from megarl.weights.executors.kernels import quantise_blocks


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
    angles = torch.rand(7, 32) * 6
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
            ("y", b[:, 64:128], Slice(name="b", offsets=(0, 1), shape=(10, 64))),
            ("x", c[5], Slice(name="c", offsets=(7,), shape=(640,))),
            ("y", d[:3, 1:38], Slice(name="d", offsets=(2, 9), shape=(3, 37))),
        ]
        parts = [
            Summand(key=key, dtype=part.dtype, box=box, canonical_shape=(4000, 4000)[: part.dim()])
            for key, part, box in boxes
        ]
        sums = DigestSums(parts)
        copies = [torch.zeros(part.shape, dtype=part.dtype) for _, part, _ in boxes]
        kernel = sums._prepared(torch.device("cpu"))
        found = kernel.compute(
            [bits_of_matrix(part) for _, part, _ in boxes], [bits_of_matrix(copy) for copy in copies]
        )
        if not all(torch.equal(copy.float(), part.float()) for copy, (_, part, _) in zip(copies, boxes, strict=True)):
            return 1.0
        again = kernel.compute([bits_of_matrix(part) for _, part, _ in boxes])
        if not torch.equal(found, again):
            return 1.0
        if {key: int(value) % MODULUS for key, value in zip("xy", found, strict=True)} != sums.compute(
            [part for _, part, _ in boxes]
        ):
            return 1.0
    return 0.0


def fp8_blocks() -> float:
    """Compare elements before they are rounded, which the interpreter does wrongly, and scales."""
    worst = 0.0
    for rows, columns in ((256, 384), (130, 140)):
        matrix = (torch.randn(rows, columns + 8) * torch.logspace(-6, 2, rows)[:, None]).bfloat16()[:, :columns]
        matrix[:128, :128] = 0
        expected, found = (torch.zeros(rows, columns, dtype=dtype) for dtype in (torch.float8_e4m3fn, torch.float32))
        scales, found_scales = (torch.zeros(-(-rows // 128), -(-columns // 128)) for _ in range(2))
        quantise(matrix, expected, scales)
        quantise_blocks(matrix, found, found_scales, block=128, largest=LARGEST)
        rounded = found.to(torch.float8_e4m3fn).float()
        worst = max(worst, distance(rounded, expected.float()), distance(found_scales, scales))
    return worst


CHECKS = (activation, rotation, scores, places, digests_in_one_launch, fp8_blocks)

if __name__ == "__main__":
    torch.manual_seed(0)
    kernels._TILE_ROWS = 8  # the interpreter takes milliseconds for two rows of a tile
    print(json.dumps({check.__name__: check() for check in CHECKS}))  # noqa: T201
