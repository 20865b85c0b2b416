from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.config.recipe import DataConfig
from megarl.data.rows import DataRow, advise_template, check_files, read_rows
from megarl.errors import DataError
from tests.data.parquet_rows import NO_COLUMN, WriteParquet, make_row

CHAT = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}]
ANSWERED = [*CHAT, {"role": "assistant", "content": "2"}]


def read(*files: Path, as_demonstrations: bool = False, **keys: str | None) -> list[DataRow]:
    config = DataConfig.model_validate({"train": files, **keys})
    return read_rows(files, config, as_demonstrations=as_demonstrations)


def complaint_of(*files: Path, as_demonstrations: bool = False, **keys: str | None) -> str:
    with pytest.raises(DataError) as caught:
        read(*files, as_demonstrations=as_demonstrations, **keys)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_row_keeps_what_the_file_says(write_parquet: WriteParquet) -> None:
    (row,) = read(write_parquet(make_row(CHAT)))
    assert row.uid == "train.parquet:0"
    assert list(row.chat) == CHAT
    assert (row.data_source, row.ground_truth, row.continuation) == ("sums", "2", ())
    assert row.extra_info == {"index": 7, "tags": ["easy"]}


def test_a_string_is_one_user_message(write_parquet: WriteParquet) -> None:
    (row,) = read(write_parquet(make_row("1+1=", extra_info=NO_COLUMN)))
    assert list(row.chat) == [{"role": "user", "content": "1+1="}]
    assert row.extra_info == {}


def test_equal_rows_have_distinct_names(write_parquet: WriteParquet) -> None:
    first = write_parquet(make_row(), make_row(), name="first.parquet")
    second = write_parquet(make_row(), name="second.parquet")
    assert [row.uid for row in read(first, second)] == ["first.parquet:0", "first.parquet:1", "second.parquet:0"]
    same_name = write_parquet(make_row(), name="other/first.parquet")
    uids = [row.uid for row in read(first, same_name)]
    assert uids == [f"{first}:0", f"{first}:1", f"{same_name}:0"]


def test_keys_name_the_columns(write_parquet: WriteParquet) -> None:
    path = write_parquet(make_row(NO_COLUMN, question="1+1=", answer="2"))
    (row,) = read(path, as_demonstrations=True, prompt_key="question", response_key="answer")
    assert (row.chat[0]["content"], row.continuation[0]["content"]) == ("1+1=", "2")


def test_a_key_may_name_a_field_of_a_column(write_parquet: WriteParquet) -> None:
    path = write_parquet(make_row(NO_COLUMN, extra_info={"question": "1+1=", "answer": "2"}))
    keys = {"prompt_key": "extra_info.question", "response_key": "extra_info.answer"}
    (row,) = read(path, as_demonstrations=True, **keys)
    assert (row.chat[0]["content"], row.continuation[0]["content"]) == ("1+1=", "2")
    assert "has no column extra_info.text" in complaint_of(path, prompt_key="extra_info.text")
    assert "has no column other.text" in complaint_of(path, prompt_key="other.text")


def test_a_message_keeps_the_other_keys_it_has(write_parquet: WriteParquet) -> None:
    chat = [{"role": "user", "content": "hi", "name": "ada"}, {"role": "user", "content": "1+1=", "name": None}]
    (row,) = read(write_parquet(make_row(chat)))
    assert list(row.chat) == [chat[0], {"role": "user", "content": "1+1="}]


def test_a_demonstration_is_the_response_or_the_last_answer(write_parquet: WriteParquet) -> None:
    bare = {"data_source": NO_COLUMN, "reward_model": NO_COLUMN}
    for row in (make_row(CHAT, response="2", **bare), make_row(ANSWERED, **bare)):
        (demonstration,) = read(write_parquet(row), as_demonstrations=True)
        assert list(demonstration.chat) == CHAT
        assert list(demonstration.continuation) == [{"role": "assistant", "content": "2"}]
        assert (demonstration.data_source, demonstration.ground_truth) == ("train.parquet", "")


def test_a_categorical_column_is_text(write_parquet: WriteParquet, tmp_path: Path) -> None:
    table = pq.read_table(write_parquet(make_row(), make_row()))
    encoded = table.set_column(1, "data_source", table["data_source"].dictionary_encode())
    pq.write_table(encoded, tmp_path / "categorical.parquet")
    assert {row.data_source for row in read(tmp_path / "categorical.parquet")} == {"sums"}


