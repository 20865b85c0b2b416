"""Reads parquet files as typed rows, finds every mistake in them, and warns of prompts that look rendered already.

Knows no tokenizer and no model. The name of a row is its file and its number there, from 0: rows of equal content stay
distinct, and the name survives a move of the folder. (`extra_info.index` does not work: files that are used together
often repeat it.)
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from megarl.config.recipe import DataConfig
from megarl.errors import DataError, Problem, first_line
from megarl.types import JsonValue

_EXTRA = "extra_info"

_ROWS_PER_READ = 1024
_IMAGE_ROWS_PER_READ = 16
IMAGE_MARK = "<image>"
"""Stands for an image in a message, as in data sets for verl."""
_CONVERTIBLE = (".jsonl", ".json", ".csv", ".arrow")
_NUM_LOOKED_AT = 64
_TEMPLATE_MARKS = ("<|im_start|>", "<|start_header_id|>", "[INST]", "<start_of_turn>", "<|user|>", "<\uff5cUser\uff5c>")
"""Texts that chat templates of common models write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRow:
    """One checked row; the chat ends where the assistant has to answer."""

    uid: str
    chat: tuple[Mapping[str, JsonValue], ...]
    data_source: str
    ground_truth: str
    extra_info: Mapping[str, JsonValue]
    continuation: tuple[Mapping[str, JsonValue], ...]
    """The rest of the conversation: answers to imitate, and messages between them. Empty unless rows are read as
    demonstrations."""
    images: tuple[bytes | Path, ...] = ()
    """One for each of the chat's parts of type image, in order."""


def read_rows(files: Sequence[Path], config: DataConfig, *, as_demonstrations: bool) -> list[DataRow]:
    """Return all rows of all files, in order. A DataError names the first bad row of a file and counts the others."""
    check_files(files, config, as_demonstrations=as_demonstrations)
    rows: list[DataRow] = []
    for _, batches in groupby(row_batches(files, row_keys(config)), key=lambda batch: batch.path):
        errors: list[str] = []
        for batch in batches:
            good, bad = checked_rows(batch, config, as_demonstrations=as_demonstrations)
            rows += good
            errors += bad
        refuse_bad_rows(errors)
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBatch:
    """Some rows of a file as they stand there."""

    path: Path
    name: str
    """The file in the names of its rows."""
    first: int
    """The number of the first row in the file."""
    rows: pa.RecordBatch


def row_keys(config: DataConfig) -> tuple[str, ...]:
    """Return the columns, or fields of columns, that rows are made of."""
    keys = (
        config.prompt_key,
        config.response_key,
        config.source_key,
        config.ground_truth_key,
        config.images_key,
        _EXTRA,
    )
    return tuple(key for key in keys if key is not None)


def row_batches(files: Sequence[Path], keys: Sequence[str], *, images_key: str | None = None) -> Iterator[RowBatch]:
    """Yield all rows in order; one batch after the other is in memory. Rows with images are few at a time."""
    columns = dict.fromkeys(part for key in keys for part in (key, key.partition(".")[0]))
    for path, name in zip(files, _file_names(files), strict=True):
        first = 0
        try:
            with pq.ParquetFile(path) as file:
                present = [column for column in columns if column in file.schema_arrow.names]
                num_rows = _IMAGE_ROWS_PER_READ if images_key in present else _ROWS_PER_READ
                for rows in file.iter_batches(batch_size=num_rows, columns=present):
                    yield RowBatch(path=path, name=name, first=first, rows=rows)
                    first += len(rows)
        except (pa.ArrowException, OSError, ValueError, KeyError) as error:
            raise _unreadable(path, error) from error


def checked_rows(batch: RowBatch, config: DataConfig, *, as_demonstrations: bool) -> tuple[list[DataRow], list[str]]:
    """Return the good rows, and a line about each bad one."""
    rows: list[DataRow] = []
    errors: list[str] = []
    for number, raw in enumerate(_raw(batch), start=batch.first):
        try:
            row = _row(raw, f"{batch.name}:{number}", config, as_demonstrations=as_demonstrations)
            rows.append(_with_images(row, raw, config, folder=batch.path.parent))
        except _RowError as error:
            errors.append(f"{batch.path} row {number}, {error}")
    return rows, errors


def refuse_bad_rows(errors: Sequence[str]) -> None:
    """Raise a DataError about the bad rows of a file, if there are any."""
    if errors:
        others = f" ({len(errors) - 1} more bad rows in this file)" if len(errors) > 1 else ""
        raise DataError(f"{errors[0]}{others}")


