"""An adapter on a node: written as the trainer stored it, or not at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from megarl.checkpoint.manifest import digest_file
from megarl.errors import WeightSyncError
from megarl.runtime import stored_adapter
from megarl.runtime.stored_adapter import StoredAdapter, place_adapter


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setattr(stored_adapter, "_MEMORY", folder)
    return folder


def stored(content: bytes, folder: Path) -> StoredAdapter:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(content)
    return StoredAdapter(
        token="abc",
        version=3,
        content=None,  # type: ignore[arg-type]  # the node has fetched it already
        config='{"peft_type": "LORA"}',
        digest=digest_file(path),
        tensors={},
    )


def test_what_is_placed_is_what_was_stored(tmp_path: Path, scratch: Path) -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3)}
    content = save(tensors)
    folder = place_adapter(stored(content, tmp_path), content, engine=5)
    assert folder == scratch / "megarl_adapter_abc_5"
    assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert torch.equal(load_file(folder / "adapter_model.safetensors")["a"], tensors["a"])


@pytest.mark.parametrize("place", [-1, 3], ids=["a value", "the header"])
def test_damaged_bytes_are_not_placed(place: int, tmp_path: Path, scratch: Path) -> None:
    content = bytearray(save({"a": torch.arange(6.0)}))
    adapter = stored(bytes(content), tmp_path)
    content[place] ^= 1
    with pytest.raises(WeightSyncError, match="adapter of version 3 was damaged on its way to engine 0"):
        place_adapter(adapter, bytes(content), engine=0)
    assert list(scratch.iterdir()) == []


def test_a_full_disk_is_one_line_and_leaves_nothing(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = save({"a": torch.arange(6.0)})
    adapter = replace(stored(content, tmp_path), token="def")

    def full(path: Path, data: bytes) -> int:
        del path, data
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(WeightSyncError, match=r"adapter of version 3 was not written: .*No space left"):
        place_adapter(adapter, content, engine=0)
    assert list(scratch.iterdir()) == []
