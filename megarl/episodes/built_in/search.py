"""The tool `search`: BM25 over the rows of Parquet files, in an index of SQLite's FTS5.

The index is built once per machine and opened read-only by every environment's worker, which share its pages.
"""

from __future__ import annotations

import fcntl
import logging
import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path

import pyarrow.parquet as pq

logger = logging.getLogger(__name__)

_ROWS_PER_BATCH = 10_000
_MAX_WORDS = 64
"""Words of a query that count: a model may write a page."""
_WORD = re.compile(r"\w+")


class Search:
    """The index, opened for one episode."""

    def __init__(self, *, index: str, max_results: int) -> None:
        self._connection = sqlite3.connect(f"file:{index}?mode=ro&immutable=1", uri=True)
        self._max_results = max_results

    def search(self, query: str) -> str:
        """Search the documents and return the passages that match the query best."""
        words = _WORD.findall(query)[:_MAX_WORDS]
        if not words:
            return "error: the query has no words"
        # Quoted, so that AND, NEAR and the like are words too.
        asked = " OR ".join(f'"{word}"' for word in words)
        found = self._connection.execute(
            "SELECT title, text FROM passages WHERE passages MATCH ? ORDER BY bm25(passages), rowid LIMIT ?",
            (asked, self._max_results),
        ).fetchall()
        if not found:
            return "nothing found"
        return "\n\n".join(f"[{place}] {_shown(title, text)}" for place, (title, text) in enumerate(found, 1))

    def close(self) -> None:
        self._connection.close()


def _shown(title: str, text: str) -> str:
    return f"{title}\n{text}" if title else text


def index_path(documents: Sequence[Path], index: Path | None) -> Path:
    """Return where the index is: beside the first document unless the recipe says otherwise."""
    return documents[0].with_name(f"{documents[0].name}.bm25") if index is None else index


def ensure_index(documents: Sequence[Path], *, text_key: str, title_key: str | None, index: Path) -> None:
    """Build the index if there is none, or if the documents or their columns have changed since; others wait for it."""
    made_of = _made_of(documents, text_key, title_key)
    if _is_current(index, made_of):
        return
    index.parent.mkdir(parents=True, exist_ok=True)
    with index.with_name(f"{index.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_current(index, made_of):
            return
        unfinished = index.with_name(f"{index.name}.tmp")
        unfinished.unlink(missing_ok=True)
        try:
            _build(unfinished, documents, text_key=text_key, title_key=title_key, made_of=made_of)
            unfinished.replace(index)
        finally:
            unfinished.unlink(missing_ok=True)


def _made_of(documents: Sequence[Path], text_key: str, title_key: str | None) -> str:
    """Return a text that changes with the files."""
    files = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in documents]
    return repr((files, text_key, title_key))


def _is_current(index: Path, made_of: str) -> bool:
    if not index.exists():
        return False
    with suppress(sqlite3.Error), closing(sqlite3.connect(f"file:{index}?mode=ro", uri=True)) as connection:
        return bool(connection.execute("SELECT made_of FROM origin").fetchone() == (made_of,))
    return False


def _build(path: Path, documents: Sequence[Path], *, text_key: str, title_key: str | None, made_of: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = OFF")
        connection.execute("CREATE VIRTUAL TABLE passages USING fts5(title, text, tokenize = 'porter unicode61')")
        num_rows = 0
        for batch in _batches(documents, text_key, title_key):
            connection.executemany("INSERT INTO passages (title, text) VALUES (?, ?)", batch)
            num_rows += len(batch)
            logger.info("indexed num_passages=%d index=%s", num_rows, path)
        connection.execute("INSERT INTO passages(passages) VALUES ('optimize')")
        connection.execute("CREATE TABLE origin (made_of TEXT)")
        connection.execute("INSERT INTO origin VALUES (?)", (made_of,))
        connection.commit()


def _batches(documents: Sequence[Path], text_key: str, title_key: str | None) -> Iterator[list[tuple[str, str]]]:
    columns = [text_key] if title_key is None else [text_key, title_key]
    for path in documents:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(_ROWS_PER_BATCH, columns=columns):
                rows = batch.to_pylist()
                yield [(str(row.get(title_key) or "") if title_key else "", str(row[text_key] or "")) for row in rows]