@pytest.mark.parametrize(
    ("columns", "complaint"),
    [
        ({"prompt": NO_COLUMN}, "has no column prompt"),
        ({"reward_model": NO_COLUMN}, "has no column reward_model"),
        ({"prompt": 3}, "column prompt has type int64; it must be a string, or a list of messages"),
        ({"prompt": [{"role": "user"}]}, "column prompt has type list<"),
        ({"prompt": [{"role": "user", "content": ["a"]}]}, "column prompt has type list<"),
        ({"reward_model": {"style": "rule"}}, "has no column reward_model.ground_truth"),
        ({"reward_model": "2"}, "has no column reward_model.ground_truth"),
        ({"data_source": 1}, "column data_source has type int64; it must be a string"),
        ({"extra_info": {"at": datetime(2026, 1, 1, tzinfo=UTC)}}, "column extra_info has type struct<at: timestamp"),
        ({"extra_info": "{}"}, "column extra_info has type string"),
        ({"response": 2}, "column response has type int64"),
    ],
)
def test_a_wrong_column_is_named_with_what_it_must_be(
    columns: dict[str, object], complaint: str, write_parquet: WriteParquet
) -> None:
    path = write_parquet(make_row(**columns))
    assert complaint in complaint_of(path)
    assert str(path) in complaint_of(path)
    with pytest.raises(DataError):
        check_files([path], DataConfig(train=(path,)), as_demonstrations=False)


@pytest.mark.parametrize(
    ("columns", "complaint"),
    [
        ({"prompt": None}, "row 1, column prompt: is null"),
        ({"prompt": []}, "row 1, column prompt: is empty"),
        ({"prompt": [{"role": "user", "content": None}]}, "row 1, column prompt: message 0 has no content"),
        ({"prompt": [None]}, "row 1, column prompt: message 0 has no role"),
        ({"prompt": ANSWERED}, "row 1, column prompt: no question is left to answer"),
        ({"data_source": None}, "row 1, column data_source: is null"),
        ({"reward_model": None}, "row 1, column reward_model.ground_truth: is null"),
        ({"reward_model": {"style": "rule", "ground_truth": None}}, "row 1, column reward_model.ground_truth: is null"),
    ],
)
def test_a_bad_row_is_named_and_the_others_counted(
    columns: dict[str, object], complaint: str, write_parquet: WriteParquet
) -> None:
    good, bad = make_row(CHAT), make_row(**{"prompt": CHAT, **columns})
    path = write_parquet(good, bad, good, bad, bad)
    message = complaint_of(path)
    assert f"{path} {complaint}" in message
    assert message.endswith("(2 more bad rows in this file)")


def test_a_demonstration_without_an_answer_is_refused(write_parquet: WriteParquet) -> None:
    no_answer = write_parquet(make_row(CHAT), name="no_answer.parquet")
    assert "row 0, column prompt: the last message is the user's" in complaint_of(no_answer, as_demonstrations=True)
    no_text = write_parquet(make_row(CHAT, response="2"), make_row(CHAT, response=None), name="no_text.parquet")
    assert "row 1, column response: is null" in complaint_of(no_text, as_demonstrations=True)
    only_answer = write_parquet(make_row([{"role": "assistant", "content": "2"}]), name="only_answer.parquet")
    assert "no question is left" in complaint_of(only_answer, as_demonstrations=True)


def test_a_file_that_is_not_there_empty_or_no_parquet_is_refused(tmp_path: Path, write_parquet: WriteParquet) -> None:
    assert "does not exist" in complaint_of(tmp_path / "nothing.parquet")
    schema = pq.read_schema(write_parquet(make_row()))
    assert "is empty" in complaint_of(write_parquet(name="empty.parquet", schema=schema))
    (tmp_path / "text.parquet").write_text("prompt\n1+1=\n")
    assert "cannot be read as parquet" in complaint_of(tmp_path / "text.parquet")
    path = write_parquet(make_row())
    assert "is named 2 times" in complaint_of(path, path)


def test_a_corrupt_file_is_a_data_error(write_parquet: WriteParquet) -> None:
    path = write_parquet(*(make_row(f"{number}+1=") for number in range(2000)))
    data = bytearray(path.read_bytes())
    data[4:4000] = bytes(3996)
    path.write_bytes(bytes(data))
    assert "cannot be read" in complaint_of(path)


def test_a_map_of_strings_is_extra_info(write_parquet: WriteParquet) -> None:
    schema = pq.read_schema(write_parquet(make_row()))
    schema = schema.set(schema.get_field_index("extra_info"), pa.field("extra_info", pa.map_(pa.string(), pa.int64())))
    (row,) = read(write_parquet(make_row(extra_info={"index": 3}), name="map.parquet", schema=schema))
    assert row.extra_info == {"index": 3}


