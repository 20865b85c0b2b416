"""Torch tensors as the slice algebra sees them: dtypes by name, boxes as views, specs. No transport, no layouts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from megarl.weights.algebra.slices import Index, TensorSpec

_DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
HEADER_DTYPES: Mapping[str, str] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""By the names they have in the header of a safetensors file."""


def torch_dtype(name: str) -> torch.dtype:
    return _DTYPES[name]


def header_dtype(name: str) -> str:
    """As the header of a safetensors file spells it."""
    return next(header for header, known in HEADER_DTYPES.items() if known == name)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def box_of(tensor: torch.Tensor, offsets: Index, shape: Index) -> torch.Tensor:
    """A view of the box, detached from autograd. Dimensions that it lacks come first in `offsets`, as indices."""
    indices, starts = offsets[: -len(shape)], offsets[-len(shape) :]
    view = tensor.detach()[indices]
    for axis, (start, size) in enumerate(zip(starts, shape, strict=True)):
        view = view.narrow(axis, start, size)
    return view


def specs_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, TensorSpec]:
    """What `named_parameters()` really has, to compare with a layout."""
    return {
        name: TensorSpec(shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors
    }
