"""An adapter on a node: written as the trainer stored it, or not at all."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megarl.cluster import stored_adapter
from megarl.cluster.stored_adapter import (
    Content,
    ReadAdapters,
    StoredAdapter,
    make_room,
    place_adapter,
    remove_adapter,
    remove_left_adapters,
)
from megarl.errors import WeightSyncError
from megarl.ranks.adapters import store_adapter

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4, dtype=torch.bfloat16).view(4, 1)}


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setattr(stored_adapter, "_MEMORY", folder)
    return folder


@pytest.fixture
def stored() -> tuple[StoredAdapter, Content]:
    """Return an adapter and what the object store has of it."""
    puts: list[Content] = []
    adapter = store_adapter(TENSORS, {"peft_type": "LORA"}, version=3, put=puts.append)
    return adapter, puts[0].copy()


def test_what_is_placed_is_what_was_stored(stored: tuple[StoredAdapter, Content], scratch: Path) -> None:
    adapter, content = stored
    assert adapter.num_bytes == 6 * 4 + 4 * 2
    folder = place_adapter(adapter, content, engine=5)
    assert folder == scratch / f"megarl_adapter_{adapter.token}_5"
    assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert json.loads((folder / "adapter_config.json").read_text()) == {"peft_type": "LORA"}
    found = load_file(folder / "adapter_model.safetensors")
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    # Another node of the same machine has the same folder.
    assert place_adapter(adapter, content, engine=5) == folder
    assert list(scratch.iterdir()) == [folder]


def test_tensors_of_one_buffer_are_stored_without_a_copy() -> None:
    buffer = torch.arange(12.0)
    puts: list[Content] = []
    tensors = {"a": buffer[:4].view(2, 2), "b": buffer[4:10].view(3, 2)}
    store_adapter(tensors, {}, version=0, put=puts.append)
    # In the file they are in the order of their names.
    store_adapter({"b": tensors["a"], "a": tensors["b"]}, {}, version=0, put=puts.append)
    buffer[0] = 7
    assert puts[0].view(np.float32).tolist() == buffer[:10].tolist()
    assert puts[1].view(np.float32).tolist() == [*range(4, 10), 0, 1, 2, 3]


def test_the_next_adapter_is_written_to_the_pages_that_are_kept_for_it(
    stored: tuple[StoredAdapter, Content], scratch: Path
) -> None:
    first = place_adapter(*stored, engine=0)
    make_room(first)
    make_room(first)
    (room,) = set(scratch.iterdir()) - {first}
    pages = (room / "adapter_model.safetensors").stat().st_ino
    remove_left_adapters(after_s=0)
    second = place_adapter(*stored, engine=1)
    assert sorted(scratch.iterdir()) == sorted([first, second])
    assert (second / "adapter_model.safetensors").stat().st_ino == pages
    files = [(folder / "adapter_model.safetensors").read_bytes() for folder in (first, second)]
    assert files[0] == files[1]


@pytest.mark.parametrize(("name", "place"), [("a", 23), ("b", -1)])
def test_damaged_bytes_are_not_placed(
    name: str, place: int, stored: tuple[StoredAdapter, Content], scratch: Path
) -> None:
    adapter, content = stored
    content[place] ^= np.uint8(1)
    with pytest.raises(WeightSyncError, match=f"adapter of version 3 was damaged on its way to engine 0: {name}"):
        place_adapter(adapter, content, engine=0)
    assert list(scratch.iterdir()) == []


def test_a_full_disk_is_one_line_and_leaves_nothing(
    stored: tuple[StoredAdapter, Content], scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> int:
        del path, text
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(WeightSyncError, match=r"adapter of version 3 was not written: .*No space left"):
        place_adapter(*stored, engine=0)
    assert list(scratch.iterdir()) == []


async def test_a_folder_stays_while_ranks_may_read_it_and_few_stay_at_a_time(
    stored: tuple[StoredAdapter, Content], scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def left(*numbers: int) -> None:
        """Wait until these folders are there, with one for the next adapter."""
        async with asyncio.timeout(30):
            while {path.name[-2:] for path in scratch.iterdir() if (path / "adapter_config.json").exists()} != {
                f"_{number}" for number in numbers
            }:
                await asyncio.sleep(0.01)

    read = ReadAdapters()
    for engine in range(3):
        await read.add(place_adapter(*stored, engine=engine))
    await left(1, 2)
    await read.remove()
    assert list(scratch.iterdir()) == []
    monkeypatch.setattr(stored_adapter, "_READ_S", 0.01)
    await read.add(place_adapter(*stored, engine=3))
    await left()
    await read.remove()
    assert list(scratch.iterdir()) == []


def test_the_folder_of_a_killed_process_is_removed_and_that_of_a_living_one_stays(
    stored: tuple[StoredAdapter, Content], scratch: Path
) -> None:
    folder = place_adapter(*stored, engine=0)
    child = os.fork()
    if child == 0:
        stored_adapter._locks.clear()
        place_adapter(*stored, engine=1)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert len(list(scratch.iterdir())) == 2
    remove_left_adapters(after_s=60)
    assert len(list(scratch.iterdir())) == 2
    remove_left_adapters(after_s=0)
    assert list(scratch.iterdir()) == [folder]
    remove_adapter(folder)
    assert list(scratch.iterdir()) == []
