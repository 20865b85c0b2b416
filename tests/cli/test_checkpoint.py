from __future__ import annotations

from pathlib import Path

import pytest

from megarl.cli.main import run
from tests.checkpoint.samples import write_checkpoint


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    for step in (2, 4):
        write_checkpoint(tmp_path / "checkpoints", step)
    return tmp_path


def test_ls_lists_the_newest_first(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["checkpoint", "ls", str(run_folder)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1][:4] == ["step_000004", "(latest)", "4", "everything"]
    assert lines[2][:3] == ["step_000002", "2", "everything"]


def test_ls_shows_what_cannot_be_read(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_folder / "checkpoints" / "step_000002" / "manifest.json").write_text("{}")
    assert run(["checkpoint", "ls", str(run_folder)]) == 0
    assert "unreadable" in capsys.readouterr().out


@pytest.mark.parametrize("path", [".", "checkpoints", "checkpoints/step_000004", "checkpoints/latest"])
def test_verify_says_what_is_whole(run_folder: Path, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["checkpoint", "verify", str(run_folder / path)]) == 0
    assert "ok: 8 files" in capsys.readouterr().out


def test_verify_names_every_damaged_checkpoint_and_exits_with_4(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (2, 4):
        (run_folder / "checkpoints" / f"step_{step:06d}" / "model" / "config.json").write_text("{}")
    assert run(["checkpoint", "verify", str(run_folder)]) == 4
    complaint = capsys.readouterr().err
    assert "step_000002/model/config.json" in complaint
    assert "step_000004/model/config.json" in complaint


def test_a_folder_without_checkpoints_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["checkpoint", "verify", str(tmp_path)]) == 4
    assert "there is no checkpoint here" in capsys.readouterr().err
