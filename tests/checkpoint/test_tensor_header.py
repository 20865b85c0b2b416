from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megarl.checkpoint.manifest import make_header, read_header
from megarl.errors import CheckpointError


def test_a_file_of_the_library_is_read(tmp_path: Path) -> None:
    tensors = {
        "wide": torch.arange(6.0).reshape(2, 3),
        "half": torch.ones(5, dtype=torch.bfloat16),
        "scalar": torch.tensor(3),
        "none": torch.zeros(0, 4),
    }
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    whole = path.read_bytes()
    header = read_header(path)
    assert {entry.name: (entry.dtype, entry.shape) for entry in header.entries} == {
        "wide": ("F32", (2, 3)),
        "half": ("BF16", (5,)),
        "scalar": ("I64", ()),
        "none": ("F32", (0, 4)),
    }
    for entry in header.entries:
        found = whole[entry.start : entry.start + entry.num_bytes]
        assert found == tensors[entry.name].reshape(-1).view(torch.uint8).numpy().tobytes()


def test_every_tensor_is_aligned_to_its_items() -> None:
    header, text = make_header({"a": ("U8", (3,)), "b": ("BF16", (5,)), "c": ("F32", (1,)), "long name": ("I64", ())})
    assert len(text) == header.num_bytes
    sizes = {"U8": 1, "BF16": 2, "F32": 4, "I64": 8}
    assert [entry.start % sizes[entry.dtype] for entry in header.entries] == [0, 0, 0, 0]


def raw(fields: object, *, data: bytes = b"") -> bytes:
    text = json.dumps(fields).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "no header"),
        (b"\x80\x04pickled bytes", "no header"),
        (raw([]), "its header cannot be parsed"),
        (raw({"a": {"dtype": "F32", "shape": [1]}}), "its header cannot be parsed"),
        (struct.pack("<Q", 100_000) + b"[" * 100_000, "its header cannot be parsed"),
        (raw({"a": {"dtype": "F4", "shape": [1], "data_offsets": [0, 4]}}, data=b"1234"), "dtype F4"),
        (raw({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, data=bytes(8)), "do not match its dtype"),
        (raw({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, data=bytes(4)), "do not match its dtype"),
        (raw({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, data=bytes(3)), "is it complete"),
        (raw({}, data=b"more"), "is it complete"),
    ],
)
def test_what_is_not_tensors_to_its_end_is_refused(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=complaint):
        read_header(path)
