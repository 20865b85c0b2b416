"""The file system of a run's folder: every node writes a file at once, then each reads that of another node."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from megarl.tools.doctor import Check, CheckStatus
from megarl.tools.doctor.rates import AREA, check_rates

_BLOCK_BYTES = 1 << 24


def write_file(path: Path, num_bytes: int, number: int) -> float:
    """Write blocks of random bytes that begin with the writer's number; return the seconds until all is on disk."""
    block = bytearray(os.urandom(min(num_bytes, _BLOCK_BYTES)))
    block[:8] = number.to_bytes(8, "little")
    path.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with path.open("wb", buffering=0) as file:
        for _ in range(num_bytes // len(block)):
            file.write(block)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return time.monotonic() - began


def read_file(path: Path, num_bytes: int, number: int) -> float:
    """Read a file of another node; return the seconds. Fails where it is not there, or has other bytes."""
    size, began = 0, time.monotonic()
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while block := file.read(min(num_bytes, _BLOCK_BYTES)):
            assert int.from_bytes(block[:8], "little") == number, f"{path} has other bytes than its writer wrote"
            size += len(block)
    assert size == num_bytes, f"{path} has {size} of {num_bytes} bytes"
    return time.monotonic() - began


def check_storage(
    folder: Path, written: Mapping[str, float], read: Mapping[str, float], *, num_bytes: int, planned: float | None
) -> list[Check]:
    """Judge the rates of all nodes together by `cluster.file_system_gb_per_s`; `num_bytes` is the size of one file."""
    checks = []
    for name, seconds in (("file system, write", written), ("file system, read", read)):
        rate = len(seconds) * num_bytes / max(seconds.values()) / 1e9
        remedy = (
            f"saves and starts take longer than planned: set cluster.file_system_gb_per_s={rate:.2g}, or a faster one"
        )
        rates = {f"{len(seconds)} node(s) together": rate}
        checks.append(check_rates(name, rates, planned, unit="GB/s", remedy=remedy))
    missing = [node for node in written if node not in read]
    if missing:
        remedy = "every rank reads what others wrote: choose a run.folder on storage that all nodes share"
        found = f"{', '.join(missing)} cannot read in {folder} what another node wrote"
        checks.append(Check(area=AREA, name="shared folder", found=found, status=CheckStatus.ERROR, remedy=remedy))
    return checks
