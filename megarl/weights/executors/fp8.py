"""FP8 tensors that a trainer rank derives from its weights before it sends them, and their arithmetic. No layouts.

A block's scale is its largest magnitude divided by the largest number of FP8 (448), and 1 for a block of zeros; an
element is its value divided by the scale, rounded to the nearest FP8 number. The relative error of an element is at
most 1/16, or its absolute error 2^-10 of the scale where the result is below the normal numbers of FP8.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from megarl.config.kernels import FP8_BLOCK
from megarl.errors import WeightSyncError
from megarl.weights.algebra.plan import Plan
from megarl.weights.algebra.slices import Holding, Piece, Slice
from megarl.weights.executors.derived import DerivedMemory
from megarl.weights.executors.tensors import box_of, device_of
from megarl.weights.layouts.fp8 import SCALES

LARGEST = torch.finfo(torch.float8_e4m3fn).max
_PROBE_ROWS = 16
_PROBE_TOLERANCE = 0.1
"""Relative error of a product: inputs in FP8 make about 0.03 of it."""


@torch.no_grad()
def quantise(matrix: Tensor, elements: Tensor, scales: Tensor) -> None:
    """Write the FP8 elements of a matrix [rows, columns] and the scale of each of its blocks, in place."""
    if matrix.is_cuda:
        from megarl.weights.executors.kernels import quantise_blocks  # noqa: PLC0415 - triton is only on GPU machines

        quantise_blocks(matrix, elements, scales, block=FP8_BLOCK, largest=LARGEST)
        return
    rows, columns = matrix.shape
    padding = (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK)
    padded = torch.nn.functional.pad(matrix.float(), padding)
    blocks = padded.view(padded.shape[0] // FP8_BLOCK, FP8_BLOCK, padded.shape[1] // FP8_BLOCK, FP8_BLOCK)
    largest = blocks.abs().amax(dim=(1, 3))
    scales.copy_(torch.where(largest > 0, largest / LARGEST, torch.ones_like(largest)))
    divided = (blocks / scales[:, None, :, None]).view_as(padded)[:rows, :columns]
    elements.copy_(divided.clamp(-LARGEST, LARGEST))


def restored(elements: Tensor, scales: Tensor) -> Tensor:
    """Return the matrix that an engine computes with, in float32."""
    rows, columns = elements.shape
    spread = scales.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
    return elements.float() * spread[:rows, :columns]


@torch.no_grad()
def probe_products(model: torch.nn.Module) -> None:
    """Compare the products of an engine's first FP8 layers with those of its restored weights, on random inputs.

    Digests show that the bytes arrived, this that the engine's kernels read them as they are meant.
    """
    probed: set[str] = set()
    for name, module in model.named_modules():
        kind, scales = name.rpartition(".")[2], getattr(module, "weight_scale_inv", None)
        if not isinstance(scales, Tensor) or kind in probed:
            continue
        probed.add(kind)
        generator = torch.Generator(device=scales.device).manual_seed(len(probed))
        inputs = torch.randn(_PROBE_ROWS, module.weight.shape[1], generator=generator, device=scales.device).bfloat16()
        found = module.quant_method.apply(module, inputs, None).float()
        expected = inputs.float() @ restored(module.weight, scales).T
        error = float((found - expected).norm() / expected.norm().clamp(min=1e-30))
        if not error < _PROBE_TOLERANCE:
            raise WeightSyncError(f"{name}: products in FP8 are {error:.3g} off those of its weights")


class Fp8Tensors:
    """The FP8 tensors that one trainer rank sends, in memory that it has from `fill` to `free`."""

    def __init__(self, plan: Plan, rank: int, holding: Holding, parameters: Mapping[str, Tensor]) -> None:
        """`plan` sends FP8 tensors; `holding` places the weights of this rank in its `parameters`."""
        derived = plan.source.by_rank[rank].tensors
        sent = {box.source_name.removesuffix(SCALES) for box in plan.boxes_from(rank)}
        self._boxes = [
            piece.slice for piece in plan.source.by_rank[rank].pieces if piece.local_name in sent - parameters.keys()
        ]
        self._parts: defaultdict[str, list[Piece]] = defaultdict(list)
        for piece in holding.pieces:
            self._parts[piece.slice.name].append(piece)
        self._parameters = parameters
        specs = {name: derived[name] for box in self._boxes for name in (box.name, box.name + SCALES)}
        self._memory = DerivedMemory(specs, device_of(parameters))
        self._derived = self._memory.tensors

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {**self._parameters, **self._derived}

    @torch.no_grad()
    def fill(self) -> None:
        self._memory.take()
        for box in self._boxes:
            quantise(self._matrix(box), self._derived[box.name], self._derived[box.name + SCALES])

    def free(self) -> None:
        self._memory.free()

    def _matrix(self, box: Slice) -> Tensor:
        """Return what this rank holds of a matrix; a copy where it lies in several places."""
        views = [
            (part.slice, box_of(self._parameters[part.local_name], part.local_offsets, part.slice.shape))
            for part in self._parts[box.name]
        ]
        if len(views) == 1:
            return views[0][1]
        matrix = torch.empty(box.shape, dtype=views[0][1].dtype, device=views[0][1].device)
        for part, values in views:
            row, column = (first - start for first, start in zip(part.offsets, box.offsets, strict=True))
            matrix[row : row + part.shape[0], column : column + part.shape[1]] = values
        return matrix
