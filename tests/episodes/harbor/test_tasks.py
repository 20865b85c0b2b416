"""Task folders in Harbor's format: what is read of them, and what is refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.episodes.harbor.tasks import BoxLimits, check_tasks, read_task, task_names
from megarl.errors import DataError
from tests.episodes.harbor.small_tasks import TASKS, write_tasks

DEFAULTS = BoxLimits(memory_bytes=1 << 30, disk_bytes=1 << 31, cpus=2, max_processes=64)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tasks(tmp_path / "tasks")


def test_a_task_has_its_own_limits_and_the_defaults_for_the_rest(folder: Path) -> None:
    task = read_task(folder, "hello", DEFAULTS)
    assert task.limits == BoxLimits(memory_bytes=512 << 20, disk_bytes=64 << 20, cpus=1, max_processes=64)
    assert (task.agent_s, task.verifier_s, task.build_s) == (120, 60, 600)
    assert task.instruction == "Write `Hello, world!` into the file hello.txt.\n"
    (folder / "hello" / "task.toml").write_text('schema_version = "1.1"\n[environment]\nmemory = "2G"\n')
    task = read_task(folder, "hello", DEFAULTS)
    assert task.limits == BoxLimits(memory_bytes=2 << 30, disk_bytes=1 << 31, cpus=2, max_processes=64)
    assert (task.agent_s, task.verifier_s) == (None, 600)


def test_tasks_are_found_at_any_depth(folder: Path) -> None:
    assert task_names(folder) == sorted(TASKS)
    assert list(check_tasks(folder, DEFAULTS)) == []


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ("[agent", "task.toml: "),
        ('[agent]\ntimeout_sec = "soon"', "agent.timeout_sec is 'soon'; it must be a number above 0"),
        ("[environment]\ncpus = 0", "environment.cpus is 0; it must be a number above 0"),
        ('[environment]\nmemory = "much"', "environment.memory is 'much'; it must be a size such as \"2G\""),
        ("[environment]\ngpus = 1", "environment.gpus: boxes have no GPUs; leave the task out"),
        ('[environment]\nos = "windows"', "environment.os: only linux is supported"),
        ('[[steps]]\nname = "a"', "steps: tasks of several steps are not supported"),
        ('[verifier.env]\nKEY = "${SECRET}"', "verifier.env.KEY takes a variable of the host; write its value"),
        ('[environment]\nenv = ["a"]', "environment.env is ['a']; it must be strings by name"),
        ("environment = 3", "environment is 3; it must be a section"),
    ],
)
def test_what_cannot_be_followed_is_refused(folder: Path, toml: str, said: str) -> None:
    (folder / "hello" / "task.toml").write_text(toml)
    (line,) = check_tasks(folder, DEFAULTS)
    assert said in line
    assert str(folder / "hello") in line


def test_a_folder_without_tasks_or_without_parts_of_one_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"has no folder with a task\.toml"):
        task_names(tmp_path / "empty")
    (folder / "sum" / "instruction.md").write_text(" \n")
    (folder / "json" / "instruction.md").write_bytes(b"\xff")
    (folder / "rename" / "environment" / "Dockerfile").unlink()
    lines = list(check_tasks(folder, DEFAULTS))
    assert [line.partition(": ")[2] or line.partition(" is ")[2] for line in lines] == [
        "not UTF-8 text",
        "neither environment/Dockerfile nor environment.docker_image in task.toml",
        "empty; it is what the model is asked",
    ]
