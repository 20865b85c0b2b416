"""Finds the files of a data set, reads their records, and writes them as the prompt table that a run reads."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from megarl.config.hub import HubError, hub_folder, is_hub_name
from megarl.episodes.harbor.tasks import BoxLimits, read_task, task_names
from megarl.errors import DataError
from megarl.reward.scorers import last_boxed
from megarl.tools.prepare import DataSetName
from megarl.types import JsonValue

_Record: TypeAlias = Mapping[str, JsonValue]
_ROWS_PER_GROUP = 8192
_MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", pa.list_(_MESSAGE)),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
        ("extra_info", pa.struct([("index", pa.int64()), ("split", pa.string())])),
        ("response", pa.string()),
    ]
)
_EXTRA = SCHEMA.get_field_index("extra_info")
_TASK_SCHEMA = SCHEMA.set(
    _EXTRA, pa.field("extra_info", pa.struct([*SCHEMA.field(_EXTRA).type, ("task", pa.string())]))
)
"""With the name of a task's folder."""
SUFFIXES = (".parquet", ".jsonl", ".json", ".csv", ".arrow")
_HELD_OUT = ("test", "val", "eval", "dev")
_ROWS_PER_READ = 4096
_NOT_RECORDS = ("dataset_info.json", "dataset_dict.json", "dataset_infos.json", "state.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordColumns:
    """Names of the columns of `rows`; the first that a record has is taken."""

    prompt: tuple[str, ...] = ("prompt", "question", "problem", "messages", "instruction", "input")
    answer: tuple[str, ...] = ("answer", "ground_truth", "solution", "label", "target")
    response: tuple[str, ...] = ("response", "completion", "output")
    source: str | None = None
    """The data_source of every row; None is the record's own, else the name of the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    prompt: list[dict[str, str]]
    source: str
    truth: str = ""
    response: str | None = None
    task: str | None = None
    """The folder of a task, for an environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenSplit:
    path: Path
    num_rows: int
    num_repeated: int
    """Records that were left out because an earlier one has the same prompt."""
    first: str
    """The first prompt."""
    first_truth: str


def prepare(
    name: DataSetName, source: Path, out: Path, columns: RecordColumns, *, report: Callable[[str], None]
) -> list[WrittenSplit]:
    """Write `train.parquet` and `test.parquet`, as far as the source has them."""
    splits = {"train": [source]} if name is DataSetName.HARBOR else split_files(source)
    out.mkdir(parents=True, exist_ok=True)
    return [_write(name, split, files, out / f"{split}.parquet", columns, report) for split, files in splits.items()]


def _write(
    name: DataSetName, split: str, files: list[Path], path: Path, columns: RecordColumns, report: Callable[[str], None]
) -> WrittenSplit:
    seen: set[str] = set()
    first: _Row | None = None
    num_records = 0
    rows: list[dict[str, object]] = []
    whole = path.with_name(f".{path.name}.partial")
    schema = _TASK_SCHEMA if name is DataSetName.HARBOR else SCHEMA
    with pq.ParquetWriter(whole, schema) as writer:
        for row in _rows(name, files, columns):
            num_records += 1
            text = json.dumps([row.prompt, row.task])
            if text in seen:
                continue
            seen.add(text)
            first = first or row
            rows.append(_as_table_row(row, index=len(seen) - 1, split=split))
            if len(rows) == _ROWS_PER_GROUP:
                writer.write_table(pa.Table.from_pylist(rows, schema=schema))
                rows = []
                report(f"{path}: {len(seen):,} rows")
        if rows:
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))
    if first is None:
        whole.unlink()
        raise DataError(f"{files[0]} has no record")
    whole.rename(path)
    return WrittenSplit(
        path=path,
        num_rows=len(seen),
        num_repeated=num_records - len(seen),
        first="\n".join(f"{message['role']}: {message['content']}" for message in first.prompt),
        first_truth=first.truth if first.truth else first.response or "",
    )


def _as_table_row(row: _Row, *, index: int, split: str) -> dict[str, object]:
    return {
        "data_source": row.source,
        "prompt": row.prompt,
        "reward_model": {"style": "rule", "ground_truth": row.truth},
        "extra_info": {"index": index, "split": split, "task": row.task},
        "response": row.response,
    }


