"""A real file system that is slow to write: `@pytest.mark.needs("fuse")` and `with slow_disk(...)`."""

from __future__ import annotations

import ctypes.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def slow_disk(folder: Path, *, bytes_per_second: float) -> Iterator[Path]:
    """Mount a file system at `folder` each of whose files is written at this rate."""
    behind = folder.with_name(f"{folder.name}_behind")
    for each in (folder, behind):
        each.mkdir(parents=True)
    command = [sys.executable, "-m", "tests.slow_folder", str(behind), str(folder), str(bytes_per_second)]
    with subprocess.Popen(command) as server:
        try:
            while not folder.is_mount():
                assert server.poll() is None, f"{command} ended with {server.returncode}"
                time.sleep(0.02)
            yield folder
        finally:
            subprocess.run(["umount", "--lazy", str(folder)], check=server.poll() is None)


def lacks_fuse() -> str:
    """Why there can be no slow disk here, or nothing."""
    if os.geteuid() != 0:
        return "not root"
    if not Path("/dev/fuse").exists():
        return "no /dev/fuse"
    return "" if ctypes.util.find_library("fuse3") else "no libfuse3"
