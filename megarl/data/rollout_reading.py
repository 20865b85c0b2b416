"""Reads the files of samples: a list of rollouts by small columns, one rollout with its columns per token."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megarl.errors import DataError, first_line

_LISTED = (
    *("prompt_uid", "data_source", "index", "score", "is_masked", "num_tokens", "finish_reason", "largest_gap"),
    *("first_version", "last_version", "ending", "line"),
)
"""Columns of a list of rollouts."""


_TIMED = ("prompt_uid", "index", "score", "ending", "began", "turns")
"""Columns of the times of episodes."""


def read_list(path: Path) -> list[dict[str, Any]]:
    """Return the columns of `_LISTED` for every rollout of a file, in its order."""
    try:
        rows: list[dict[str, Any]] = pq.read_table(path, columns=list(_LISTED)).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: cannot be read: {first_line(error)}") from error
    return rows


def read_episodes(path: Path) -> list[dict[str, Any]]:
    """Return the columns of `_TIMED` for every episode of a file, in the order in which they began."""
    try:
        has_times = "began" in pq.read_schema(path).names
        rows: list[dict[str, Any]] = pq.read_table(path, columns=list(_TIMED)).to_pylist() if has_times else []
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: cannot be read: {first_line(error)}") from error
    return sorted((row for row in rows if row["began"] is not None), key=lambda row: float(row["began"]))


def read_rollout(path: Path, row: int) -> Mapping[str, Any]:
    """Return all columns of one rollout."""
    try:
        with pq.ParquetFile(path) as file:
            sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
            ends = np.cumsum(sizes)
            group = int(np.searchsorted(ends, row, side="right"))
            if group == len(sizes):
                raise DataError(f"{path}: has no row {row}")
            (columns,) = file.read_row_group(group).slice(row - (ends[group] - sizes[group]), 1).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: cannot be read: {first_line(error)}") from error
    return {**columns, "components": dict(columns["components"])}
