"""Torch tensors in the terms of the slice algebra: dtypes by name, boxes as views, specs. No transport, no layouts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from megarl.errors import WeightSyncError, first_few
from megarl.weights.algebra.plan import Move, SourceBox
from megarl.weights.algebra.slices import Holding, Index, TensorSpec

_DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
}


def torch_dtype(name: str) -> torch.dtype:
    return _DTYPES[name]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def box_of(tensor: torch.Tensor, offsets: Index, shape: Index) -> torch.Tensor:
    """Return a view of a box, detached from autograd. Dimensions that it lacks come first in `offsets`, as indices."""
    if tensor.shape == shape:
        return tensor.detach()
    indices, starts = offsets[: -len(shape)], offsets[-len(shape) :]
    view = tensor.detach()[indices]
    for axis, (start, size) in enumerate(zip(starts, shape, strict=True)):
        view = view.narrow(axis, start, size)
    return view


def source_view(tensors: Mapping[str, torch.Tensor], move: Move | SourceBox) -> torch.Tensor:
    return box_of(tensors[move.source_name], move.source_offsets, move.slice.shape)


def target_view(tensors: Mapping[str, torch.Tensor], move: Move) -> torch.Tensor:
    return box_of(tensors[move.target_name], move.target_offsets, move.slice.shape)


def device_of(tensors: Mapping[str, torch.Tensor]) -> torch.device:
    return next((tensor.device for tensor in tensors.values()), torch.device("cpu"))


def specs_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, TensorSpec]:
    return {
        name: TensorSpec(shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors
    }


def check_holding(
    holding: Holding, actual: Mapping[str, TensorSpec], *, holder: str, unplanned: tuple[str, ...] = ()
) -> None:
    """Raise a WeightSyncError that names the first tensors of `holder` that differ from its layout.

    Tensors whose names begin with one of `unplanned` are the holder's own.
    """
    planned = {name: spec for name, spec in actual.items() if not name.startswith(unplanned)}
    differences = list(_differences(holding.tensors, planned))
    if differences:
        raise WeightSyncError(f"{holder} does not match its layout: {first_few(differences)}")


def _differences(expected: Mapping[str, TensorSpec], actual: Mapping[str, TensorSpec]) -> Iterator[str]:
    for name, spec in expected.items():
        if name not in actual:
            yield f"{name} is missing"
        elif actual[name].shape != spec.shape:
            yield f"{name} has shape {list(actual[name].shape)}, expected {list(spec.shape)}"
        elif actual[name].dtype != spec.dtype:
            yield f"{name} is {actual[name].dtype}, expected {spec.dtype}"
    for name in actual:
        if name not in expected:
            yield f"{name} is unexpected"
