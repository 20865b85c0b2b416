"""The rollouts of an evaluation in a file, for people to read: `<run>/evaluations/step_N.jsonl`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from megarl.data.rollout_files import list_steps, make_text_folder
from megarl.errors import DataError, writing
from megarl.tokens import ContentHandle
from megarl.types import FinishReason, TokenArray, Turn, TurnKind

EVALUATIONS_FOLDER = "evaluations"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpokenTurn:
    """One turn of an episode as text, special tokens included."""

    kind: TurnKind
    text: str
    reward: float
    seconds: float


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
    prompt: str = ""
    """The prompt with the chat template applied."""
    images: tuple[str, ...] = ()
    """Digests of the images of the prompt, which stand as one token each in its text."""
    response: str = ""
    ending: str | None = None
    """Why the episode ended; None for a single response, which has no turns."""
    turns: tuple[SpokenTurn, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedRollout:
    """A rollout of an evaluation whose texts may lie elsewhere."""

    generation: Generation
    """Without its texts."""
    prompt_ids: TokenArray  # [P], with one token for each image
    content: ContentHandle
    turns: tuple[Turn, ...]

    def line(self, decode: Callable[[TokenArray], str]) -> bytes:
        """Return the generation as a line of a file. `decode` returns the text of tokens, special ones included."""
        content = self.content.load()
        spoken = (
            SpokenTurn(
                kind=turn.kind,
                text=decode(content.token_ids[turn.start : turn.end]),
                reward=turn.reward,
                seconds=round(turn.seconds, 3),
            )
            for turn in self.turns
            if turn.kind is not TurnKind.CONTEXT
        )
        return as_line(
            replace(self.generation, prompt=decode(self.prompt_ids), response=content.text, turns=tuple(spoken))
        )


def generations_file(run_folder: Path, step: int) -> Path:
    return run_folder / EVALUATIONS_FOLDER / f"step_{step:06d}.jsonl"


def list_generations(run_folder: Path) -> dict[int, Path]:
    """Return the files by step, in the order of steps."""
    return list_steps(run_folder / EVALUATIONS_FOLDER)


def as_line(generation: Generation) -> bytes:
    return _GENERATION.dump_json(generation) + b"\n"


def write_generations(path: Path, lines: Iterable[bytes]) -> None:
    """Write the file in one operation: under its name it is complete and on disk."""
    partial = path.with_name(f"{path.name}.tmp")
    with writing(path):
        make_text_folder(path.parent)
        with partial.open("wb") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)


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
