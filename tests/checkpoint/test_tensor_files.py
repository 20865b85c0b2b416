from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarl.checkpoint.manifest import digest_file
from megarl.checkpoint.tensor_files import write_tensor_file


def test_the_library_reads_what_was_written_and_the_digests_are_those_of_the_file(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(12.0).reshape(3, 4), "b": torch.tensor([1, 2], dtype=torch.uint8), "c": torch.zeros(0)}
    specs = {"a": ("F32", (3, 4)), "b": ("U8", (2,)), "c": ("F32", (0,))}
    path = tmp_path / "model.safetensors"
    # In pieces, one of them empty.
    written = write_tensor_file(
        path, specs, lambda entry: [(whole := tensors[entry.name].numpy().tobytes())[:5], b"", whole[5:]]
    )
    assert written == digest_file(path)
    found = load_file(path)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_a_file_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("something else")
    with pytest.raises(FileExistsError):
        write_tensor_file(path, {}, lambda entry: [])


def test_a_write_that_takes_less_than_it_is_given_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: write(descriptor, data[:7], offset))
    path = tmp_path / "model.safetensors"
    written = write_tensor_file(path, {"a": ("U8", (100,))}, lambda entry: [bytes(range(100))])
    assert written == digest_file(path)
