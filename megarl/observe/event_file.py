"""The events of a run read from its file, `<run>/events.jsonl`, while it grows and behind damage."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from megarl.errors import DataError
from megarl.observe.events import Record

EVENTS_FILE = "events.jsonl"

logger = logging.getLogger(__name__)


def read_events(path: Path) -> Iterator[Record]:
    """Yield all records of a file, without its damaged lines and without an unfinished last one."""
    tail = EventTail(path)
    yield from tail.read()
    if tail.damage:
        logger.warning("%s", tail.damage)


class EventTail:
    """Reads a file that may still grow: each `read` returns the records added since the last one.

    A line that is not an event, as a power failure or another version of megarl leaves it, is skipped and counted.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._num_lines = 0
        self._num_damaged = 0
        self._first_damage = ""

    @property
    def damage(self) -> str:
        """The number of skipped lines and the reason; empty if all are events."""
        if not self._num_damaged:
            return ""
        return f"{self._path}: {self._num_damaged} damaged lines are left out; the first is {self._first_damage}"

    def read(self) -> list[Record]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except OSError as error:
            raise DataError(f"{self._path}: cannot be read: {error.strerror}") from error
        complete = text[: text.rfind(b"\n") + 1]
        records = []
        for line in complete.split(b"\n")[:-1]:
            self._num_lines += 1
            try:
                records.append(_RECORD.validate_json(line))
            except ValidationError as error:
                self._num_damaged += 1
                self._first_damage = self._first_damage or f"line {self._num_lines}: {_reason(error)}"
        self._offset += len(complete)
        return records


_RECORD: TypeAdapter[Record] = TypeAdapter(Record)


def _reason(error: ValidationError) -> str:
    detail = error.errors()[0]
    key = ".".join(str(part) for part in detail["loc"])
    return f"{key}: {detail['msg']}" if key else detail["msg"]


def next_line(path: Path) -> tuple[int, int]:
    """Return the next sequence number and the size of the file, without an unfinished last line, which is cut off."""
    if not path.exists():
        return 0, 0
    text = path.read_bytes()
    complete = text[: text.rfind(b"\n") + 1]
    if len(complete) < len(text):
        with path.open("r+b") as file:
            file.truncate(len(complete))
    # Backwards: the last lines may be damaged.
    for line in reversed(complete.split(b"\n")):
        with suppress(ValidationError):
            return _RECORD.validate_json(line).sequence + 1, len(complete)
    return 0, len(complete)
