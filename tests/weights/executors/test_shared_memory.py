from __future__ import annotations

import json
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from megarl.errors import WeightSyncError
from megarl.weights.executors.shared_memory import export_tensors, open_tensors
from tests.processes import template

SHARED_MEMORY = Path("/dev/shm")
NUM_ELEMENTS = 1 << 18


def show_tensors(pipe: Connection) -> None:
    """Be a trainer: export views of one buffer, change them on request, and export them again."""
    buffer = torch.arange(NUM_ELEMENTS, dtype=torch.float32)
    tensors = {"a": buffer[64:128].view(8, 8).t(), "b": buffer[1000:5000]}
    pipe.send(export_tensors(tensors))
    pipe.recv()
    buffer.fill_(2.0)
    pipe.send(export_tensors(tensors))
    pipe.recv()


def segments() -> set[str]:
    """Return the segments of torch; those of other programs come and go."""
    return {path.name for path in SHARED_MEMORY.iterdir() if path.name.startswith("torch_")}


def test_an_engine_sees_a_trainers_tensors_as_they_change_and_nothing_is_left_when_it_is_killed() -> None:
    before = segments()
    context = template()
    here, there = context.Pipe()
    trainer = context.Process(target=show_tensors, args=(there,), daemon=True)
    trainer.start()
    try:
        memory = here.recv()
        tensors = open_tensors(memory)
        expected = torch.arange(NUM_ELEMENTS, dtype=torch.float32)
        assert torch.equal(tensors["a"], expected[64:128].view(8, 8).t())
        assert torch.equal(tensors["b"], expected[1000:5000])
        here.send(None)
        # The same memory: one that has it open need not open it again.
        assert here.recv() == memory
        assert torch.equal(tensors["b"], torch.full((4000,), 2.0))
        assert segments() == before

        assert trainer.pid is not None
        os.kill(trainer.pid, signal.SIGKILL)
        trainer.join()
        assert torch.equal(tensors["b"], torch.full((4000,), 2.0))
        assert segments() == before
        with pytest.raises(WeightSyncError, match="the trainer's memory cannot be opened in this process: "):
            open_tensors(memory)
    finally:
        trainer.kill()
        trainer.join()


def test_memory_of_a_gpu_is_opened_on_the_readers_own_and_waits_for_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event is opened on the GPU that it belongs to, which the reader may not see."""
    opened: list[list[object]] = []

    def new_shared(*fields: object) -> torch.UntypedStorage:
        opened.append(list(fields))
        return torch.arange(4, dtype=torch.float32).untyped_storage()

    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", new_shared)
    # As `_share_cuda_` describes it: device, memory, bytes, offset, counter, its offset, event, whether to wait for it.
    handle = [5, {"base64": "bQ=="}, 16, 0, {"base64": "Yw=="}, 0, {"base64": "ZQ=="}, True]
    view = {"storage": 0, "offset": 1, "shape": [3], "strides": [1], "dtype": "float32"}
    tensors = open_tensors(json.dumps({"kind": "cuda", "handles": [handle], "views": {"a": view}}).encode())
    assert tensors["a"].tolist() == [1, 2, 3]
    assert opened == [[0, b"m", 16, 0, b"c", 0, b"e", False]]