def _rows(name: DataSetName, files: Iterable[Path], columns: RecordColumns) -> Iterator[_Row]:
    for path in files:
        if name is DataSetName.HARBOR:
            yield from _harbor_rows(path)
            continue
        for number, record in enumerate(read_records(path), start=1):
            try:
                yield _row(name, record, columns, path)
            except _RecordError as error:
                raise DataError(f"{path} record {number}: {error}") from None


def _harbor_rows(folder: Path) -> Iterator[_Row]:
    """Yield a row per task; its instruction is the prompt."""
    # Limits are of no interest here; an environment reads them from the task.
    limits = BoxLimits(memory_bytes=0, disk_bytes=0, cpus=1, max_processes=0)
    for name in task_names(folder):
        task = read_task(folder, name, limits)
        yield _Row(prompt=[{"role": "user", "content": task.instruction.strip()}], source=folder.name, task=name)


class _RecordError(Exception):
    """A fault of a record; the caller adds which one."""


def _row(name: DataSetName, record: _Record, columns: RecordColumns, path: Path) -> _Row:
    match name:
        case DataSetName.GSM8K:
            answer = _text(record, "answer")
            truth = answer.rpartition("####")[2].strip().replace(",", "")
            if "####" not in answer:
                raise _RecordError("its answer has no ####; is this GSM8K?")
            ask = 'Reason step by step, and write the final number after "####".'
            return _Row(prompt=_asked(record, "question", ask), source="openai/gsm8k", truth=truth, response=answer)
        case DataSetName.MATH:
            solution = _text(record, "solution")
            boxed = last_boxed(solution)
            if boxed is None:
                raise _RecordError("its solution has no \\boxed{...}; is this MATH?")
            ask = "Reason step by step, and write the final answer in \\boxed{}."
            source = "DigitalLearningGmbH/MATH-lighteval"
            return _Row(prompt=_asked(record, "problem", ask), source=source, truth=boxed, response=solution)
        case DataSetName.DAPO_MATH:
            reward = record.get("reward_model")
            truth_value = reward.get("ground_truth") if isinstance(reward, dict) else None
            if not isinstance(truth_value, str):
                raise _RecordError("has no reward_model.ground_truth; is this DAPO-Math?")
            return _Row(prompt=_messages(record, ("prompt",)), source=_text(record, "data_source"), truth=truth_value)
        case DataSetName.ULTRAFEEDBACK:
            *prompt, answer_message = _messages(record, ("chosen",))
            if answer_message["role"] != "assistant" or not prompt:
                raise _RecordError("its chosen conversation does not end with an answer; is this UltraFeedback?")
            return _Row(prompt=prompt, source="ultrafeedback", response=answer_message["content"])
        case _:
            return _any_row(record, columns, path)


def _any_row(record: _Record, columns: RecordColumns, path: Path) -> _Row:
    prompt = _messages(record, columns.prompt)
    response = next((str(record[key]) for key in columns.response if record.get(key) is not None), None)
    if response is None and len(prompt) > 1 and prompt[-1]["role"] == "assistant":
        response = prompt.pop()["content"]
    reward = record.get("reward_model")
    truths = [reward.get("ground_truth")] if isinstance(reward, dict) else []
    truth = next((value for value in (*truths, *(record.get(key) for key in columns.answer)) if value is not None), "")
    source = columns.source or record.get("data_source") or path.name
    text = truth if isinstance(truth, str) else json.dumps(truth, ensure_ascii=False)
    return _Row(prompt=prompt, source=str(source), truth=text, response=response)


def _asked(record: _Record, key: str, ask: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{_text(record, key)}\n{ask}"}]


def _messages(record: _Record, keys: Iterable[str]) -> list[dict[str, str]]:
    """Return the messages of the first of these columns that the record has; a string is one user message."""
    names = list(keys)
    value = next((record[key] for key in names if record.get(key)), None)
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise _RecordError(f"has no {' or '.join(names)}; it has {', '.join(record)}; --prompt-key names the column")
    found = []
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise _RecordError("a message without role and content, both strings")
        found.append({"role": str(message.get("role")), "content": str(message["content"])})
    return found


def _text(record: _Record, key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        raise _RecordError(f"has no text in {key}; it has {', '.join(record)}")
    return value


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
