"""The header of a safetensors file: name, dtype, shape and offset of each tensor. Bytes and JSON: no torch, no layouts.

8 bytes: length of the header | header: JSON, padded with spaces | tensors, one after the other, no gaps
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from megarl.errors import CheckpointError

TENSOR_SUFFIX = ".safetensors"

ITEM_BYTES: Mapping[str, int] = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
}
"""Bytes of one element, by the dtype's name in a header."""

_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000
_METADATA = "__metadata__"
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    name: str
    dtype: str
    """The header's name: F32, BF16, F16 ..."""
    shape: tuple[int, ...]
    start: int
    """Offset in the file."""

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHeader:
    num_bytes: int
    """Size of the length field and the header; the first tensor begins there."""
    entries: tuple[TensorEntry, ...]
    """All tensors in the order of the file."""

    @property
    def num_file_bytes(self) -> int:
        return self.num_bytes + sum(entry.num_bytes for entry in self.entries)


class _RawEntry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    dtype: str
    shape: list[int]
    data_offsets: list[int]


_RAW_ENTRIES: TypeAdapter[dict[str, _RawEntry]] = TypeAdapter(dict[str, _RawEntry])


def read_header(path: Path) -> TensorHeader:
    """Return the header; a file that is not a header followed by tensors without gaps raises a CheckpointError."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(_LENGTH.size)
            (length,) = _LENGTH.unpack(prefix) if len(prefix) == _LENGTH.size else (size,)
            if length > min(size - _LENGTH.size, _MAX_HEADER_BYTES):
                raise CheckpointError(f"{path}: not a safetensors file: it has no header")
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    header = _parse(path, text)
    if header.num_file_bytes != size:
        raise CheckpointError(f"{path}: {size} bytes, its header describes {header.num_file_bytes}; is it complete?")
    return header


def make_header(specs: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[TensorHeader, bytes]:
    """Return the header of a file with tensors of these dtypes and shapes, and its bytes.

    Tensors with wide elements come first, so that every tensor is aligned to its element size.
    """
    entries = []
    offset = 0
    for name in sorted(specs, key=lambda name: (-ITEM_BYTES[specs[name][0]], name)):
        dtype, shape = specs[name]
        entries.append(TensorEntry(name=name, dtype=dtype, shape=shape, start=offset))
        offset += entries[-1].num_bytes
    raw: dict[str, object] = {_METADATA: {"format": "pt"}}
    for entry in entries:
        offsets = [entry.start, entry.start + entry.num_bytes]
        raw[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
    text = json.dumps(raw, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    num_bytes = _LENGTH.size + len(text)
    placed = tuple(replace(entry, start=num_bytes + entry.start) for entry in entries)
    return TensorHeader(num_bytes=num_bytes, entries=placed), _LENGTH.pack(len(text)) + text


def _parse(path: Path, text: bytes) -> TensorHeader:
    try:
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise ValueError("not an object")
        fields.pop(_METADATA, None)
        raw = _RAW_ENTRIES.validate_python(fields)
    except (ValueError, ValidationError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a safetensors file: its header cannot be parsed") from error
    num_bytes = _LENGTH.size + len(text)
    entries = []
    offset = 0
    for name, entry in sorted(raw.items(), key=lambda item: item[1].data_offsets):
        if entry.dtype not in ITEM_BYTES:
            raise CheckpointError(f"{path}: tensor {name} has dtype {entry.dtype}; known are {', '.join(ITEM_BYTES)}")
        tensor = TensorEntry(name=name, dtype=entry.dtype, shape=tuple(entry.shape), start=num_bytes + offset)
        if entry.data_offsets != [offset, offset + tensor.num_bytes] or min(entry.shape, default=0) < 0:
            raise CheckpointError(f"{path}: the offsets of tensor {name} do not match its dtype and shape")
        offset += tensor.num_bytes
        entries.append(tensor)
    return TensorHeader(num_bytes=num_bytes, entries=tuple(entries))
