"""The log of a run's events, `<run>/events.jsonl`, as it is written: one line each, never rewritten."""

from __future__ import annotations

import logging
from collections import deque
from contextlib import suppress
from pathlib import Path

from pydantic_core import to_json

from megarl.errors import writing
from megarl.observe.event_file import next_line
from megarl.observe.events import Record
from megarl.system.secret import masked

MAX_WAITING_BYTES = 64 << 20
"""Events that wait for a disk; beyond it the oldest are dropped."""

logger = logging.getLogger(__name__)


class EventLog:
    """The sink that writes the file. An existing file is continued, and so are its sequence numbers.

    Lines that cannot be written wait, up to a limit, and are written before the next one. No line is written in part.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: deque[bytes] = deque()
        self._num_waiting_bytes = 0
        self._num_lost = 0
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self.next_sequence, self._end = next_line(path)
            # Unbuffered: the line is in the file when `record` returns, even if the process is killed next.
            self._file = path.open("ab", buffering=0)

    def record(self, record: Record) -> None:
        # JSON has no NaN; a string survives the round trip and strict parsers.
        line = masked(to_json(record, inf_nan_mode="strings").decode()).encode() + b"\n"
        self._waiting.append(line)
        self._num_waiting_bytes += len(line)
        while self._num_waiting_bytes > MAX_WAITING_BYTES:
            self._num_waiting_bytes -= len(self._waiting.popleft())
            self._num_lost += 1
        self._write_waiting()

    def _write_waiting(self) -> None:
        while self._waiting:
            self._write(self._waiting[0])
            self._num_waiting_bytes -= len(self._waiting.popleft())
        if self._num_lost:
            logger.warning("%s: %d events are lost: it could not be written for too long", self._path, self._num_lost)
            self._num_lost = 0

    def _write(self, line: bytes) -> None:
        """Write a whole line or nothing: what a full disk took of it is cut off again."""
        left = memoryview(line)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            if len(left) < len(line):
                self._file.truncate(self._end)
            raise
        self._end += len(line)

    def close(self) -> None:
        try:
            self._write_waiting()
        except OSError as error:
            logger.warning("%s: %d events are lost: %s", self._path, len(self._waiting), error.strerror)
        with suppress(OSError):
            self._file.close()
