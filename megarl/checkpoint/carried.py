"""Groups that were scored but not trained on when a checkpoint was made; a resumed run trains on the same ones.

Tokens are stored end to end in a safetensors file, values per rollout and per group in a JSON file.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError
from safetensors.numpy import load_file

from megarl.checkpoint.manifest import FileDigest, digest_file, sync
from megarl.checkpoint.tensor_files import write_tensor_file
from megarl.errors import CheckpointError, first_line
from megarl.tokens import Content, RouteArray
from megarl.types import SINGLE, Episode, FinishReason, PolicyVersion, Prompt, Rollout, RolloutGroup, Score, ScoredGroup

TOKENS_FILE = "carried.safetensors"
GROUPS_FILE = "carried.json"

_COLUMNS: dict[str, type[np.generic]] = {
    "token_ids": np.int32,
    "logprobs": np.float32,
    "versions": np.int32,
    "loss_mask": np.bool_,
}
_OF_CONTENT = ("token_ids", "logprobs")
_ROUTES = "routes"
"""[rows, layers, experts of a token]; only where some rollout has routes."""
_TEACHER = "teacher"
"""[tokens, 1 + 2K]; only where a teacher on engines was asked."""
_TYPES = {"int32": "I32", "float32": "F32", "bool": "BOOL", "uint8": "U8", "uint16": "U16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _RolloutRecord:
    num_tokens: int
    finish_reason: FinishReason
    text: str
    score: Score
    episode: Episode = SINGLE
    num_routes: int = 0
    """Rows of the routes that are its own."""
    is_taught: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _GroupRecord:
    position: int
    """Position of the prompt in the stream."""
    rollouts: tuple[_RolloutRecord, ...]
    baseline: _RolloutRecord | None


_RECORDS: TypeAdapter[tuple[_GroupRecord, ...]] = TypeAdapter(tuple[_GroupRecord, ...])


def write_carried(folder: Path, groups: Sequence[ScoredGroup]) -> dict[str, FileDigest]:
    """Write the groups into a checkpoint that is being made; without groups no file is written."""
    if not groups:
        return {}
    pairs = [_scored_rollouts(scored) for scored in groups]
    rollouts = [rollout for group_pairs in pairs for rollout, _ in group_pairs]
    contents = [rollout.content.load() for rollout in rollouts]
    columns = {
        name: np.concatenate([getattr(each, name) for each in (contents if name in _OF_CONTENT else rollouts)]).astype(
            dtype
        )
        for name, dtype in _COLUMNS.items()
    }
    routes = [content.routes for content in contents if content.routes is not None]
    if routes:
        columns[_ROUTES] = np.concatenate(routes)
    if taught := [content.teacher for content in contents if content.teacher is not None]:
        columns[_TEACHER] = np.concatenate(taught)
    specs = {name: (_TYPES[column.dtype.name], column.shape) for name, column in columns.items()}
    digest = write_tensor_file(folder / TOKENS_FILE, specs, lambda entry: [columns[entry.name].tobytes()])
    records = tuple(_record(scored, group_pairs) for scored, group_pairs in zip(groups, pairs, strict=True))
    (folder / GROUPS_FILE).write_bytes(_RECORDS.dump_json(records) + b"\n")
    for name in (TOKENS_FILE, GROUPS_FILE):
        sync(folder / name)
    return {TOKENS_FILE: digest, GROUPS_FILE: digest_file(folder / GROUPS_FILE)}


def read_carried(folder: Path, num_groups: int, prompt_at: Callable[[int], Prompt]) -> list[ScoredGroup]:
    """Return the groups that `write_carried` wrote, with the prompts of the resumed run."""
    if num_groups == 0:
        return []
    try:
        records = _RECORDS.validate_json((folder / GROUPS_FILE).read_bytes())
        columns = load_file(folder / TOKENS_FILE)
    except (OSError, ValidationError) as error:
        raise CheckpointError(f"{folder}: cannot read its carried groups: {first_line(error)}") from error
    if len(records) != num_groups:
        raise CheckpointError(f"{folder / GROUPS_FILE}: has {len(records)} groups, state.json counts {num_groups}")
    tokens = _TokenReader(columns)
    return [_group(record, tokens, prompt_at(record.position)) for record in records]


def _scored_rollouts(scored: ScoredGroup) -> list[tuple[Rollout, Score]]:
    """Return the rollouts with their scores; a baseline comes last."""
    pairs = list(zip(scored.group.rollouts, scored.scores, strict=True))
    if scored.group.baseline is not None and scored.baseline is not None:
        pairs.append((scored.group.baseline, scored.baseline))
    return pairs


def _record(scored: ScoredGroup, pairs: Sequence[tuple[Rollout, Score]]) -> _GroupRecord:
    rollouts = [
        _RolloutRecord(
            num_tokens=rollout.num_tokens,
            finish_reason=rollout.finish_reason,
            text=rollout.text,
            score=score,
            episode=rollout.episode,
            num_routes=0 if (content := rollout.content.load()).routes is None else len(content.routes),
            is_taught=content.teacher is not None,
        )
        for rollout, score in pairs
    ]
    num_trained = len(scored.group.rollouts)
    return _GroupRecord(
        position=scored.group.prompt.position,
        rollouts=tuple(rollouts[:num_trained]),
        baseline=rollouts[num_trained] if len(rollouts) > num_trained else None,
    )


class _TokenReader:
    """Reads the columns from their start, one rollout after the other."""

    def __init__(self, columns: dict[str, npt.NDArray[np.generic]]) -> None:
        self._columns = columns
        self._position = 0
        self._route = 0
        self._taught = 0

    def next_rollout(self, record: _RolloutRecord) -> Rollout:
        part = slice(self._position, self._position + record.num_tokens)
        self._position += record.num_tokens
        routes = self._columns[_ROUTES][self._route : self._route + record.num_routes] if record.num_routes else None
        self._route += record.num_routes
        num_taught = record.num_tokens if record.is_taught else 0
        teacher = self._columns[_TEACHER][self._taught : self._taught + num_taught] if num_taught else None
        self._taught += num_taught
        return Rollout(
            content=Content(
                token_ids=cast("npt.NDArray[np.int32]", self._columns["token_ids"][part]),
                logprobs=cast("npt.NDArray[np.float32]", self._columns["logprobs"][part]),
                text=record.text,
                routes=cast("RouteArray | None", routes),
                teacher=cast("npt.NDArray[np.float32] | None", teacher),
            ),
            versions=cast("npt.NDArray[np.int32]", self._columns["versions"][part]),
            loss_mask=cast("npt.NDArray[np.bool_]", self._columns["loss_mask"][part]),
            finish_reason=record.finish_reason,
            episode=record.episode,
        )


def _group(record: _GroupRecord, tokens: _TokenReader, prompt: Prompt) -> ScoredGroup:
    rollouts = tuple(tokens.next_rollout(item) for item in record.rollouts)
    baseline = None if record.baseline is None else tokens.next_rollout(record.baseline)
    return ScoredGroup(
        group=RolloutGroup(prompt=prompt, rollouts=rollouts, baseline=baseline),
        scores=tuple(item.score for item in record.rollouts),
        baseline=None if record.baseline is None else record.baseline.score,
    )


FOLDER = "open_step"
_RECORD_FILE = "open_step.json"
_PART_TOKENS = 16 << 20
"""Tokens of a part, of which one at a time is in memory when it is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    num_groups: int
    files: dict[str, FileDigest]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    version: int
    identity: str
    parts: tuple[_Part, ...]


