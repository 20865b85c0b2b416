"""Serves a folder through FUSE with a pause for every byte that is written, for `tests.slow_disk`.

Its arguments are the folder, where it is seen, and the bytes per second of a file.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import mfusepy

_COPIED = ("st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_blocks")


class SlowFolder(mfusepy.Operations):  # type: ignore[misc]
    """Every operation is one of the folder behind."""

    use_ns = True

    def __init__(self, behind: Path, bytes_per_second: float) -> None:
        self._behind = behind
        self._bytes_per_second = bytes_per_second

    def _place(self, path: str) -> Path:
        return self._behind / path.lstrip("/")

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        found = self._place(path).lstat()
        times = {f"st_{kind}time": getattr(found, f"st_{kind}time_ns") for kind in "amc"}
        return {name: getattr(found, name) for name in _COPIED} | times

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._place(path))
        return {name: getattr(found, name) for name in dir(found) if name.startswith("f_") and name != "f_fsid"}

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *(each.name for each in self._place(path).iterdir())]

    def readlink(self, path: str) -> str:
        return str(self._place(path).readlink())

    def symlink(self, target: str, source: str) -> None:
        self._place(target).symlink_to(source)

    def link(self, target: str, source: str) -> None:
        self._place(target).hardlink_to(self._place(source))

    def mkdir(self, path: str, mode: int) -> None:
        self._place(path).mkdir(mode)

    def rmdir(self, path: str) -> None:
        self._place(path).rmdir()

    def unlink(self, path: str) -> None:
        self._place(path).unlink()

    def rename(self, old: str, new: str) -> None:
        self._place(old).rename(self._place(new))

    def chmod(self, path: str, mode: int) -> None:
        self._place(path).chmod(mode)

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> None:
        os.utime(self._place(path), ns=times or (time.time_ns(),) * 2)

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        os.truncate(self._place(path), length)

    def create(self, path: str, mode: int, fi: object = None) -> int:
        return os.open(self._place(path), os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)

    def open(self, path: str, flags: int) -> int:
        # The kernel says where an appended piece goes.
        return os.open(self._place(path), flags & ~os.O_APPEND)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        time.sleep(len(data) / self._bytes_per_second)
        return os.pwrite(fh, data, offset)

    def flush(self, path: str, fh: int) -> None:
        """Nothing waits here."""

    def fsync(self, path: str, datasync: int, fh: int) -> None:
        os.fsync(fh)

    def release(self, path: str, fh: int) -> None:
        os.close(fh)


if __name__ == "__main__":
    mfusepy.FUSE(SlowFolder(Path(sys.argv[1]), float(sys.argv[3])), sys.argv[2], foreground=True)
