"""The digest of a tensor's box as a number, for tests."""

from __future__ import annotations

import torch

from megarl.weights.algebra.slices import Index, Slice
from megarl.weights.executors.digest import to_ints
from megarl.weights.executors.tensor_digest import digest_tensor


def digest(values: torch.Tensor, box: Slice, canonical_shape: Index) -> int:
    return to_ints({"": digest_tensor(values, box, canonical_shape)})[""]
