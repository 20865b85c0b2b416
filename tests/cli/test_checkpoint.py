from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megarl.cli.main import run
from tests.checkpoint.samples import write_checkpoint


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    for step in (2, 4):
        write_checkpoint(tmp_path / "checkpoints", step)
    return tmp_path


def test_ls_lists_the_newest_first_with_marks(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_folder / "checkpoints" / "best").symlink_to("step_000002")
    assert run(["checkpoint", "ls", str(run_folder)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["checkpoint", "step", "GB", "age", "contents", "state"]
    assert [line[:2] + line[4:] for line in lines[1:]] == [
        ["step_000004", "4", "everything", "ok", "latest"],
        ["step_000002", "2", "everything", "ok", "best"],
    ]


def test_ls_shows_what_is_damaged_and_what_is_no_checkpoint_yet(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parent = run_folder / "checkpoints"
    (parent / "step_000002" / "state.json").unlink()
    (parent / "step_000006.tmp").mkdir()
    (parent / "step_000009.abandoned").mkdir()
    assert run(["checkpoint", "ls", str(run_folder)]) == 0
    out = capsys.readouterr().out
    states = {words[0]: words[-1] for line in out.splitlines() if (words := line.split())}
    assert states["step_000004"] == "latest"
    assert states["step_000002"] == "damaged"
    assert states["step_000006.tmp"] == "temp"
    assert states["step_000009.abandoned"] == "damaged"
    assert f"{parent / 'step_000002' / 'state.json'}: cannot be read: No such file" in out


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


def test_verify_refuses_a_newer_format_and_a_foreign_pickle(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parent = run_folder / "checkpoints"
    manifest = parent / "step_000002" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 9'))
    (parent / "step_000004" / "model" / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert run(["checkpoint", "verify", str(run_folder)]) == 4
    (complaint,) = capsys.readouterr().err.splitlines()
    assert "format 9 is newer than 1; use the megarl that wrote it" in complaint
    assert "pytorch_model.bin: a pickle that megarl did not write; remove it" in complaint


def test_diff_prints_what_differs_and_exits_with_1(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (run_folder / "checkpoints" / name for name in ("step_000002", "step_000004"))
    assert run(["checkpoint", "diff", str(first), str(first)]) == 0
    assert "no difference" in capsys.readouterr().out
    shutil.rmtree(second / "model")
    shutil.rmtree(second / "optimizer")
    shutil.rmtree(second / "critic")
    for name in ("model", "optimizer", "critic"):
        shutil.copytree(first / name, second / name)
    assert run(["checkpoint", "diff", str(first), str(second)]) == 1
    out = capsys.readouterr().out
    assert "state.json: trainer.num_steps: 2 -> 4" in out
    assert any(line.split()[:4] == ["critic/model", "a.bias", "1", "1"] for line in out.splitlines())


def test_prune_says_what_would_go_and_then_removes_it(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["checkpoint", "prune", str(run_folder), "--keep-last", "1"]
    older = run_folder / "checkpoints" / "step_000002"
    assert run([*arguments, "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"would remove {older}", "would keep step_000004"]
    assert older.exists()
    assert run(arguments) == 0
    assert capsys.readouterr().out.splitlines() == [f"removed {older}", "kept step_000004"]
    assert not older.exists()


def test_prune_needs_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["checkpoint", "prune", str(tmp_path), "--keep-last", "1"]) == 4
    assert "there is no checkpoint here" in capsys.readouterr().err
    assert run(["checkpoint", "prune", str(tmp_path), "--keep-last", "0"]) == 2
