"""Reads the records of a data set: JSON lines, CSV, Parquet, Arrow, a folder of them, or a name of the hub."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from megarl.config.hub import HubError, hub_folder, is_hub_name
from megarl.errors import DataError
from megarl.types import JsonValue

SUFFIXES = (".parquet", ".jsonl", ".json", ".csv", ".arrow")
_HELD_OUT = ("test", "val", "eval", "dev")
_ROWS_PER_READ = 4096
_NOT_RECORDS = ("dataset_info.json", "dataset_dict.json", "dataset_infos.json", "state.json")


def split_files(source: Path) -> dict[str, list[Path]]:
    """Return the files of the splits `train` and `test`; a DataError where there is none or not one set of them."""
    if is_hub_name(source):
        try:
            source = hub_folder(str(source), kind="dataset", downloads=True)
        except HubError as error:
            raise DataError(f"--from {source} {error}") from None
    if source.is_file():
        _check_suffix(source)
        return {_split(Path(source.name)): [source]}
    if not source.is_dir():
        raise DataError(f"--from {source} does not exist; name a file, a folder or a data set of the hub")
    files = sorted(path for path in source.rglob("*") if path.suffix in SUFFIXES and path.name not in _NOT_RECORDS)
    if not files:
        raise DataError(f"--from {source} has no file that ends in {', '.join(SUFFIXES)}")
    folders = sorted({path.relative_to(source).parts[0] for path in files if len(path.relative_to(source).parts) > 1})
    configurations = [name for name in folders if name not in ("data", *_HELD_OUT) and "train" not in name]
    if len(configurations) > 1:
        raise DataError(f"--from {source} has several sets; name one of {', '.join(configurations)} in it")
    splits: dict[str, list[Path]] = {}
    for path in files:
        splits.setdefault(_split(path.relative_to(source)), []).append(path)
    return splits


def read_records(path: Path) -> Iterator[Mapping[str, JsonValue]]:
    """Yield the records of a file; a DataError names the place that cannot be read."""
    try:
        match path.suffix:
            case ".parquet":
                with pq.ParquetFile(path) as file:
                    for batch in file.iter_batches(batch_size=_ROWS_PER_READ):
                        yield from batch.to_pylist(maps_as_pydicts="strict")
            case ".arrow":
                with pa.memory_map(str(path)) as memory:
                    for batch in pa.ipc.open_stream(memory):
                        yield from batch.to_pylist(maps_as_pydicts="strict")
            case ".csv":
                with path.open(newline="", encoding="utf-8") as text:
                    yield from csv.DictReader(text)
            case _:
                yield from _json_records(path)
    except (pa.ArrowException, OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read: {' '.join(str(error).split())}") from error


def _json_records(path: Path) -> Iterator[Mapping[str, JsonValue]]:
    """Yield one record per line, or those of one list."""
    with path.open(encoding="utf-8") as lines:
        first = lines.read(1)
        lines.seek(0)
        if first == "[":
            try:
                records = json.load(lines)
            except json.JSONDecodeError as error:
                raise DataError(f"{path} line {error.lineno}: not JSON: {error.msg}") from None
            yield from (_checked(record, path, number) for number, record in enumerate(records, start=1))
            return
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{path} line {number}: not JSON: {error.msg}") from None
            yield _checked(record, path, number)


def _checked(record: JsonValue, path: Path, number: int) -> Mapping[str, JsonValue]:
    if not isinstance(record, dict):
        raise DataError(f"{path} record {number}: is no object; each record is {{...}} with the names of its columns")
    return record


def _check_suffix(path: Path) -> None:
    if path.suffix not in SUFFIXES:
        raise DataError(f"--from {path} does not end in one of {', '.join(SUFFIXES)}")


def _split(path: Path) -> str:
    """Return the split that a path within a data set belongs to, by the words in its name."""
    words = "/".join(path.parts[-2:]).lower()
    return "test" if any(word in words for word in _HELD_OUT) and "train" not in path.name.lower() else "train"