def num_rows_of(files: Sequence[Path]) -> int:
    return sum(int(pq.read_metadata(path).num_rows) for path in files)


def check_files(files: Sequence[Path], config: DataConfig, *, as_demonstrations: bool) -> None:
    """Check everything but the rows: files, row counts, columns and their types."""
    for path, count in Counter(path.resolve() for path in files).items():
        if count > 1:
            raise DataError(f"{path} is named {count} times; name each file once")
    for path in files:
        _check_file(path, _columns(config, as_demonstrations=as_demonstrations))


def check_pairs(files: Sequence[Path], config: DataConfig) -> None:
    """Raise a DataError for a file without the two answers of each pair."""
    for name, key in (("chosen", config.chosen_key), ("rejected", config.rejected_key)):
        column = _Column(
            name=key, accepts=_is_text, wanted=f"the {name} answer, a string", remedy=f"; data.{name}_key names it"
        )
        for path in files:
            _check_file(path, (column,))


def advise_template(config: DataConfig) -> Iterator[Problem]:
    """Yield a warning for prompts that hold text of a chat template, which would be applied a second time."""
    if config.template == "raw":
        return
    for path in config.train:
        batch = next(row_batches([path], [config.prompt_key]), None)
        rows = [] if batch is None else _raw(replace(batch, rows=batch.rows.slice(0, _NUM_LOOKED_AT)))
        prompts = [str(_value(row, config.prompt_key)) for row in rows]
        marked = [mark for prompt in prompts for mark in _TEMPLATE_MARKS if mark in prompt]
        if marked:
            message = f"prompts of {path} have {marked[0]} in them: are they rendered already? Then set it to raw"
            yield Problem(key="data.template", message=message)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    name: str
    accepts: Callable[[pa.DataType], bool]
    wanted: str
    is_required: bool = True
    remedy: str = ""


def _columns(config: DataConfig, *, as_demonstrations: bool) -> tuple[_Column, ...]:
    """Return the columns of a data set; demonstrations need no reward."""
    return (
        _Column(
            name=config.prompt_key,
            accepts=lambda kind: _is_text(kind) or _is_chat(kind),
            wanted="a string, or a list of messages with role and content strings, or parts of content",
            remedy="; data.prompt_key names the column",
        ),
        _Column(name=config.response_key, accepts=_is_text, wanted="a string", is_required=False),
        _Column(
            name=config.source_key,
            accepts=_is_text,
            wanted="a string",
            is_required="source_key" in config.model_fields_set and not as_demonstrations,
            remedy="; data.source_key names the column",
        ),
        *(
            _truth_column(key, is_required=not as_demonstrations)
            for key in (config.ground_truth_key,)
            if key is not None
        ),
        *(
            _Column(
                name=key,
                accepts=lambda kind: pa.types.is_null(kind) or (_is_list(kind) and _is_image(kind.value_type)),
                wanted="a list of images: bytes, paths, or structs with bytes or path",
                is_required=False,
                remedy="; data.images_key names the column, null where there is none",
            )
            for key in (config.images_key,)
            if key is not None
        ),
        _Column(
            name=_EXTRA,
            accepts=lambda kind: pa.types.is_null(kind) or (_is_object(kind) and _is_json(kind)),
            wanted="a struct of strings, numbers, booleans, lists and structs",
            is_required=False,
        ),
    )


def _truth_column(key: str, *, is_required: bool) -> _Column:
    return _Column(
        name=key,
        accepts=_is_json,
        wanted="text, a number, a list or a struct",
        is_required=is_required,
        remedy="; data.ground_truth_key names the column, null where the reward needs none",
    )


def _check_file(path: Path, columns: Sequence[_Column]) -> None:
    if not path.is_file():
        raise DataError(f"{path} does not exist; data.train and data.eval name parquet files")
    if path.suffix in _CONVERTIBLE:
        command = f"megarl data prepare rows --from {path} --out DIR"
        raise DataError(f"{path} is not a parquet file; `{command}` writes one")
    try:
        schema, num_rows = pq.read_schema(path), pq.read_metadata(path).num_rows
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as parquet: {first_line(error)}") from error
    if num_rows == 0:
        raise DataError(f"{path} is empty; a data set needs at least one row")
    kinds = {field.name: field.type for field in schema}
    twice = [name for name, count in Counter(schema.names).items() if count > 1]
    if twice:
        raise DataError(f"{path} has the column {twice[0]} twice; rename or remove one")
    for column in columns:
        kind = _kind(kinds, column.name)
        if kind is None and column.is_required:
            has = ", ".join(kinds)
            raise DataError(f"{path} has no column {column.name}, {column.wanted}{column.remedy}; it has {has}")
        if kind is not None and not column.accepts(kind):
            raise DataError(f"{path}, column {column.name} has type {kind}; it must be {column.wanted}")


