from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.cli.main import run
from megarl.cli.trace import traced
from megarl.errors import MachineError
from tests.tools.page.runs import make_run


def test_a_runs_phases_become_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run")
    assert run(["timeline", str(folder)]) == 0
    assert capsys.readouterr().out == f"wrote {folder}/timeline.json (13 phases); open it in Perfetto\n"
    assert json.loads((folder / "timeline.json").read_text())["traceEvents"]


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
