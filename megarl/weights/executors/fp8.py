"""FP8 tensors that a trainer rank derives from its weights before it sends them, and their arithmetic. No layouts.

A block's scale is its largest magnitude divided by the largest number of FP8 (448), and 1 for a block of zeros; an
element is its value divided by the scale, rounded to the nearest FP8 number. The relative error of an element is at
most 1/16, or its absolute error 2^-10 of the scale where the result is below the normal numbers of FP8.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megarl.config.kernels import FP8_BLOCK
from megarl.errors import WeightSyncError
from megarl.weights.algebra.plan import Plan
from megarl.weights.algebra.slices import Holding, Piece, Slice
from megarl.weights.executors.derived import DerivedMemory
from megarl.weights.executors.tensors import box_of, device_of
from megarl.weights.layouts.fp8 import SCALES

if TYPE_CHECKING:
    from megarl.weights.executors.kernels import BlockQuantiser

LARGEST = torch.finfo(torch.float8_e4m3fn).max
_PROBE_ROWS = 16
_PROBE_TOLERANCE = 0.1
"""Relative error of a product: inputs in FP8 make about 0.03 of it."""


@torch.no_grad()
def quantise(matrix: Tensor, elements: Tensor, scales: Tensor) -> None:
    """Write the FP8 elements of a matrix [rows, columns] and the scale of each of its blocks, in place."""
    if matrix.is_cuda:
        _quantiser([(matrix, elements, scales)]).run()
        return
    rows, columns = matrix.shape
    padding = (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK)
    padded = torch.nn.functional.pad(matrix.float(), padding)
    blocks = padded.view(padded.shape[0] // FP8_BLOCK, FP8_BLOCK, padded.shape[1] // FP8_BLOCK, FP8_BLOCK)
    largest = blocks.abs().amax(dim=(1, 3))
    scales.copy_(torch.where(largest > 0, largest / LARGEST, torch.ones_like(largest)))
    divided = (blocks / scales[:, None, :, None]).view_as(padded)[:rows, :columns]
    elements.copy_(divided.clamp(-LARGEST, LARGEST))


def _quantiser(parts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> BlockQuantiser:
    from megarl.weights.executors.kernels import BlockPart, BlockQuantiser  # noqa: PLC0415 - triton is on GPUs only

    return BlockQuantiser([BlockPart(*part) for part in parts], block=FP8_BLOCK, largest=LARGEST)


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
        parts = {box: self._parts_in_place(box) for box in self._boxes}
        self._in_place = [part for of_box in parts.values() for part in of_box]
        self._cut = [box for box, of_box in parts.items() if not of_box]
        self._quantiser: BlockQuantiser | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {**self._parameters, **self._derived}

    @torch.no_grad()
    def fill(self) -> None:
        """Derive the tensors: on a GPU in one launch, but for matrices that cannot be read where they lie."""
        self._memory.take()
        if self._memory.is_on_gpu:
            self._quantiser = self._quantiser or _quantiser(self._in_place)
            self._quantiser.run()
        else:
            for part in self._in_place:
                quantise(*part)
        for box in self._cut:
            quantise(self._matrix(box), self._derived[box.name], self._derived[box.name + SCALES])

    def free(self) -> None:
        self._memory.free()

    def _parts_in_place(self, box: Slice) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return the parts of a matrix with their places in the results; none if one of them cuts through a block."""
        elements, scales = self._derived[box.name], self._derived[box.name + SCALES]
        found = []
        for part, values in self._views(box):
            (row, num_rows), (column, num_columns) = zip(_relative(part, box), part.shape, strict=True)
            ends = (row + num_rows, box.shape[0]), (column + num_columns, box.shape[1])
            is_cut = any(end % FP8_BLOCK and end != last for end, last in ends)
            if row % FP8_BLOCK or column % FP8_BLOCK or is_cut or values.stride(1) != 1:
                return []
            of_blocks = _blocks(row, num_rows), _blocks(column, num_columns)
            of_elements = slice(row, row + num_rows), slice(column, column + num_columns)
            found.append((values, elements[of_elements], scales[of_blocks]))
        return found

    def _matrix(self, box: Slice) -> Tensor:
        """Return what this rank holds of a matrix; a copy where it lies in several places."""
        views = self._views(box)
        if len(views) == 1:
            return views[0][1]
        matrix = torch.empty(box.shape, dtype=views[0][1].dtype, device=views[0][1].device)
        for part, values in views:
            row, column = _relative(part, box)
            matrix[row : row + part.shape[0], column : column + part.shape[1]] = values
        return matrix

    def _views(self, box: Slice) -> list[tuple[Slice, Tensor]]:
        return [
            (part.slice, box_of(self._parameters[part.local_name], part.local_offsets, part.slice.shape))
            for part in self._parts[box.name]
        ]


def _blocks(first: int, size: int) -> slice:
    return slice(first // FP8_BLOCK, -(-(first + size) // FP8_BLOCK))


def _relative(part: Slice, box: Slice) -> list[int]:
    return [first - start for first, start in zip(part.offsets, box.offsets, strict=True)]
