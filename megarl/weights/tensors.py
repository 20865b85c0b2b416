"""Torch tensors as the slice algebra sees them: dtypes by name, boxes as views, specs. No transport, no layouts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from megarl.weights.slices import Index, TensorSpec

_DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_HEADER_DTYPES: Mapping[torch.dtype, str] = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def torch_dtype(name: str) -> torch.dtype:
    return _DTYPES[name]


def header_dtype(dtype: torch.dtype) -> str:
    """As the header of a safetensors file spells it."""
    return _HEADER_DTYPES[dtype]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def box_of(tensor: torch.Tensor, offsets: Index, shape: Index) -> torch.Tensor:
    """A view of the box, detached from autograd."""
    view = tensor.detach()
    for axis, (start, size) in enumerate(zip(offsets, shape, strict=True)):
        view = view.narrow(axis, start, size)
    return view


def specs_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, TensorSpec]:
    """What `named_parameters()` really has, to compare with a layout."""
    return {
        name: TensorSpec(shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors
    }
