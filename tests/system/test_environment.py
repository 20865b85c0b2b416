"""The description of its machine that a run writes."""

from __future__ import annotations

import json
import re
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

from megarl.env import COMMIT, LOADED_MODULES
from megarl.system import environment
from megarl.system.environment import ENVIRONMENT_FILE, append_environment, capture_environment


def test_versions_modules_variables_and_driver_are_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver = tmp_path / "driver"
    (driver / "gpus" / "0000:19:00.0").mkdir(parents=True)
    (driver / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06\nGCC version: 12\n")
    (driver / "gpus" / "0000:19:00.0" / "information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ: 1\n")
    monkeypatch.setattr(environment, "_DRIVER", driver)
    monkeypatch.setenv(LOADED_MODULES.name, "gcc/13.2:cuda/13.0")
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    found = capture_environment(asks_git=False)
    assert found.versions["torch"] == version("torch")
    assert found.versions["ray"] == version("ray")
    assert found.modules == ("gcc/13.2", "cuda/13.0")
    assert found.variables["NCCL_IB_HCA"] == "mlx5"
    assert "hidden" not in found.line()
    assert found.driver.endswith("580.65.06")
    assert found.gpus == ("NVIDIA H100 80GB HBM3",)
    assert found.commit == ""


def test_every_start_of_a_run_adds_a_line_with_the_commit(tmp_path: Path) -> None:
    append_environment(tmp_path)
    append_environment(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / ENVIRONMENT_FILE).read_text().splitlines()]
    assert len(lines) == 2
    assert re.fullmatch(r"[0-9a-f]{40}\+?|", lines[0]["commit"])


def test_an_image_without_a_checkout_says_what_it_was_built_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(COMMIT.name, "abc")
    assert environment._commit(tmp_path / "site-packages" / "megarl") == "abc"


def test_changed_files_are_marked_and_another_projects_commit_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(COMMIT.name, raising=False)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    package, installed = tmp_path / "megarl", tmp_path / ".venv" / "megarl"
    for folder in (package, installed):
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("1")
    for words in (["init", "-q"], ["add", "megarl"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True, capture_output=True)
    commit = environment._commit(package)
    assert re.fullmatch(r"[0-9a-f]{40}", commit)
    (package / "__init__.py").write_text("2")
    assert environment._commit(package) == f"{commit}+"
    assert environment._commit(installed) == ""
