"""The rollouts of an evaluation, for people to read: `<run>/evaluations/step_N.jsonl`, one rollout per line."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from megarl.errors import DataError, MachineError
from megarl.types import FinishReason

EVALUATIONS_FOLDER = "evaluations"

_FILE = re.compile(r"step_(\d{6,})\.jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One rollout of an evaluation and its score."""

    prompt_uid: str
    data_source: str
    is_greedy: bool
    index: int
    """Its place among the rollouts of the prompt; 0 for the greedy one."""
    is_right: bool
    score: float
    components: Mapping[str, float]
    prediction: str | None
    """The answer that the scorer read from the response; None if it names none."""
    ground_truth: str
    finish_reason: FinishReason
    num_tokens: int
    prompt: str
    """The prompt with the chat template applied."""
    response: str


def generations_file(run_folder: Path, step: int) -> Path:
    return run_folder / EVALUATIONS_FOLDER / f"step_{step:06d}.jsonl"


def list_generations(run_folder: Path) -> dict[int, Path]:
    """Return the files by step, in the order of steps."""
    folder = run_folder / EVALUATIONS_FOLDER
    names = {path: _FILE.fullmatch(path.name) for path in folder.iterdir()} if folder.is_dir() else {}
    return dict(sorted((int(match.group(1)), path) for path, match in names.items() if match))


def write_generations(path: Path, generations: Iterable[Generation]) -> None:
    """Write the file in one operation: under its name it is complete and on disk."""
    partial = path.with_name(f"{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            for generation in generations:
                file.write(_GENERATION.dump_json(generation) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise MachineError(f"{path}: cannot be written: {error.strerror}") from error


def read_generations(path: Path) -> Iterator[Generation]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                yield _parse(line, where=f"{path}: line {number}")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


_GENERATION: TypeAdapter[Generation] = TypeAdapter(Generation)


def _parse(line: bytes, *, where: str) -> Generation:
    try:
        return _GENERATION.validate_json(line)
    except ValidationError as error:
        detail = error.errors()[0]
        key = ".".join(str(part) for part in detail["loc"])
        raise DataError(f"{where} is not a generation of this version of megarl: {key}: {detail['msg']}") from None
