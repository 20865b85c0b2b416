"""The memory of a draft beside the model of an engine: its weights, and its keys and values of each token."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from megarl.config.draft import DraftConfig, NgramDraftConfig
from megarl.config.model import read_eagle_head, read_model_shape
from megarl.config.section import Device, dtype_on
from megarl.families import family_of, uniform_shapes
from megarl.weights.algebra.slices import ITEM_BYTES
from megarl.weights.layouts.canonical import num_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftMemory:
    """On one TP rank."""

    weight_bytes: int
    cache_bytes_per_token: int
    num_layers: int
    """SGLang divides memory as if they cached as much as layers of the policy."""


def draft_memory(draft: DraftConfig | None, *, tensor: int, device: Device) -> DraftMemory | None:
    """Return the memory of a draft with weights; None without one."""
    if draft is None or isinstance(draft, NgramDraftConfig):
        return None
    return _read(draft.path, draft.kind, tensor, ITEM_BYTES[dtype_on(device)])


@cache
def _read(folder: Path, kind: str, tensor: int, item_bytes: int) -> DraftMemory:
    if kind == "eagle":
        head = read_eagle_head(folder)
        num_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        return DraftMemory(
            weight_bytes=num_bytes // tensor,
            cache_bytes_per_token=head.num_layers * head.cached_width * item_bytes // tensor,
            num_layers=head.num_layers,
        )
    shape = read_model_shape(folder)
    cached = sum(layers * family_of(each).attention(each).cached_on(tensor) for each, layers in uniform_shapes(shape))
    return DraftMemory(
        weight_bytes=num_parameters(shape) * item_bytes // tensor,
        cache_bytes_per_token=cached * item_bytes,
        num_layers=shape.num_layers,
    )
