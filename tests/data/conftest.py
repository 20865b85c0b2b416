"""A tiny model folder with its tokenizer, and parquet files written as a user would write them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.tools.quickstart.tiny_model import TinyShape, write_tiny_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, TinyShape(), seed=1)
    return folder


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    return load_tokenizer(model_folder, vocab=TinyShape().vocab)


@pytest.fixture
def write_parquet(tmp_path: Path) -> Callable[..., Path]:
    def write(*rows: dict[str, object], name: str = "train.parquet", schema: pa.Schema | None = None) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), path)
        return path

    return write
