"""The gated delta rule by the Triton kernels of flash-linear-attention (`fla-core`), where that package is installed.

Products are of numbers rounded to the dtype of the model, as in engines, which compute prompts with the same kernels.
Used on GPUs only.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from torch import Tensor


@cache
def is_installed() -> bool:
    return find_spec("fla") is not None


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
