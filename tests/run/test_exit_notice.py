"""The exit notice of drivers that are killed, and its absence for those that end by themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, signal, sys
from pathlib import Path
from megarl.run.exit_notice import exit_notice
with exit_notice(Path(sys.argv[1])):
    {}
"""


def last_words(folder: Path, end: str) -> str:
    command = [sys.executable, "-c", PROGRAM.format(end), str(folder)]
    # The end of the pipe is also the end of the process that speaks.
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False).stderr


@pytest.mark.parametrize("end", ["pass", "raise SystemExit(3)"])
def test_nothing_is_said_of_a_run_that_ends_by_itself(end: str, tmp_path: Path) -> None:
    assert last_words(tmp_path, end) == ""


@pytest.mark.parametrize("end", ["os._exit(1)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_of_one_that_cannot_speak_any_more_it_is_said_how_to_go_on(end: str, tmp_path: Path) -> None:
    said = last_words(tmp_path, end)
    assert said.count("\n") == 1
    assert "log" not in said
    assert said.endswith("run the same command to start again: no checkpoint was saved yet\n")
    (tmp_path / "checkpoints" / "latest").mkdir(parents=True)
    (tmp_path / "ray.log").touch()
    said = last_words(tmp_path, end)
    assert f"(its log is {tmp_path / 'ray.log'})" in said
    assert said.endswith("run the same command to resume from its last checkpoint\n")
