"""A real file system that can be filled: `@pytest.mark.needs("root")` and `with small_disk(...)`."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def small_disk(folder: Path, *, num_bytes: int) -> Iterator[Path]:
    """Mount a file system of this size at `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def filled(disk: Path, *, leaving: int = 0) -> Iterator[None]:
    """Fill the disk inside the block, but for `leaving` bytes."""
    ballast = disk / "ballast"
    try:
        with ballast.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(b"\1" * 4096)
            except OSError:
                file.truncate(max(0, ballast.stat().st_size - leaving))
        yield
    finally:
        ballast.unlink()
