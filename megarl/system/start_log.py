"""Lines in the logs of a run's processes that say what took how long at its start, and their reader.

Each process notes its own pieces, in its own log: the slowest ones begin before anybody could be told.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)

_LINE = re.compile(rf"^(\S+)Z INFO {re.escape(__name__)} what=(.+) seconds=([\d.]+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPiece:
    process: str
    """The name of its log: megarl, rank_0, engine_0."""
    what: str
    ended: datetime
    seconds: float

    @property
    def began(self) -> datetime:
        return self.ended - timedelta(seconds=self.seconds)


def note_piece(what: str, *, began: float) -> None:
    """Log a piece that began at this time, in seconds since the epoch, and ends now."""
    logger.info(_message(what, time.time() - began))


@contextmanager
def noted_piece(what: str) -> Iterator[None]:
    began = time.time()
    yield
    note_piece(what, began=began)


def process_began() -> float:
    """Return when this process was started, in seconds since the epoch."""
    return float(psutil.Process().create_time())


def piece_line(what: str, *, began: float, ended: float) -> str:
    """Return the line of a piece for the log of a process that is not ours."""
    at = datetime.fromtimestamp(ended, UTC).replace(tzinfo=None).isoformat(timespec="milliseconds")
    return f"{at}Z INFO {__name__} {_message(what, ended - began)}\n"


def _message(what: str, seconds: float) -> str:
    return f"what={what} seconds={seconds:.3f}"


def read_pieces(run_folder: Path, *, since: datetime) -> list[StartPiece]:
    """Return the pieces that ended after `since`, in the order in which they began."""
    logs = [run_folder / "megarl.log", *run_folder.glob("ranks/*.log"), *run_folder.glob("engines/*.log")]
    pieces = [piece for log in logs if log.is_file() for piece in _pieces_in(log) if piece.ended >= since]
    return sorted(pieces, key=lambda piece: piece.began)


def _pieces_in(log: Path) -> Iterator[StartPiece]:
    with log.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if (found := _LINE.match(line)) is not None:
                ended = datetime.fromisoformat(found[1]).replace(tzinfo=UTC)
                yield StartPiece(process=log.stem, what=found[2], ended=ended, seconds=float(found[3]))