def _file_names(files: Sequence[Path]) -> list[str]:
    """Return the name of each file, or its path as in the recipe if another file has the same name."""
    counts = Counter(path.name for path in files)
    return [path.name if counts[path.name] == 1 else str(path) for path in files]


def _raw(batch: RowBatch) -> list[Mapping[str, JsonValue]]:
    try:
        rows: list[Mapping[str, JsonValue]] = batch.rows.to_pylist(maps_as_pydicts="strict")
    except (pa.ArrowException, ValueError, KeyError) as error:
        raise _unreadable(batch.path, error) from error
    return rows


def _unreadable(path: Path, error: Exception) -> DataError:
    # Text that is not UTF-8, a field of a struct or a key of a map that is there twice.
    return DataError(f"{path} cannot be read to its end: {first_line(error)}")


class _RowError(DataError):
    """A fault of a row; the caller adds which row."""


def _row(raw: Mapping[str, JsonValue], uid: str, config: DataConfig, *, as_demonstrations: bool) -> DataRow:
    chat = _chat(_value(raw, config.prompt_key), config)
    continuation: tuple[Mapping[str, JsonValue], ...] = ()
    if as_demonstrations and _has(raw, config.response_key):
        continuation = ({"role": "assistant", "content": _text(raw, config.response_key)},)
    elif as_demonstrations:
        first = _first_answer(chat, config)
        chat, continuation = chat[:first], chat[first:]
    if not chat or chat[-1]["role"] == "assistant":
        raise _RowError(f"column {config.prompt_key}: no question is left to answer; end it with a user message")
    extra_info = raw.get(_EXTRA)
    return DataRow(
        uid=uid,
        chat=chat,
        data_source=_text(raw, config.source_key) if _has(raw, config.source_key) else uid.rpartition(":")[0],
        # A demonstration is not scored, so the ground truth may be missing.
        ground_truth=_truth(raw, config.ground_truth_key, is_required=not as_demonstrations),
        extra_info=extra_info if isinstance(extra_info, dict) else {},
        continuation=continuation,
    )


def _with_images(row: DataRow, raw: Mapping[str, JsonValue], config: DataConfig, *, folder: Path) -> DataRow:
    """Return the row with its images, and parts of content where messages have marks for them."""
    listed = None if config.images_key is None else _value(raw, config.images_key)
    if not listed:
        return row
    if config.template == "raw":
        raise _RowError(f"column {config.images_key}: data.template raw has no places for images; set it to chat")
    assert isinstance(listed, list), f"{config.images_key} is a {type(listed).__name__}, the schema has a list"
    images = tuple(_image(each, number, config, folder) for number, each in enumerate(listed))
    return replace(row, chat=tuple(map(_in_parts, row.chat)), images=images)


def _image(value: object, number: int, config: DataConfig, folder: Path) -> bytes | Path:
    content = (value.get("bytes") or value.get("path")) if isinstance(value, dict) else value
    if not content or not isinstance(content, bytes | str):
        raise _RowError(f"column {config.images_key}: image {number} has neither bytes nor a path")
    return content if isinstance(content, bytes) else folder / content


