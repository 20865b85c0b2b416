"""One process on one device of a cluster that tries its memory, its products, and groups with other processes.

It is connected as a trainer rank is. Import this module inside `ray_environment`.
"""

from __future__ import annotations

import os
import re
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TextIO

from megarl.cluster.cluster import own_address
from megarl.env import GLOO_INTERFACE, NCCL_VARIABLES, nccl_interface, nccl_log, update_environment
from megarl.system.network import interface_of

GROUP_TIMEOUT_S = 120.0
_NUM_TRIES = 4
_TESTED_SHARE = 0.9
"""Share of the free memory that the memory test writes and reads."""
_CHUNK_BYTES = 1 << 30
_PATTERNS = (0x5A5A5A5A5A5A5A5A, -0x5A5A5A5A5A5A5A5B)
"""Each bit once as 0 and once as 1."""
_PRODUCT_SIZE = 8192
_NUM_PRODUCTS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    tested_bytes: int
    num_wrong: int
    """Eight-byte words that did not keep what was written."""
    gb_per_s: float
    """Rate of a copy inside the device, read and written bytes together."""
    tflops: float
    """Rate of products of bfloat16 matrices; float32 on CPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceReport:
    seconds: float
    """Time of the fastest try."""
    ways: tuple[str, ...]
    """The transports that NCCL names between nodes."""


class ProbePeer:
    def __init__(self, bind: str | None, device: str) -> None:
        self._device = device
        self._host = own_address(bind)
        self._log = Path(tempfile.gettempdir()) / f"megarl-nccl-{os.getpid()}.log"
        self._opened: TextIO | None = None
        variables = {variable.name: variable.default for variable in NCCL_VARIABLES if not variable.is_set}
        update_environment(variables | nccl_log(self._log))
        if (interface := interface_of(self._host)) is not None:
            update_environment({GLOO_INTERFACE.name: interface, **nccl_interface(interface)})

    def find_address(self) -> tuple[str, int]:
        with socket.create_server((self._host, 0)) as listener:
            port: int = listener.getsockname()[1]
        return self._host, port

    def test_device(self, max_bytes: int | None) -> DeviceReport:
        """Write and read the free memory, or `max_bytes` of it, and time a copy and products."""
        import torch  # noqa: PLC0415 - only these processes need it

        free = torch.cuda.mem_get_info()[0] if self._device == "cuda" else 1 << 40
        wanted = min(int(_TESTED_SHARE * free), max_bytes or 1 << 62)
        size = min(wanted, _CHUNK_BYTES)
        chunks = [torch.empty(size // 8, dtype=torch.int64, device=self._device) for _ in range(wanted // size)]
        num_wrong = 0
        for pattern in _PATTERNS:
            for chunk in chunks:
                chunk.fill_(pattern)
            num_wrong += sum(int((chunk != pattern).sum().item()) for chunk in chunks)
        copied = torch.empty_like(chunks[0])
        copy = partial(copied.copy_, chunks[0])
        seconds = min(self._timed(copy) for _ in range(_NUM_TRIES))
        return DeviceReport(
            tested_bytes=len(chunks) * size,
            num_wrong=num_wrong,
            gb_per_s=2 * copied.nbytes / seconds / 1e9,
            tflops=self._products(),
        )

    def _products(self) -> float:
        import torch  # noqa: PLC0415 - only these processes need it

        is_gpu = self._device == "cuda"
        size, number = (_PRODUCT_SIZE, _NUM_PRODUCTS) if is_gpu else (256, 2)
        dtype = torch.bfloat16 if is_gpu else torch.float32
        left, right = (torch.randn(size, size, dtype=dtype, device=self._device) for _ in range(2))
        target = torch.empty_like(left)

        def multiply() -> None:
            for _ in range(number):
                torch.mm(left, right, out=target)

        seconds = min(self._timed(multiply) for _ in range(_NUM_TRIES))
        return 2 * size**3 * number / seconds / 1e12

    def _timed(self, work: Callable[[], object]) -> float:
        import torch  # noqa: PLC0415 - only these processes need it

        if self._device == "cuda":
            torch.cuda.synchronize()
        began = time.monotonic()
        work()
        if self._device == "cuda":
            torch.cuda.synchronize()
        return max(time.monotonic() - began, 1e-9)

    def reduce(self, rank: int, world: int, address: tuple[str, int], num_bytes: int) -> ReduceReport:
        """Sum a tensor with the other processes of a group; fail where the sum is wrong."""
        import torch  # noqa: PLC0415 - only these processes need it
        from torch import distributed  # noqa: PLC0415 - only these processes need it

        host, port = address
        distributed.init_process_group(
            "gloo" if self._device == "cpu" else "nccl",
            init_method=f"tcp://{host}:{port}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=GROUP_TIMEOUT_S),
        )
        values = torch.empty(num_bytes // 4, device=self._device)
        times = []
        # The first try connects; it is among the slow ones.
        for _ in range(_NUM_TRIES):
            values.fill_(float(rank + 1))
            times.append(self._timed(partial(distributed.all_reduce, values)))
            lowest, highest = values.min().item(), values.max().item()
            expected = world * (world + 1) / 2
            assert lowest == highest == expected, f"rank {rank}: {lowest} to {highest}, not the sum {expected}"
        distributed.destroy_process_group()
        return ReduceReport(seconds=min(times), ways=ways_between_nodes(self._read_log()))

    def _read_log(self) -> list[str]:
        """Return all lines of NCCL so far; the file has no name from the first time on, and ends with the process."""
        if self._opened is None and self._log.exists():
            self._opened = self._log.open(errors="replace")
            self._log.unlink()
        if self._opened is None:
            return []
        self._opened.seek(0)
        return self._opened.readlines()


def ways_between_nodes(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the transports in lines like `Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA`."""
    found = (re.search(r"via NET/(\w+)(?:/\d+)?(?:\(\d+\))?(/GDRDMA)?", line) for line in lines)
    return tuple(sorted({each[1] + (each[2] or "") for each in found if each is not None}))
