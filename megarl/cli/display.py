"""The display of a run: live on a terminal or in a notebook, `lines` elsewhere; a progress bar of long reads."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from threading import Lock
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.logging import RichHandler
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bars
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from megarl.cli.lines import PlainDisplay, describe, numbers_text, phase_text, progress_lines, step_text
from megarl.observe.events import Record, RunStarted, Sink
from megarl.observe.progress import Progress, advance

REFRESHES_PER_SECOND = 4
BAR_WIDTH = 30
_MAX_LINES = 12
"""Lines that stay visible above the progress."""


def show_warnings(console: Console) -> None:
    """Print warnings that libraries log above the live view."""
    handler = RichHandler(logging.WARNING, console=console, show_time=False, show_path=False)
    logging.getLogger().addHandler(handler)


def make_display(console: Console) -> Sink:
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveDisplay(console)
    return PlainDisplay(console)


class LiveDisplay:
    """Steps and phases change in place; lines that stay scroll above them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress()
        self._spinner = Spinner("dots")
        # Transient: the report replaces it.
        self._live = Live(
            console=console,
            get_renderable=self._render,
            refresh_per_second=REFRESHES_PER_SECOND,
            transient=True,
        )

    def record(self, record: Record) -> None:
        self._progress = advance(self._progress, record)
        line = describe(record)
        if line is not None:
            self._console.print(line)
        if isinstance(record.event, RunStarted):
            self._live.start()

    def close(self) -> None:
        self._live.stop()

    def _render(self) -> Group:
        progress = self._progress
        line = Table.grid(padding=(0, 1))
        line.add_row(
            self._spinner,
            Text(f"step {step_text(progress)}", style="bold"),
            ProgressBar(total=max(1, progress.steps), completed=progress.step, width=BAR_WIDTH),
            Text(phase_text(progress, now=datetime.now(UTC)), style="cyan"),
        )
        return Group(line, Text(numbers_text(progress), no_wrap=True, overflow="ellipsis"))


class ByteCounter:
    """Counts bytes from several threads; called with the size of every chunk."""

    def __init__(self, bars: Bars, text: str, *, total_bytes: int | None) -> None:
        self._bars = bars
        self._task = bars.add_task(text, total=total_bytes)
        self._lock = Lock()
        self._began = time.monotonic()
        self.num_bytes = 0

    def __call__(self, num_bytes: int) -> None:
        with self._lock:
            self.num_bytes += num_bytes
            self._bars.update(self._task, completed=self.num_bytes)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    @property
    def rate(self) -> str:
        return f"{self.num_bytes / 1e9 / max(self.seconds, 1e-9):.2f} GB/s"


@contextmanager
def count_bytes(console: Console, text: str, *, total_bytes: int | None = None) -> Iterator[ByteCounter]:
    """Yield a counter; on a terminal, show a bar with its rate until the block ends."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    is_shown = console.is_terminal and not console.is_dumb_terminal
    with Bars(*columns, console=console, transient=True, disable=not is_shown) as bars:
        yield ByteCounter(bars, text, total_bytes=total_bytes)


class Output(Protocol):
    """IPython's handle of an output that can be replaced."""

    def update(self, shown: object) -> None: ...


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    return "ipykernel" in sys.modules and "IPython" in sys.modules


class NotebookDisplay:
    """The last lines and the numbers of the last step."""

    def __init__(self, output: Output | None = None) -> None:
        self._output = output or _open_output()
        self._progress = Progress()
        self._lines: list[str] = []

    def record(self, record: Record) -> None:
        self._progress = advance(self._progress, record)
        line = describe(record)
        if line is not None:
            self._lines = [*self._lines, line][-_MAX_LINES:]
        text = "\n".join([*self._lines, *progress_lines(self._progress)])
        self._output.update({"text/plain": text})

    def close(self) -> None:
        """The output stays as it is."""


def _open_output() -> Output:
    from IPython.display import display

    class Raw:
        def __init__(self) -> None:
            self._handle = display({"text/plain": ""}, raw=True, display_id=True)

        def update(self, shown: object) -> None:
            self._handle.update(shown, raw=True)

    return Raw()