def _in_parts(message: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
    content = message["content"]
    if not isinstance(content, str) or IMAGE_MARK not in content:
        return message
    parts: list[JsonValue] = []
    for number, text in enumerate(content.split(IMAGE_MARK)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": text}] if text else []
    return {**message, "content": parts}


def _truth(raw: Mapping[str, JsonValue], key: str | None, *, is_required: bool) -> str:
    """Return the ground truth as text: a string as it is, anything else as JSON."""
    value = None if key is None else _value(raw, key)
    if value is None and key is not None and is_required:
        raise _RowError(f"column {key}: is null; give it a value")
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)


def _has(raw: Mapping[str, JsonValue], key: str) -> bool:
    name, _, field = key.partition(".")
    inner = raw.get(name)
    return key in raw or (isinstance(inner, dict) and field in inner)


def _value(raw: Mapping[str, JsonValue], key: str) -> JsonValue:
    """Return the value of a column, or of a field of one: `a.b` is the field b of the column a."""
    if key in raw:
        return raw[key]
    name, _, field = key.partition(".")
    inner = raw.get(name)
    return inner.get(field) if isinstance(inner, dict) else None


def _chat(value: JsonValue, config: DataConfig) -> tuple[Mapping[str, JsonValue], ...]:
    column = config.prompt_key
    if not value:
        raise _RowError(f"column {column}: is {'null' if value is None else 'empty'}; give it a message")
    if isinstance(value, str):
        return ({"role": "user", "content": value},)
    if config.template == "raw":
        raise _RowError(f"column {column}: is a list of messages, and data.template raw takes strings; set it to chat")
    assert isinstance(value, list), f"{column} is a {type(value).__name__}, the schema has a list"
    return tuple(_message(message, column, place) for place, message in enumerate(value))


def _message(value: JsonValue, column: str, place: int) -> Mapping[str, JsonValue]:
    # Parquet gives every message the keys of all messages; missing ones are null.
    message = {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else {}
    if isinstance(parts := message.get("content"), list):
        message["content"] = _content(parts)
    if "tool_calls" in message:
        message.setdefault("content", "")
    for key in ("role", "content"):
        if key not in message:
            raise _RowError(f"column {column}: message {place} has no {key}; give it a string")
    return message


def _content(value: list[JsonValue]) -> str | list[JsonValue]:
    """Return parts of content without their missing fields; a string where all of them are texts."""
    parts = [{key: item for key, item in part.items() if item is not None} for part in value if isinstance(part, dict)]
    if all(part.get("type", "text") == "text" for part in parts):
        return "".join(str(part.get("text", "")) for part in parts)
    return [dict(part) for part in parts]


def _first_answer(chat: Sequence[Mapping[str, JsonValue]], config: DataConfig) -> int:
    """Return the place of the first message to imitate."""
    answer = chat[-1]
    if answer["role"] != "assistant":
        raise _RowError(
            f"column {config.prompt_key}: the last message is the {answer['role']}'s, not an assistant's answer; "
            f"add one, or a column {config.response_key}"
        )
    places = [place for place, message in enumerate(chat) if is_imitated(message)]
    if not places:
        raise _RowError(f"column {config.prompt_key}: every answer has weight 0; leave the row out")
    return places[0] if config.imitates == "every_answer" else len(chat) - 1


def is_imitated(message: Mapping[str, JsonValue]) -> bool:
    """Whether a message is an answer that the loss counts."""
    return message["role"] == "assistant" and message.get("weight", 1) != 0


def _text(raw: Mapping[str, JsonValue], key: str) -> str:
    value = _value(raw, key)
    if not isinstance(value, str):
        raise _RowError(f"column {key}: is null; give it a string")
    return value


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_object(kind: pa.DataType) -> bool:
    return bool(pa.types.is_struct(kind) or (pa.types.is_map(kind) and _is_text(kind.key_type)))


def _is_chat(kind: pa.DataType) -> bool:
    if not _is_list(kind) or not _has_text(kind.value_type, "role"):
        return False
    content = _field(kind.value_type, "content")
    is_parts = content is not None and _is_list(content) and _has_text(content.value_type, "type")
    return is_parts or _has_text(kind.value_type, "content")


def _is_image(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(_is_image(field.type) for field in kind if field.name in ("bytes", "path"))
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or _is_text(kind))


def _has_text(kind: pa.DataType, key: str) -> bool:
    field = _field(kind, key)
    return field is not None and _is_text(field)


def _kind(kinds: Mapping[str, pa.DataType], key: str) -> pa.DataType | None:
    """Return the type of a column, or of a field of one; None where there is no such column."""
    name, _, field = key.partition(".")
    if key in kinds or not field:
        return kinds.get(key)
    inner = kinds.get(name)
    return _field(inner, field) if inner is not None else None


def _field(kind: pa.DataType, key: str) -> pa.DataType | None:
    fields = kind if pa.types.is_struct(kind) else ()
    return next((field.type for field in fields if field.name == key), None)


def _is_json(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return all(_is_json(field.type) for field in kind)
    if pa.types.is_map(kind):
        return _is_json(kind.item_type)
    if _is_list(kind):
        return _is_json(kind.value_type)
    is_plain = pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)
    return bool(is_plain or pa.types.is_null(kind) or _is_text(kind))
