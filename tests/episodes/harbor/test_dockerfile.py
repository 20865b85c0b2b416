"""Dockerfiles that a box can follow, and the lines that it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.episodes.harbor.dockerfile import CopyStep, MakeFolder, RunStep, read_dockerfile
from megarl.errors import DataError


def test_steps_have_the_folder_and_the_variables_of_their_place(tmp_path: Path) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text(
        "# syntax=docker/dockerfile:1\n"
        "ARG TAG=3.12\n"
        "FROM --platform=linux/amd64 python:$TAG AS base\n"
        "ENV A=1 B='two words'\n"
        "ENV OLD form of it\n"
        "WORKDIR /app\n"
        "RUN echo ${A} && \\\n"
        "    # a comment within\n"
        "    ls\n"
        'RUN ["touch", "a file"]\n'
        "WORKDIR src\n"
        "COPY --chown=1:1 a.txt b*.txt ./\n"
        "COPY folder /data\n"
        "USER root\n"
        'CMD ["bash"]\n'
    )
    found = read_dockerfile(path)
    variables = {"TAG": "3.12", "A": "1", "B": "two words", "OLD": "form of it"}
    assert found.base == "python:3.12"
    assert found.workdir == "/app/src"
    assert found.variables == {"A": "1", "B": "two words", "OLD": "form of it"}
    assert found.steps == [
        MakeFolder(path="/app"),
        RunStep(command="echo ${A} &&  ls", workdir="/app", variables=variables),
        RunStep(command="touch 'a file'", workdir="/app", variables=variables),
        MakeFolder(path="/app/src"),
        CopyStep(sources=("a.txt", "b*.txt"), target="/app/src/"),
        CopyStep(sources=("folder",), target="/data"),
    ]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("FROM b", "FROM: a second stage is not supported"),
        ("COPY --from=b /x /y", "COPY: only files of the task's environment folder can be copied"),
        ("ADD https://example.com/x /x", "ADD: only files of the task's environment folder"),
        ("COPY ../secret /x", "COPY: only files of the task's environment folder"),
        ("COPY x", "COPY: names no target"),
        ("RUN --mount=type=cache,target=/x ls", "RUN: options and here-documents are not supported"),
        ("RUN <<EOF", "RUN: options and here-documents are not supported"),
        ("USER guest", "USER: a box has one user, root, and not guest"),
        ('SHELL ["/bin/zsh"]', "SHELL: is not supported"),
        ("COPY 'x /y", "COPY: No closing quotation"),
    ],
)
def test_what_a_box_cannot_follow_is_refused_with_its_line(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text(f"FROM a\n{line}\n")
    with pytest.raises(DataError) as refused:
        read_dockerfile(path)
    assert str(refused.value).startswith(f"{path} line 2: {said}")
    assert str(refused.value).endswith("; use the sandbox docker or podman")


def test_a_file_without_from_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text("# nothing\n")
    with pytest.raises(DataError, match="has no FROM"):
        read_dockerfile(path)
