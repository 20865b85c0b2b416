"""The gated delta rule by the Triton kernels of flash-linear-attention (`fla-core`), where that package is installed.

Products are of numbers rounded to the dtype of the model, as in engines, which compute prompts with the same kernels.
Used on GPUs only.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_HOPPER = 9
_WRONG_FROM, _RIGHT_FROM = (3, 4), (3, 7, 1)
"""Releases of Triton whose gradients of these kernels are wrong on Hopper; the package refuses them in the first update
(https://github.com/fla-org/flash-linear-attention/issues/640)."""


@cache
def is_usable() -> bool:
    """Whether the package is installed and right on this GPU; where it is not right, the log says so once."""
    if find_spec("fla") is None or not torch.cuda.is_available():
        return False
    import triton  # noqa: PLC0415 - on GPU machines only

    capability, version = torch.cuda.get_device_capability()[0], triton.__version__
    if is_right(capability, version):
        return True
    logger.warning("delta nets in plain torch: fla-core needs Triton 3.7.1 on this GPU, not %s", version)
    return False


def is_right(capability: int, triton_version: str) -> bool:
    """Whether gradients are right on GPUs of this generation."""
    release = tuple(int(part) for part in triton_version.split("+")[0].split(".")[:3] if part.isdigit())
    return capability != _HOPPER or not _WRONG_FROM <= release < _RIGHT_FROM


def delta_rule_by_kernels(
    query: Tensor,  # [N, key heads, key], of unit length
    key: Tensor,  # [N, key heads, key]
    value: Tensor,  # [N, heads, value]
    decay: Tensor,  # [N, heads], logarithms in float32
    strength: Tensor,  # [N, heads], float32
    starts: Tensor,  # [sequences + 1], int64
) -> Tensor:
    """Return what the queries, divided by the root of their width, read. [N, heads, value]"""
    from fla.ops.gated_delta_rule import (  # type: ignore[import-not-found]  # noqa: PLC0415 - on GPU machines only
        chunk_gated_delta_rule,
    )

    output, _ = chunk_gated_delta_rule(
        query[None],
        key[None],
        value[None],
        decay[None],
        strength[None],
        scale=query.shape[-1] ** -0.5,
        cu_seqlens=starts,
    )
    return output[0]  # type: ignore[no-any-return]
