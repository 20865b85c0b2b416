"""Records which lines of megarl a process executes while a window is open. Loaded by every Python of a measured run.

`STEP_TRACE` names a folder. The file `window` in it says `open` or `closed`; each process looks at it several times a
second, and writes its lines into the folder when the window closes. Python calls `sitecustomize` before anything else,
so that no frame is missed. Nothing here may import megarl.

What a timer calls is not of the step: whether it falls into the window depends on the speed of the machine. A task or
thread that has waited for a time of `_TIMER_S` or more, until the time was over, is a timer, with all that it begins.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import threading
import time
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any

_FOLDER = os.environ.get("STEP_TRACE", "")  # noqa: TID251 - megarl.env must not be imported here
_PACKAGE = str(Path(__file__).parent.parent.parent / "megarl") + os.sep
_PERIOD_S = 0.1
_TIMER_S = 0.2
"""A step itself waits shorter: 10 ms for further prompts, less for messages."""

_lines: set[tuple[str, int]] = set()
_is_open = False
_is_timer = ContextVar("is_timer", default=False)
"""Tasks and threads that a task begins through asyncio inherit it."""
_sleep, _sleep_async, _wait = time.sleep, asyncio.sleep, threading.Event.wait


def _trace(frame: FrameType, _event: str, _: object) -> Any:
    """Trace the lines of megarl's own functions; other frames cost one call."""
    return _note_line if frame.f_code.co_filename.startswith(_PACKAGE) and not _is_timer.get() else None


def _note_line(frame: FrameType, event: str, _: object) -> Any:
    if _is_open and event == "line" and not _is_timer.get():
        _lines.add((frame.f_code.co_filename, frame.f_lineno))
    return _note_line


def _sleep_noted(seconds: float, /) -> None:
    _sleep(seconds)
    _note_wait(seconds)


async def _sleep_async_noted(delay: float, result: Any = None) -> Any:
    slept = await _sleep_async(delay, result)
    _note_wait(delay)
    return slept


def _wait_noted(event: threading.Event, timeout: float | None = None) -> bool:
    is_set = _wait(event, timeout)
    if not is_set and timeout is not None:
        _note_wait(timeout)
    return is_set


class _NotedTimeout(asyncio.Timeout):  # type: ignore[misc]  # final, for all but this script
    def __init__(self, delay: float | None) -> None:
        super().__init__(None if delay is None else asyncio.get_running_loop().time() + delay)
        self._delay = delay or 0.0

    async def __aexit__(self, *error: Any) -> None:
        try:
            await super().__aexit__(*error)
        finally:
            if self.expired():
                _note_wait(self._delay)


def _note_wait(seconds: float) -> None:
    if seconds >= _TIMER_S:
        _is_timer.set(True)


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
        _sleep(_PERIOD_S)


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
    time.sleep, asyncio.sleep, threading.Event.wait = _sleep_noted, _sleep_async_noted, _wait_noted  # type: ignore[assignment,method-assign]
    asyncio.timeout = _NotedTimeout  # type: ignore[assignment,misc]
    threading.settrace(_trace)
    sys.settrace(_trace)
