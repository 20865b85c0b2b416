"""What the policy wrote in an evaluation, for people to read: `<run>/evaluations/step_N.jsonl`, one rollout a line."""

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
    """One rollout of an evaluation and what the scorer made of it."""

    prompt_uid: str
    data_source: str
    is_greedy: bool
    index: int
    """Among the rollouts of this prompt; 0 for the greedy one."""
    is_right: bool
    score: float
    components: Mapping[str, float]
    prediction: str | None
    """The answer as the scorer read it; None where it does not say."""
    ground_truth: str
    finish_reason: FinishReason
    num_tokens: int
    prompt: str
    """As the model saw it, chat template included."""
    response: str


def generations_file(run_folder: Path, step: int) -> Path:
    return run_folder / EVALUATIONS_FOLDER / f"step_{step:06d}.jsonl"


def list_generations(run_folder: Path) -> dict[int, Path]:
    """The files by step, the first step first."""
    folder = run_folder / EVALUATIONS_FOLDER
    names = {path: _FILE.fullmatch(path.name) for path in folder.iterdir()} if folder.is_dir() else {}
    return dict(sorted((int(match.group(1)), path) for path, match in names.items() if match))


def write_generations(path: Path, generations: Iterable[Generation]) -> None:
    """All or nothing: a file under this name is complete and on disk."""
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