def test_any_column_can_be_the_ground_truth(write_parquet: WriteParquet) -> None:
    bare = {"reward_model": NO_COLUMN, "data_source": NO_COLUMN}
    (row,) = read(write_parquet(make_row(answer=[1, 2], **bare)), ground_truth_key="answer")
    assert (row.ground_truth, row.data_source) == ("[1, 2]", "train.parquet")
    (row,) = read(write_parquet(make_row(meta={"truth": 3, "task": "sum"}, **bare)), ground_truth_key="meta.truth")
    assert row.ground_truth == "3"
    (row,) = read(write_parquet(make_row(task="sum", **bare)), ground_truth_key=None, source_key="task")
    assert (row.ground_truth, row.data_source) == ("", "sum")


def test_a_column_that_was_named_must_be_there(write_parquet: WriteParquet) -> None:
    path = write_parquet(make_row(data_source=NO_COLUMN))
    assert read(path)[0].data_source == "train.parquet"
    assert "has no column data_source" in complaint_of(path, source_key="data_source")
    assert "has no column truth, text, a number" in complaint_of(path, ground_truth_key="truth")
    assert "null where the reward needs none" in complaint_of(path, ground_truth_key="truth")


def test_a_file_of_another_format_is_refused_with_the_command_that_converts_it(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1="}\n')
    assert "`megarl data prepare rows --from" in complaint_of(tmp_path / "train.jsonl")


TURNS = [
    *CHAT,
    {"role": "assistant", "content": "2", "weight": 0},
    {"role": "user", "content": "2+2="},
    {"role": "assistant", "content": "4", "weight": 1},
    {"role": "user", "content": "3+3="},
    {"role": "assistant", "content": "6", "weight": 1},
]


def test_a_conversation_is_imitated_from_its_first_answer_that_counts(write_parquet: WriteParquet) -> None:
    path = write_parquet(make_row(TURNS))
    (every,) = read(path, as_demonstrations=True)
    assert [message["content"] for message in every.chat] == ["Add.", "1+1=", "2", "2+2="]
    assert [message["content"] for message in every.continuation] == ["4", "3+3=", "6"]
    (last,) = read(path, as_demonstrations=True, imitates="last_answer")
    assert [message["content"] for message in last.continuation] == ["6"]


def test_raw_prompts_are_strings(write_parquet: WriteParquet) -> None:
    assert "is a list of messages, and data.template raw takes" in complaint_of(
        write_parquet(make_row(CHAT)), template="raw"
    )


def test_prompts_that_a_template_has_written_are_noticed(write_parquet: WriteParquet) -> None:
    rendered = "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"
    path = write_parquet(make_row("1+1="), make_row(rendered))
    (warning,) = advise_template(DataConfig(train=(path,)))
    assert str(warning).startswith(f"data.template: prompts of {path} have <|im_start|> in them")
    assert not list(advise_template(DataConfig(train=(path,), template="raw")))
    assert not list(advise_template(DataConfig(train=(write_parquet(make_row("1+1="), name="plain.parquet"),))))


def test_text_that_is_not_utf_8_is_one_line(tmp_path: Path) -> None:
    row = {**make_row(), "ground_truth": "2"}
    table = pa.Table.from_pylist([row])
    bad = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff\xfe"], pa.binary()).buffers())
    table = table.set_column(table.schema.get_field_index("data_source"), "data_source", bad)
    pq.write_table(table, tmp_path / "bad.parquet")
    assert complaint_of(tmp_path / "bad.parquet").startswith(f"{tmp_path / 'bad.parquet'} cannot be read to its end: ")


def test_a_field_that_is_there_twice_is_one_line(tmp_path: Path) -> None:
    table = pa.Table.from_pylist([make_row()])
    at = table.schema.get_field_index("extra_info")
    struct = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], fields=[pa.field("a", pa.int64())] * 2)
    pairs = pa.array([[("a", "1"), ("a", "2")]], pa.map_(pa.string(), pa.string()))
    for name, column in (("struct", struct), ("map", pairs)):
        path = tmp_path / f"{name}.parquet"
        pq.write_table(table.set_column(at, "extra_info", column), path)
        assert str(path) in complaint_of(path)


def test_a_column_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    table = pa.Table.from_pylist([make_row()])
    pq.write_table(table.append_column("data_source", pa.array(["other"])), tmp_path / "twice.parquet")
    path = tmp_path / "twice.parquet"
    assert complaint_of(path) == f"{path} has the column data_source twice; rename or remove one"
