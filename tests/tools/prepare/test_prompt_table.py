"""Data sets in the formats that people have become tables that a run reads."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from megarl.cli.main import run
from megarl.config.recipe import DataConfig
from megarl.data.rows import DataRow, read_rows
from megarl.errors import DataError
from megarl.tools.prepare import DataSetName
from megarl.tools.prepare.prompt_table import RecordColumns, prepare

GSM8K = [{"question": f"What is {n} + 1?", "answer": f"It is {n + 1}.\n#### {n + 1:,}"} for n in (1, 1200)]


def prepared(
    name: DataSetName, source: Path, out: Path, columns: RecordColumns | None = None
) -> dict[str, list[DataRow]]:
    written = prepare(name, source, out, columns or RecordColumns(), report=print)
    paths = [split.path for split in written]
    return {path.stem: read_rows([path], DataConfig(train=(path,)), as_demonstrations=False) for path in paths}


def write_jsonl(path: Path, records: Sequence[Mapping[str, object]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def test_gsm8k_has_its_number_as_ground_truth_and_its_solution_to_imitate(tmp_path: Path) -> None:
    folder = tmp_path / "gsm8k"
    folder.mkdir()
    for name in ("train-00000-of-00001", "test-00000-of-00001"):
        pq.write_table(pa.Table.from_pylist(GSM8K), folder / f"{name}.parquet")
    splits = prepared(DataSetName.GSM8K, folder, tmp_path / "out")
    assert sorted(splits) == ["test", "train"]
    first, second = splits["train"]
    assert (first.data_source, first.ground_truth, second.ground_truth) == ("openai/gsm8k", "2", "1201")
    assert str(first.chat[0]["content"]).startswith("What is 1 + 1?\n")
    path = tmp_path / "out" / "train.parquet"
    (demonstration, _) = read_rows([path], DataConfig(train=(path,)), as_demonstrations=True)
    assert demonstration.continuation[0]["content"] == "It is 2.\n#### 2"


def test_math_has_the_last_box_as_ground_truth(tmp_path: Path) -> None:
    record = {"problem": "x?", "solution": "Not \\boxed{1}, but \\boxed{\\frac{1}{2}}."}
    source = write_jsonl(tmp_path / "math.jsonl", [record])
    assert prepared(DataSetName.MATH, source, tmp_path / "out")["train"][0].ground_truth == "\\frac{1}{2}"


def test_repeated_prompts_of_dapo_math_are_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": "x?"}],
        "reward_model": {"ground_truth": "34", "style": "rule"},
    }
    source = tmp_path / "dapo.parquet"
    pq.write_table(pa.Table.from_pylist([record] * 5), source)
    assert run(["data", "prepare", "dapo_math", "--from", str(source), "--out", str(tmp_path / "out")]) == 0
    assert "1 rows, 4 repeated ones left out; the first:\n  user: x?\n  -> 34" in capsys.readouterr().out


def test_ultrafeedback_is_imitated(tmp_path: Path) -> None:
    chosen = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    source = write_jsonl(tmp_path / "set" / "train_sft.jsonl", [{"chosen": chosen, "rejected": []}])
    write_jsonl(tmp_path / "set" / "test_sft.jsonl", [{"chosen": chosen, "rejected": []}])
    prepare(DataSetName.ULTRAFEEDBACK, source.parent, tmp_path / "out", RecordColumns(), report=print)
    path = tmp_path / "out" / "test.parquet"
    (row,) = read_rows([path], DataConfig(train=(path,)), as_demonstrations=True)
    assert (row.chat[0]["content"], row.continuation[0]["content"]) == ("hi", "hello")


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "arrow", "parquet"])
def test_records_of_every_format_give_the_same_table(tmp_path: Path, suffix: str) -> None:
    records = [{"q": "1+1=", "a": "2"}, {"q": "2+2=", "a": "4"}]
    path = tmp_path / f"mine.{suffix}"
    match suffix:
        case "jsonl":
            write_jsonl(path, records)
        case "json":
            path.write_text(json.dumps(records))
        case "csv":
            path.write_text("q,a\n1+1=,2\n2+2=,4\n")
        case "arrow":
            table = pa.Table.from_pylist(records)
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
                writer.write_table(table)
        case _:
            pq.write_table(pa.Table.from_pylist(records), path)
    (rows,) = prepared(DataSetName.ROWS, path, tmp_path / "out", RecordColumns(prompt=("q",), answer=("a",))).values()
    assert [(row.chat[0]["content"], row.ground_truth, row.data_source) for row in rows] == [
        ("1+1=", "2", f"mine.{suffix}"),
        ("2+2=", "4", f"mine.{suffix}"),
    ]


def test_a_saved_data_set_of_the_datasets_package_is_read(tmp_path: Path) -> None:
    """Its folders hold Arrow streams, and JSON files that are no records."""
    table = pa.Table.from_pylist([{"prompt": "1+1=", "answer": 2}])
    for split in ("train", "test"):
        folder = tmp_path / "saved" / split
        folder.mkdir(parents=True)
        (folder / "state.json").write_text("{}")
        (folder / "dataset_info.json").write_text("{}")
        path = str(folder / "data-00000-of-00001.arrow")
        with pa.OSFile(path, "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    splits = prepared(DataSetName.ROWS, tmp_path / "saved", tmp_path / "out")
    assert {split: rows[0].ground_truth for split, rows in splits.items()} == {"train": "2", "test": "2"}


def png(colour: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (30, 20), (colour, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def write_pictures(folder: Path, records: Sequence[Mapping[str, object]], *, good: int = 3) -> Path:
    """Write a folder of images with a file of records, as Geometry3K's."""
    (folder / "images").mkdir(parents=True)
    for number in range(good):
        (folder / "images" / f"{number}.png").write_bytes(png(number))
    return write_jsonl(folder / "train.jsonl", records)


