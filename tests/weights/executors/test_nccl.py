"""How NCCL is called, with a library that only counts. What it does on a GPU is in tests/gpu/test_publish.py."""

from __future__ import annotations

import ctypes
from threading import Lock
from types import SimpleNamespace

import pytest
import torch

from megarl.errors import WeightSyncError
from megarl.weights.executors import nccl
from megarl.weights.executors.group import Message

REMOTE_ERROR = 6


class CountingLibrary(SimpleNamespace):
    """Counts open groups, and refuses messages as NCCL does once a peer is lost."""

    def __init__(self) -> None:
        self.num_open = self.num_aborted = 0
        super().__init__(
            ncclGroupStart=lambda: self._count(opened=1, result=0),
            ncclGroupEnd=lambda: self._count(opened=-1, result=REMOTE_ERROR),
            ncclSend=lambda *_arguments: REMOTE_ERROR,
            ncclRecv=lambda *_arguments: REMOTE_ERROR,
            ncclGetErrorString=lambda _result: b"remote process exited",
            ncclCommAbort=lambda _communicator: self._count(aborted=1, result=0),
        )

    def _count(self, *, opened: int = 0, aborted: int = 0, result: int) -> int:
        self.num_open += opened
        self.num_aborted += aborted
        return result


def test_a_message_that_is_refused_leaves_no_group_of_calls_open(monkeypatch: pytest.MonkeyPatch) -> None:
    library = CountingLibrary()
    monkeypatch.setattr(nccl, "_library", lambda: library)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: SimpleNamespace(synchronize=lambda: None))
    channel = nccl.NcclChannel.__new__(nccl.NcclChannel)
    vars(channel).update(
        device=torch.device("cpu"),
        _stream=SimpleNamespace(cuda_stream=0),
        _communicator=ctypes.c_void_p(1),
        _turn=Lock(),
    )
    message = Message(peer=1, buffer=torch.zeros(4, dtype=torch.uint8))
    with pytest.raises(WeightSyncError, match="remote process exited"):
        channel.exchange(message, None, tag=0, deadline=0.0, check=lambda: None)
    assert library.num_open == 0
    assert library.num_aborted == 1
