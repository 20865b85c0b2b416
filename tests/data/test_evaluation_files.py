"""Answers of an evaluation for people: what is written is what is read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from megarl.data.evaluation_files import (
    as_line,
    generations_file,
    list_generations,
    read_generations,
    write_generations,
)
from megarl.errors import DataError, MachineError
from tests.observe.samples import generation


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    kept = [generation(response='two\n"lines" \x1b[31m', prediction=None), generation(is_greedy=False, index=3)]
    path = generations_file(tmp_path, 12)
    write_generations(path, map(as_line, kept))
    assert path == tmp_path / "evaluations" / "step_000012.jsonl"
    assert list(read_generations(path)) == kept
    assert len(path.read_bytes().splitlines()) == 2


def test_files_are_listed_by_step_and_a_half_written_one_is_not(tmp_path: Path) -> None:
    assert list_generations(tmp_path) == {}
    for step in (20, 0, 3):
        write_generations(generations_file(tmp_path, step), map(as_line, [generation()]))
    (tmp_path / "evaluations" / "step_000030.jsonl.tmp").write_bytes(b"{")
    assert list(list_generations(tmp_path)) == [0, 3, 20]


def test_a_writer_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = generations_file(tmp_path, 1)
    write_generations(path, map(as_line, [generation(response="old")]))

    def broken() -> object:
        yield as_line(generation(response="new"))
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_generations(path, broken())  # type: ignore[arg-type]
    assert [item.response for item in read_generations(path)] == ["old"]


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "evaluations").write_text("a file")
    with pytest.raises(MachineError, match=r"step_000001\.jsonl: cannot be written: "):
        write_generations(generations_file(tmp_path, 1), [])


def test_another_file_is_one_line_that_says_where(tmp_path: Path) -> None:
    path = tmp_path / "step_000001.jsonl"
    path.write_text('{"prompt_uid": 1}\n')
    with pytest.raises(DataError, match=r"step_000001\.jsonl: line 1 is not a generation of this version of megarl: "):
        list(read_generations(path))


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o750), (0o002, 0o770), (0o077, 0o700)])
def test_other_users_do_not_enter_folders_with_texts(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        write_generations(tmp_path / "evaluations" / "step_1.jsonl", [b"{}\n"])
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "evaluations").stat().st_mode) == mode
