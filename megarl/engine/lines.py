"""The reply of `/generate` to a list of requests: one line for each, sent when its response is done. Pure: no HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    place: int
    """The request's index in the list."""
    status_code: int
    """The status of a reply to this request alone."""
    content: bytes

    def encode(self) -> bytes:
        # A line break in JSON is white space, and in a message it can be.
        return b"%d %d %b\n" % (self.place, self.status_code, self.content.replace(b"\n", b" "))


class LineReader:
    """Puts lines together from pieces that end anywhere."""

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._pieces: list[bytes] = []
        self._num_bytes = 0

    def lines(self, piece: bytes) -> Iterator[Line]:
        """Yield the lines that end in this piece. Raises ValueError for one that is none or is too long."""
        start = 0
        while (end := piece.find(b"\n", start)) >= 0:
            self._keep(piece[start:end])
            yield _decode(b"".join(self._pieces))
            self._pieces.clear()
            self._num_bytes = 0
            start = end + 1
        self._keep(piece[start:])

    def _keep(self, piece: bytes) -> None:
        self._num_bytes += len(piece)
        if self._num_bytes > self._max_bytes:
            raise ValueError(f"the reply has more than {self._max_bytes} bytes")
        self._pieces.append(piece)


def _decode(line: bytes) -> Line:
    try:
        place, status_code, content = line.split(b" ", 2)
        return Line(place=int(place), status_code=int(status_code), content=content)
    except ValueError:
        raise ValueError(f"{len(line)} bytes that are no reply: {line[:40]!r}") from None
