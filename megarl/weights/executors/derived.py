"""Tensors that a trainer rank makes of its weights before it sends them: merged with an adapter, or in FP8."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from megarl.weights.algebra.slices import TensorSpec
from megarl.weights.executors.tensors import torch_dtype

_ALIGNMENT = 256


class DerivedTensors(Protocol):
    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """All tensors that a sender reads, filled or not."""

    def fill(self) -> None:
        """Derive the tensors from the weights as they are now."""

    def free(self) -> None:
        """Give the GPU's memory up; every view of it is valid again after the next `fill`."""


class DerivedMemory:
    """One piece of memory for tensors, which a GPU can get back: their views stay."""

    def __init__(self, specs: Mapping[str, TensorSpec], device: torch.device) -> None:
        starts = [0, *accumulate(-(-spec.num_bytes // _ALIGNMENT) * _ALIGNMENT for spec in specs.values())]
        self._memory = torch.empty(starts[-1], dtype=torch.uint8, device=device)
        self._num_bytes = starts[-1]
        self.tensors = {
            name: self._memory[start : start + spec.num_bytes].view(torch_dtype(spec.dtype)).view(spec.shape)
            for (name, spec), start in zip(specs.items(), starts, strict=False)
        }

    @property
    def is_on_gpu(self) -> bool:
        return self._memory.is_cuda

    def take(self) -> None:
        storage = self._memory.untyped_storage()
        if not storage.nbytes():
            storage.resize_(self._num_bytes)

    def free(self) -> None:
        if self.is_on_gpu:
            self._memory.untyped_storage().resize_(0)
