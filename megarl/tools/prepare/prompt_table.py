"""Finds the files of a data set, reads their records, and writes them as the prompt table that a run reads.

All records of a split are read before its table gets its name: one that cannot be used leaves what was there.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from megarl.config.hub import HubError, hub_folder, is_hub_name
from megarl.data.images import ImageError, decode, read_image
from megarl.data.rows import IMAGE_MARK
from megarl.episodes.harbor.tasks import BoxLimits, read_task, task_names
from megarl.errors import DataError, first_few
from megarl.reward.scorers import last_boxed
from megarl.tools.prepare import DataSetName
from megarl.types import JsonValue

_Record: TypeAlias = Mapping[str, JsonValue]
_ROWS_PER_GROUP = 8192
_BYTES_PER_GROUP = 64 * 2**20
"""Images are in memory until their rows are written."""
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
_IMAGES = pa.field("images", pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())])))
SUFFIXES = (".parquet", ".jsonl", ".json", ".csv", ".arrow")
_BOXED = "Reason step by step, and write the final answer in \\boxed{}."
_HELD_OUT = ("test", "val", "eval", "dev")
_ROWS_PER_READ = 4096
_IMAGE_ROWS_PER_READ = 64
_NOT_RECORDS = ("dataset_info.json", "dataset_dict.json", "dataset_infos.json", "state.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordColumns:
    """Names of the columns of `rows`; the first that a record has is taken."""

    prompt: tuple[str, ...] = ("prompt", "question", "problem", "messages", "instruction", "input")
    answer: tuple[str, ...] = ("answer", "ground_truth", "solution", "label", "target")
    response: tuple[str, ...] = ("response", "completion", "output")
    images: tuple[str, ...] = ("images", "image")
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
    images: tuple[bytes, ...] = ()

    @property
    def identity(self) -> str:
        """Two rows with the same one ask the same."""
        digests = [hashlib.blake2b(image, digest_size=16).hexdigest() for image in self.images]
        return json.dumps([self.prompt, self.task, *digests])


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
    whole = path.with_name(f".{path.name}.partial")
    try:
        written = _write_rows(name, split, files, whole, columns, lambda text: report(f"{path}: {text}"))
    except BaseException:
        whole.unlink(missing_ok=True)
        raise
    whole.rename(path)
    return replace(written, path=path)


def _write_rows(
    name: DataSetName, split: str, files: list[Path], path: Path, columns: RecordColumns, report: Callable[[str], None]
) -> WrittenSplit:
    seen: set[str] = set()
    first: _Row | None = None
    num_records = num_waiting_bytes = 0
    rows: list[dict[str, object]] = []
    schema = _schema(name, files, columns)
    with pq.ParquetWriter(path, schema) as writer:
        for row in _rows(name, files, columns, has_images=_IMAGES.name in schema.names):
            num_records += 1
            if row.identity in seen:
                continue
            seen.add(row.identity)
            first = first or row
            rows.append(_as_table_row(row, index=len(seen) - 1, split=split))
            num_waiting_bytes += sum(map(len, row.images))
            if len(rows) == _ROWS_PER_GROUP or num_waiting_bytes > _BYTES_PER_GROUP:
                writer.write_table(pa.Table.from_pylist(rows, schema=schema))
                rows, num_waiting_bytes = [], 0
                report(f"{len(seen):,} rows")
        if rows:
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))
    if first is None:
        raise DataError(f"{files[0]} has no record")
    return WrittenSplit(
        path=path,
        num_rows=len(seen),
        num_repeated=num_records - len(seen),
        first="\n".join(f"{message['role']}: {message['content']}" for message in first.prompt),
        first_truth=first.truth if first.truth else first.response or "",
    )


def _schema(name: DataSetName, files: Sequence[Path], columns: RecordColumns) -> pa.Schema:
    """Return the columns of the table: images where the first record has a column for them."""
    if name is DataSetName.HARBOR:
        return _TASK_SCHEMA
    first = next(read_records(files[0]), {})
    return SCHEMA.append(_IMAGES) if _images_key(name, first, columns) is not None else SCHEMA


def _images_key(name: DataSetName, record: _Record, columns: RecordColumns) -> str | None:
    keys = {DataSetName.ROWS: columns.images, DataSetName.GEO3K: ("images",)}.get(name, ())
    return next((key for key in keys if key in record), None)


def _as_table_row(row: _Row, *, index: int, split: str) -> dict[str, object]:
    return {
        "data_source": row.source,
        "prompt": row.prompt,
        "reward_model": {"style": "rule", "ground_truth": row.truth},
        "extra_info": {"index": index, "split": split, "task": row.task},
        "response": row.response,
        _IMAGES.name: [{"bytes": image, "path": None} for image in row.images],
    }


def _rows(name: DataSetName, files: Iterable[Path], columns: RecordColumns, *, has_images: bool) -> Iterator[_Row]:
    """Yield the rows; at the end of a file raise a DataError that names its first bad record and counts the others."""
    for path in files:
        if name is DataSetName.HARBOR:
            yield from _harbor_rows(path)
            continue
        errors: list[str] = []
        for number, record in enumerate(read_records(path), start=1):
            try:
                row = _with_images(_row(name, record, columns, path), name, record, columns, path.parent)
                if row.images and not has_images:
                    raise _RecordError("has images, and the first record no column for them; give it an empty list")
            except (_RecordError, ImageError) as error:
                errors.append(f"record {number}: {error}")
            else:
                yield row
        if errors:
            others = [error.partition(":")[0].removeprefix("record ") for error in errors[1:]]
            rest = f" ({len(others)} more bad records: {first_few(others)})" if others else ""
            raise DataError(f"{path} {errors[0]}{rest}; nothing was written")


def _with_images(row: _Row, name: DataSetName, record: _Record, columns: RecordColumns, folder: Path) -> _Row:
    """Return the row with its images, each of which can be read, and with a mark for each in its prompt."""
    key = _images_key(name, record, columns)
    value = None if key is None else record[key]
    listed = value if isinstance(value, list) else [value] if value else []
    if not listed:
        return row
    images = tuple(_checked_image(each, number, folder) for number, each in enumerate(listed))
    num_marks = sum(message["content"].count(IMAGE_MARK) for message in row.prompt)
    if num_marks not in (0, len(images)):
        raise _RecordError(f"{len(images)} images, and {num_marks} places ({IMAGE_MARK}) for them in its prompt")
    if num_marks == 0:
        place = next((place for place, message in enumerate(row.prompt) if message["role"] != "system"), 0)
        asked = {**row.prompt[place], "content": IMAGE_MARK * len(images) + row.prompt[place]["content"]}
        row = replace(row, prompt=[*row.prompt[:place], asked, *row.prompt[place + 1 :]])
    return replace(row, images=images)


def _checked_image(value: JsonValue | bytes, number: int, folder: Path) -> bytes:
    """Return the bytes of an image: as they are, or of the file at a path relative to that of the record."""
    content = (value.get("bytes") or value.get("path")) if isinstance(value, dict) else value
    try:
        if not content or not isinstance(content, bytes | str):
            raise ImageError("has neither bytes nor a path")
        raw = content if isinstance(content, bytes) else read_image(folder / content)
        decode(raw)
    except ImageError as error:
        raise ImageError(f"image {number}: {error}") from None
    return raw


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
            source = "DigitalLearningGmbH/MATH-lighteval"
            return _Row(prompt=_asked(record, "problem", _BOXED), source=source, truth=boxed, response=solution)
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
        case DataSetName.GEO3K:
            return _geometry(record)
        case _:
            return _any_row(record, columns, path)


def _geometry(record: _Record) -> _Row:
    if not record.get("images"):
        raise _RecordError("has no images; is this Geometry3K?")
    prompt = _asked(record, "problem", _BOXED)
    return _Row(prompt=prompt, source="hiyouga/geometry3k", truth=_text(record, "answer"))


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
        if not isinstance(message, dict) or (content := _content(message.get("content"))) is None:
            raise _RecordError("a message without role and content, both strings")
        found.append({"role": str(message.get("role")), "content": content})
    return found


def _content(value: JsonValue) -> str | None:
    """Return the text of a message, with a mark for each of its parts that is an image; None for anything else."""
    if not isinstance(value, list):
        return value if isinstance(value, str) else None
    parts = [part if isinstance(part, dict) else {} for part in value]
    texts = [IMAGE_MARK if part.get("type") == "image" else part.get("text") for part in parts]
    return "".join(text for text in texts if isinstance(text, str)) if all(texts) else None


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
                    has_bytes = any("binary" in str(kind) for kind in file.schema_arrow.types)
                    for batch in file.iter_batches(batch_size=_IMAGE_ROWS_PER_READ if has_bytes else _ROWS_PER_READ):
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
