"""The search tool: BM25 over Parquet, an index that is built once."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.episodes.built_in.search import Search, ensure_index, index_path

_PASSAGES = [
    ("Moon", "The moon orbits the earth once in 27 days."),
    ("Earth", "The earth orbits the sun once a year."),
    ("Bread", "Bread is baked from flour, water and salt. NEAR the oven it rises."),
]


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    path = tmp_path / "passages.parquet"
    pq.write_table(pa.Table.from_pylist([{"title": title, "text": text} for title, text in _PASSAGES]), path)
    return path


def _search(documents: Path) -> Search:
    index = index_path([documents], None)
    ensure_index([documents], text_key="text", title_key="title", index=index)
    return Search(index=str(index), max_results=2)


def test_the_best_passage_comes_first(documents: Path) -> None:
    found = _search(documents).search("How long does the Moon's orbit take?")
    assert found.startswith("[1] Moon\nThe moon orbits the earth once in 27 days.")
    assert "[2] Earth" in found
    assert "[3]" not in found


def test_words_of_the_query_language_are_only_words(documents: Path) -> None:
    search = _search(documents)
    assert search.search('NEAR(" AND oven * ^').startswith("[1] Bread")
    assert search.search("zebra") == "nothing found"
    assert search.search("?!") == "error: the query has no words"


def test_an_index_is_built_once_and_again_when_the_documents_change(documents: Path) -> None:
    _search(documents)
    index = index_path([documents], None)
    built = index.stat().st_ino
    _search(documents)
    assert index.stat().st_ino == built
    pq.write_table(pa.Table.from_pylist([{"title": "Zebra", "text": "A zebra has stripes."}]), documents)
    assert _search(documents).search("zebra").startswith("[1] Zebra")
    assert not list(documents.parent.glob("*.tmp"))


def test_an_index_cut_by_a_full_disk_is_built_again(documents: Path) -> None:
    _search(documents)
    index = index_path([documents], None)
    index.write_bytes(index.read_bytes()[:3000])
    assert _search(documents).search("flour").startswith("[1] Bread")
