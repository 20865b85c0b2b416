"""Records which lines of megarl a process executes while a window is open. Loaded by every Python of a measured run.

`STEP_TRACE` names a folder. The file `window` in it says `open` or `closed`; each process looks at it several times a
second, and writes its lines into the folder when the window closes. Python calls `sitecustomize` before anything else,
so that no frame is missed. Nothing here may import megarl.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

_FOLDER = os.environ.get("STEP_TRACE", "")  # noqa: TID251 - megarl.env must not be imported here
_PACKAGE = str(Path(__file__).parent.parent.parent / "megarl") + os.sep
_PERIOD_S = 0.1

_lines: set[tuple[str, int]] = set()
_is_open = False


def _trace(frame: FrameType, _event: str, _: object) -> Any:
    """Trace the lines of megarl's own functions; other frames cost one call."""
    return _note_line if frame.f_code.co_filename.startswith(_PACKAGE) else None


def _note_line(frame: FrameType, event: str, _: object) -> Any:
    if _is_open and event == "line":
        _lines.add((frame.f_code.co_filename, frame.f_lineno))
    return _note_line


def _follow_window() -> None:
    global _is_open
    window = Path(_FOLDER) / "window"
    while True:
        state = window.read_text() if window.exists() else ""
        if state == "closed" and _is_open:
            _is_open = False
            lines = [[name[len(_PACKAGE) :], line] for name, line in sorted(_lines)]
            record = {"argv": sys.argv[:3], "lines": lines}
            (Path(_FOLDER) / f"lines_{os.getpid()}.json").write_text(json.dumps(record))
        _is_open = state == "open"
        time.sleep(_PERIOD_S)


def _trace_thread(_phase: str, _info: dict[str, int]) -> None:
    """Trace this thread from now on: Ray runs the calls of a rank in threads that `threading` does not know."""
    if sys.gettrace() is None:
        sys.settrace(_trace)


def _start() -> None:
    threading.Thread(target=_follow_window, daemon=True).start()


if _FOLDER:
    _start()
    os.register_at_fork(after_in_child=_start)
    gc.callbacks.append(_trace_thread)
    threading.settrace(_trace)
    sys.settrace(_trace)
