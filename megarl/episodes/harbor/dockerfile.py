"""The part of the Dockerfile language that can be carried out without a container engine. Runs nothing.

One stage of FROM, RUN, COPY, ADD of local files, WORKDIR, ENV, ARG and USER root. What only matters to a container that
starts by itself (CMD, ENTRYPOINT, EXPOSE, LABEL and the like) has no effect in a box; anything else is refused.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from megarl.errors import DataError

_NO_EFFECT = ("CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "HEALTHCHECK", "MAINTAINER", "STOPSIGNAL", "USER", "VOLUME")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_NUM_WORDS_OF_COPY = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStep:
    command: str
    workdir: str
    variables: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyStep:
    sources: tuple[str, ...]
    """Paths and patterns within the context."""
    target: str
    """An absolute path; one that ends in `/` is a folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeFolder:
    path: str


Step: TypeAlias = RunStep | CopyStep | MakeFolder


@dataclass(slots=True, kw_only=True)
class Dockerfile:
    base: str = ""
    steps: list[Step] = field(default_factory=list)
    workdir: str = "/"
    variables: dict[str, str] = field(default_factory=dict)
    """Variables that commands of an episode see too."""


def read_dockerfile(path: Path) -> Dockerfile:
    """Return what a Dockerfile asks for; a DataError names the line that a box cannot follow."""
    found = Dockerfile()
    arguments: dict[str, str] = {}
    for number, word, rest in _instructions(path.read_text(encoding="utf-8")):
        try:
            _follow(found, arguments, word, rest)
        except ValueError as error:
            raise DataError(f"{path} line {number}: {word}: {error}; use the sandbox docker or podman") from None
    if not found.base:
        raise DataError(f"{path} has no FROM")
    return found


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield line number, instruction and arguments; lines that end in a backslash go on in the next."""
    whole, first = "", 0
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if stripped.startswith("#") or (not stripped and not whole):
            continue
        first = first or number
        if stripped.endswith("\\"):
            whole += stripped[:-1] + " "
            continue
        word, _, rest = (whole + stripped).partition(" ")
        yield first, word.upper(), rest.strip()
        whole, first = "", 0


def _follow(found: Dockerfile, arguments: dict[str, str], word: str, rest: str) -> None:
    known = {**arguments, **found.variables}
    if word != "RUN":
        rest = _VARIABLE.sub(lambda match: known.get(match[1] or match[2], ""), rest)
    match word:
        case "FROM":
            _begin(found, rest)
        case "RUN":
            found.steps.append(RunStep(command=_command(rest), workdir=found.workdir, variables=known))
        case "COPY" | "ADD":
            found.steps.append(_copy(rest, found.workdir))
        case "WORKDIR":
            found.workdir = str(PurePosixPath(found.workdir, _unquoted(rest)))
            found.steps.append(MakeFolder(path=found.workdir))
        case "ENV":
            found.variables.update(_assignments(rest))
        case "ARG":
            name, _, value = rest.partition("=")
            arguments[name.strip()] = _unquoted(value)
        case "USER" if rest.split(":")[0] not in ("root", "0"):
            raise ValueError(f"a box has one user, root, and not {rest}")
        case _ if word not in _NO_EFFECT:
            raise ValueError("is not supported")


def _begin(found: Dockerfile, rest: str) -> None:
    if found.base:
        raise ValueError("a second stage is not supported")
    found.base = next(each for each in rest.split() if not each.startswith("--"))


def _command(rest: str) -> str:
    if rest.startswith("--") or "<<" in rest.partition("\n")[0]:
        raise ValueError("options and here-documents are not supported")
    if not rest.startswith("["):
        return rest
    words = json.loads(rest)
    if not isinstance(words, list) or not all(isinstance(each, str) for each in words):
        raise ValueError("is no list of words")
    return shlex.join(words)


def _copy(rest: str, workdir: str) -> CopyStep:
    words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
    options = [each for each in words if each.startswith("--")]
    if any(not each.startswith(("--chown", "--chmod")) for each in options) or "<<" in rest:
        raise ValueError("only files of the task's environment folder can be copied")
    paths = [each for each in words if not each.startswith("--")]
    if len(paths) < _NUM_WORDS_OF_COPY:
        raise ValueError("names no target")
    if any("://" in each or ".." in PurePosixPath(each).parts for each in paths):
        raise ValueError("only files of the task's environment folder can be copied")
    target = str(PurePosixPath(workdir, paths[-1]))
    is_folder = paths[-1].endswith(("/", ".")) or len(paths) > _NUM_WORDS_OF_COPY
    return CopyStep(sources=tuple(paths[:-1]), target=target.rstrip("/") + "/" if is_folder else target)


def _assignments(rest: str) -> dict[str, str]:
    words = shlex.split(rest)
    if words and "=" not in words[0]:  # the old form, ENV name value
        return {words[0]: rest.partition(" ")[2].strip()}
    return dict(word.partition("=")[::2] for word in words)


def _unquoted(text: str) -> str:
    return " ".join(shlex.split(text))