_RECORD = TypeAdapter(_Record)


def write_open_step(run_folder: Path, groups: Sequence[ScoredGroup], *, version: PolicyVersion, identity: str) -> None:
    """Write groups that `version` answered; `identity` is equal in runs whose answers and scores would be the same."""
    partial = run_folder / f"{FOLDER}.tmp"
    shutil.rmtree(partial, ignore_errors=True)
    parts = []
    for index, of_part in enumerate(_parts(groups)):
        folder = partial / str(index)
        folder.mkdir(parents=True)
        parts.append(_Part(num_groups=len(of_part), files=write_carried(folder, of_part)))
        sync(folder)
    record = _Record(version=version, identity=identity, parts=tuple(parts))
    (partial / _RECORD_FILE).write_bytes(_RECORD.dump_json(record))
    sync(partial / _RECORD_FILE)
    sync(partial)
    shutil.rmtree(run_folder / FOLDER, ignore_errors=True)
    partial.rename(run_folder / FOLDER)


def take_open_step(
    run_folder: Path,
    *,
    version: PolicyVersion,
    identity: str,
    prompt_at: Callable[[int], Prompt],
    warn: Callable[[str], None],
) -> list[ScoredGroup]:
    """Return the groups that were written for this version of this run, and remove the folder.

    Damaged ones are left out with a warning: their prompts are asked again.
    """
    folder = run_folder / FOLDER
    if not folder.is_dir():
        return []
    try:
        record = _RECORD.validate_json((folder / _RECORD_FILE).read_bytes())
        if (record.version, record.identity) != (version, identity):
            return []
        return [
            group for index, part in enumerate(record.parts) for group in _read(folder / str(index), part, prompt_at)
        ]
    except (OSError, ValidationError, CheckpointError) as error:
        warn(f"{folder}: answers of the next step cannot be read and are asked again: {first_line(error)}")
        return []
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _read(folder: Path, part: _Part, prompt_at: Callable[[int], Prompt]) -> list[ScoredGroup]:
    for name, digest in part.files.items():
        if digest_file(folder / name) != digest:
            raise CheckpointError(f"{folder / name} is damaged")
    return read_carried(folder, part.num_groups, prompt_at)


def _parts(groups: Sequence[ScoredGroup]) -> Iterator[list[ScoredGroup]]:
    part: list[ScoredGroup] = []
    num_tokens = 0
    for scored in groups:
        part.append(scored)
        num_tokens += sum(rollout.num_tokens for rollout in scored.group.rollouts)
        if num_tokens >= _PART_TOKENS:
            yield part
            part, num_tokens = [], 0
    if part:
        yield part
