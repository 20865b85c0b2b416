"""The tensors of a folder where they are not canonical ones: stacks of experts, FP8 blocks, MXFP4. Pure.

A canonical tensor `block.experts.{number}.leaf` is one of a stack `block.experts.leaf`, whose matrices are transposed
in files (gpt-oss). With `leaf_blocks` and `leaf_scales` in its place the stack is in MXFP4, and not transposed. The
matrices `gate_proj.weight`, `up_proj.weight` and `down_proj.weight` of `block.experts.{number}` may be in the stacks
`block.experts.gate_up_proj` and `down_proj` (Qwen3.5), which are not transposed either. A matrix in FP8 has its scales
beside it, one for each block of 128 x 128 (DeepSeek). None of these but the first is ever written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from megarl.weights.algebra.slices import HEADER_DTYPES, Index, TensorSpec

Header: TypeAlias = Mapping[str, tuple[str, Index]]
"""Dtypes, as safetensors names them, and shapes of the tensors of a folder, by name."""

FP8_SCALES, FP8_BLOCK = "_scale_inv", 128
MXFP4_BLOCKS, MXFP4_SCALES, MXFP4_GROUP = "_blocks", "_scales", 32
_FP8 = "F8_E4M3"
_OF_STACK = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)")
_OF_FUSED_STACK = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
# Qwen3.5's, which are below `model.language_model`, are not.
_TURNED_STACK = re.compile(r"model\.layers\..*\.experts\.[a-z]\w*")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor of a folder in the orientation of canonical ones; a stack has one dimension more, the first."""

    name: str
    spec: TensorSpec
    form: Literal["plain", "transposed", "fp8", "mxfp4"] = "plain"

    @property
    def held_as(self) -> str:
        """The name of the tensor in the files."""
        return self.name + MXFP4_BLOCKS if self.form == "mxfp4" else self.name


def stored_tensors(header: Header) -> dict[str, StoredTensor]:
    """Return the tensors of a folder that canonical ones can be read from."""
    found: dict[str, StoredTensor] = {}
    for name, (dtype, shape) in header.items():
        stack = name.removesuffix(MXFP4_BLOCKS)
        if dtype == "U8" and stack != name and stack + MXFP4_SCALES in header:
            *rows, groups, _ = shape
            spec = TensorSpec(shape=(*rows, groups * MXFP4_GROUP), dtype="bfloat16")
            found[stack] = StoredTensor(name=stack, spec=spec, form="mxfp4")
        elif dtype == _FP8 and name + FP8_SCALES in header:
            found[name] = StoredTensor(name=name, spec=TensorSpec(shape=shape, dtype="bfloat16"), form="fp8")
        elif dtype in HEADER_DTYPES:
            spec = TensorSpec(shape=file_shape(name, shape), dtype=HEADER_DTYPES[dtype])
            found[name] = StoredTensor(name=name, spec=spec, form="transposed" if is_turned(name, shape) else "plain")
    return found


def place_of(name: str) -> tuple[str, Index]:
    """Return the tensor of a folder that has a canonical one, and the offsets that come first there."""
    expert = _OF_STACK.fullmatch(name)
    return (name, ()) if expert is None else (f"{expert[1]}.{expert[3]}", (int(expert[2]),))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBox:
    """A canonical tensor as a box of a tensor of a folder."""

    tensor: StoredTensor
    offsets: Index
    """One number per dimension of the folder's tensor; dimensions that the box lacks come first, as indices."""
    shape: Index


def held_in(name: str, stored: Mapping[str, StoredTensor]) -> StoredBox | None:
    """Return where a folder has a canonical tensor; None where it does not."""
    holder, place = (name, ()) if name in stored else place_of(name)
    if holder in stored:
        shape = stored[holder].spec.shape[len(place) :]
        return StoredBox(tensor=stored[holder], offsets=(*place, *(0 for _ in shape)), shape=shape)
    fused = _OF_FUSED_STACK.fullmatch(name)
    holder = "" if fused is None else f"{fused[1]}.{'down' if fused[3] == 'down' else 'gate_up'}_proj"
    if fused is None or holder not in stored:
        return None
    _, rows, columns = stored[holder].spec.shape
    rows = rows if fused[3] == "down" else rows // 2
    start = rows if fused[3] == "up" else 0
    return StoredBox(tensor=stored[holder], offsets=(int(fused[2]), start, 0), shape=(rows, columns))


def file_shape(name: str, shape: Index) -> Index:
    """Return the shape in files of a tensor in the orientation of canonical ones, or the other way round."""
    return (*shape[:-2], shape[-1], shape[-2]) if is_turned(name, shape) else shape


def is_turned(name: str, shape: Index) -> bool:
    """Whether files have the matrices of a tensor transposed."""
    return len(shape) == 3 and _TURNED_STACK.fullmatch(name) is not None
