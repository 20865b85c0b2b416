"""Rows of data as a user would write them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

WriteParquet: TypeAlias = Callable[..., Path]
"""The fixture `write_parquet`: writes rows to a file and returns its path."""
NO_COLUMN = "(no column)"


def make_row(prompt: object = "1+1=", **columns: object) -> dict[str, object]:
    """Return a row; a column of the value NO_COLUMN is left out."""
    row = {
        "prompt": prompt,
        "data_source": "sums",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": 7, "tags": ["easy"]},
    }
    return {key: value for key, value in {**row, **columns}.items() if value != NO_COLUMN}
