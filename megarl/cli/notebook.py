"""The display of a run in a notebook: one output that changes in place instead of a line per step."""

from __future__ import annotations

import sys
from typing import Protocol

from megarl.cli.display import describe, progress_lines
from megarl.observe.events import Record
from megarl.observe.history import Progress, advance

_MAX_LINES = 12
"""Lines that stay visible above the progress."""


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
