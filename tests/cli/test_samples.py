from __future__ import annotations

from pathlib import Path

import pytest

from megarl.cli.main import run
from megarl.data.generations import generations_file, write_generations
from tests.observe.samples import generation


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_generations(generations_file(tmp_path, 0), [generation(response="early")])
    kept = [
        generation(response="good"),
        generation(is_right=False, response="bad", data_source="code"),
        generation(is_right=False, response="worse\x1b[2J", is_greedy=False, index=1),
    ]
    write_generations(generations_file(tmp_path, 8), kept)
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["samples", *arguments]) == 0
    return capsys.readouterr().out


def test_the_last_evaluation_is_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, str(folder))
    assert "eval.parquet:3" in text
    assert "what is 3 + 4?" in text
    assert "right: score 1  greedy  2 tokens, stop  format 0.5  truth 7  prediction 7" in text
    assert "sampled 1" in text
    assert "early" not in text
    assert "3 shown of" in text
    assert max(map(len, text.splitlines()[:-1])) <= 100


@pytest.mark.parametrize(
    ("arguments", "responses"),
    [
        (["--step", "0"], ["early"]),
        (["--wrong"], ["bad", "worse"]),
        (["--wrong", "--limit", "1"], ["bad"]),
        (["--source", "code"], ["bad"]),
    ],
)
def test_answers_can_be_chosen(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], responses: list[str]
) -> None:
    text = shown(capsys, str(folder), *arguments)
    assert [word for word in ("early", "good", "bad", "worse") if word in text] == responses


def test_escape_codes_of_a_model_do_not_reach_the_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, str(folder), "--wrong")
    assert "worse\\x1b[2J" in text
    assert "\x1b[2J" not in text


def test_long_texts_are_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = [generation(response="plan" + "x" * 5000 + "result", prompt="system" + "y" * 5000 + "question")]
    write_generations(generations_file(tmp_path, 1), kept)
    text = shown(capsys, str(tmp_path), "--max-chars", "100")
    assert "[4910 characters]" in text
    assert all(word in text for word in ("plan", "result", "question"))
    assert "system" not in text


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--step", "3"], "no evaluation after step 3; there are 0, 8"),
        (["--source", "none"], "no answer is as asked for; leave out --wrong or --source"),
    ],
)
def test_what_is_not_there_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    assert run(["samples", str(folder), *arguments]) == 3
    assert line in capsys.readouterr().err


def test_a_folder_without_evaluations_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["samples", str(tmp_path)]) == 3
    assert capsys.readouterr().err == (
        f"megarl: {tmp_path}: no evaluation is kept here; name the folder of a run with one, as in runs/quickstart\n"
    )
