from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.cli.main import run
from megarl.cli.run_folder import traced
from megarl.data.rollout_files import as_line, generations_file, write_generations
from megarl.errors import MachineError
from tests.observe.samples import generation
from tests.tools.page.runs import make_run


def test_a_runs_phases_become_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run")
    assert run(["timeline", str(folder)]) == 0
    assert capsys.readouterr().out == f"wrote {folder}/timeline.json (13 phases); open it in Perfetto\n"
    assert json.loads((folder / "timeline.json").read_text())["traceEvents"]


def test_the_address_of_the_page_stands_between_blanks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A terminal that opens addresses takes punctuation beside one for a part of it."""

    async def serve(_folder: Path, *, port: int, on_start: Callable[[str], None]) -> None:
        on_start(f"http://127.0.0.1:{port}/")

    monkeypatch.setattr("megarl.tools.page.web_page.serve", serve)
    assert run(["view", str(make_run(tmp_path / "run")), "--port", "8800"]) == 0
    assert "http://127.0.0.1:8800/" in capsys.readouterr().out.split()


def test_a_folder_without_a_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["timeline", str(tmp_path)]) == 3
    assert capsys.readouterr().err.count("\n") == 1


def test_what_ray_knows_is_in_it_even_when_the_run_fails(tmp_path: Path) -> None:
    folder, out = make_run(tmp_path / "run"), tmp_path / "trace.json"
    task = {"ph": "X", "name": "update", "pid": "node", "tid": "worker", "ts": 1.0, "dur": 2.0}

    def interrupted() -> None:
        with traced(folder, out) as tasks:
            assert tasks is not None
            tasks.write_text(json.dumps([task]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert task in json.loads(out.read_text())["traceEvents"]


def test_a_file_that_cannot_be_written_is_told_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="cannot be written"), traced(tmp_path, tmp_path / "no" / "trace.json"):
        raise AssertionError("the run began")


def test_report_writes_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run")
    assert run(["report", str(folder)]) == 0
    assert capsys.readouterr().out.startswith(f"wrote {folder}/report.html (")
    text = (folder / "report.html").read_text()
    assert "Content-Security-Policy" in text
    assert "<link" not in text
    assert "src=" not in text.replace("src=x", "")


@pytest.fixture
def evaluated(tmp_path: Path) -> Path:
    write_generations(generations_file(tmp_path, 0), map(as_line, [generation(response="early")]))
    kept = [
        generation(response="good"),
        generation(is_right=False, response="bad", data_source="code"),
        generation(is_right=False, response="worse\x1b[2J", is_greedy=False, index=1),
    ]
    write_generations(generations_file(tmp_path, 8), map(as_line, kept))
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["samples", *arguments]) == 0
    return capsys.readouterr().out


def test_the_last_evaluation_is_shown(evaluated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, str(evaluated))
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
    evaluated: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], responses: list[str]
) -> None:
    text = shown(capsys, str(evaluated), *arguments)
    assert [word for word in ("early", "good", "bad", "worse") if word in text] == responses


def test_escape_codes_of_a_model_do_not_reach_the_terminal(evaluated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, str(evaluated), "--wrong")
    assert "worse\\x1b[2J" in text
    assert "\x1b[2J" not in text


def test_long_texts_are_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")  # in other widths a line may end within a word
    kept = [generation(response="plan" + "x" * 5000 + "result", prompt="system" + "y" * 5000 + "question")]
    write_generations(generations_file(tmp_path, 1), map(as_line, kept))
    text = shown(capsys, str(tmp_path), "--max-chars", "100")
    assert "[4910 characters]" in text
    assert all(word in text for word in ("plan", "result", "question"))
    assert "system" not in text


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--step", "3"], "no evaluation after step 3; choose one of 0, 8"),
        (["--source", "none"], "no answer matches; leave out --wrong or --source"),
    ],
)
def test_what_is_not_there_is_one_line(
    evaluated: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    assert run(["samples", str(evaluated), *arguments]) == 3
    assert line in capsys.readouterr().err


def test_a_folder_without_evaluations_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["samples", str(tmp_path)]) == 3
    assert capsys.readouterr().err == (
        f"megarl: {tmp_path}: no evaluation here; name the folder of a run with one, as in runs/quickstart\n"
    )
