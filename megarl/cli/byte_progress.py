"""How far long reading has come: a bar with its rate on a terminal, nothing elsewhere. Counts from several threads."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


class ByteCounter:
    """Called with every chunk."""

    def __init__(self, progress: Progress, what: str, *, total_bytes: int | None) -> None:
        self._progress = progress
        self._task = progress.add_task(what, total=total_bytes)
        self._lock = Lock()
        self._began = time.monotonic()
        self.num_bytes = 0

    def __call__(self, num_bytes: int) -> None:
        with self._lock:
            self.num_bytes += num_bytes
            self._progress.update(self._task, completed=self.num_bytes)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    @property
    def rate(self) -> str:
        return f"{self.num_bytes / 1e9 / max(self.seconds, 1e-9):.2f} GB/s"


@contextmanager
def count_bytes(console: Console, what: str, *, total_bytes: int | None = None) -> Iterator[ByteCounter]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    is_shown = console.is_terminal and not console.is_dumb_terminal
    with Progress(*columns, console=console, transient=True, disable=not is_shown) as progress:
        yield ByteCounter(progress, what, total_bytes=total_bytes)