def geometry(*images: str, problem: str = "<image>Find x.") -> dict[str, object]:
    return {"images": list(images), "problem": problem, "answer": "3"}


def test_a_folder_of_images_and_a_table_of_bytes_give_the_same_rows(tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "folder", [geometry("images/0.png"), geometry("images/1.png")]).parent
    table = tmp_path / "train.parquet"
    records = [{**geometry(), "images": [{"bytes": png(number), "path": "elsewhere.png"}]} for number in range(2)]
    pq.write_table(pa.Table.from_pylist(records), table)
    rows = [prepared(DataSetName.GEO3K, source, tmp_path / f"out-{source.name}")["train"] for source in (folder, table)]
    assert rows[0] == rows[1]
    # The same question about another image is another question.
    assert [row.images for row in rows[0]] == [(png(0),), (png(1),)]
    (row, _) = rows[0]
    text = "Find x.\nReason step by step, and write the final answer in \\boxed{}."
    assert row.chat[0]["content"] == [{"type": "image"}, {"type": "text", "text": text}]
    assert (row.data_source, row.ground_truth) == ("hiyouga/geometry3k", "3")


@pytest.mark.parametrize(
    ("record", "content"),
    [
        ({"image": "images/0.png", "prompt": "what?"}, "<image>what?"),
        ({"images": ["images/0.png", "images/1.png"], "prompt": "a<image>b<image>"}, "a<image>b<image>"),
        ({"images": [], "prompt": "text"}, "text"),
        (
            {
                "images": ["images/2.png"],
                "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}],
            },
            "a<image>",
        ),
    ],
)
def test_rows_have_their_images_in_their_places(record: dict[str, object], content: str, tmp_path: Path) -> None:
    source = write_pictures(tmp_path / "in", [record])
    (row,) = prepared(DataSetName.ROWS, source, tmp_path / "out")["train"]
    named = record.get("images", [record.get("image")])
    assert isinstance(named, list)
    assert row.images == tuple((source.parent / str(name)).read_bytes() for name in named)
    (written,) = pq.read_table(tmp_path / "out" / "train.parquet")["prompt"].to_pylist()
    assert written[0]["content"] == content


def test_every_record_with_a_bad_image_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    records = [
        geometry("images/0.png"),
        geometry("images/cut.png"),
        geometry("images/0.png", "images/1.png"),
        geometry("images/missing.png"),
        geometry(),
        geometry("images/1.png"),
    ]
    source = write_pictures(tmp_path / "in", records)
    (source.parent / "images" / "cut.png").write_bytes(png(5)[:40])
    out = tmp_path / "out"
    out.mkdir()
    (out / "train.parquet").write_bytes(b"of an earlier call")
    with pytest.raises(DataError, match=r"record 2: image 0: not a readable image.*3 more bad records: 3; 4; 5\);"):
        prepare(DataSetName.GEO3K, source, out, RecordColumns(), report=print)
    assert [(path.name, path.read_bytes()) for path in out.iterdir()] == [("train.parquet", b"of an earlier call")]
    late = write_pictures(tmp_path / "late", [{"prompt": "a"}, {"prompt": "b", "images": ["images/0.png"]}])
    with pytest.raises(DataError, match="record 2: has images, and the first record no column for them"):
        prepare(DataSetName.ROWS, late, out, RecordColumns(), report=print)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    def complaint(name: DataSetName, source: Path) -> str:
        with pytest.raises(DataError) as caught:
            prepare(name, source, tmp_path / "out", RecordColumns(), report=print)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": "a"}\n{"prompt": \n')
    assert f"{broken} line 2: not JSON" in complaint(DataSetName.ROWS, broken)
    assert "does not exist" in complaint(DataSetName.ROWS, tmp_path / "nothing")
    (tmp_path / "text.txt").write_text("x")
    assert "does not end in one of" in complaint(DataSetName.ROWS, tmp_path / "text.txt")
    other = write_jsonl(tmp_path / "other.jsonl", [{"text": "a"}])
    assert "record 1: has no prompt or" in complaint(DataSetName.ROWS, other)
    assert "record 1: has no text in answer; it has text" in complaint(DataSetName.GSM8K, other)
    for name in ("main", "socratic"):
        write_jsonl(tmp_path / "several" / name / "train.jsonl", GSM8K)
    assert "has several sets; name one of main, socratic in it" in complaint(DataSetName.GSM8K, tmp_path / "several")


def test_a_folder_of_tasks_has_a_row_per_task_with_its_name(tmp_path: Path) -> None:
    for name, instruction in (("a", "Say hello.\n"), ("b/c", "Say hello.\n")):
        folder = tmp_path / "tasks" / name
        for path, text in (
            ("instruction.md", instruction),
            ("task.toml", ""),
            ("environment/Dockerfile", "FROM a\n"),
            ("tests/test.sh", "echo 1 > /logs/verifier/reward.txt\n"),
        ):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
    (rows,) = prepared(DataSetName.HARBOR, tmp_path / "tasks", tmp_path / "out").values()
    assert [row.extra_info["task"] for row in rows] == ["a", "b/c"]
    assert [row.data_source for row in rows] == ["tasks", "tasks"]
    (tmp_path / "tasks" / "a" / "tests" / "test.sh").unlink()
    with pytest.raises(DataError, match=r"tests/test\.sh does not exist; it grades the task"):
        prepared(DataSetName.HARBOR, tmp_path / "tasks", tmp_path / "out")
