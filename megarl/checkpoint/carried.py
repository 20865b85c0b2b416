"""Groups that were scored but not trained on when a checkpoint was made: a run that goes on trains on the same ones.

Tokens in a safetensors file, end to end; what belongs to a rollout or a group as a whole in JSON beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError
from safetensors.numpy import load_file

from megarl.checkpoint.manifest import FileDigest, digest_file, sync
from megarl.checkpoint.tensor_file import write_tensor_file
from megarl.errors import CheckpointError
from megarl.types import FinishReason, Prompt, Rollout, RolloutGroup, Score, ScoredGroup

TOKENS_FILE = "carried.safetensors"
GROUPS_FILE = "carried.json"

_COLUMNS: dict[str, tuple[str, type[np.generic]]] = {
    "token_ids": ("I32", np.int32),
    "logprobs": ("F32", np.float32),
    "versions": ("I32", np.int32),
    "loss_mask": ("BOOL", np.bool_),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _RolloutRecord:
    num_tokens: int
    finish_reason: FinishReason
    text: str
    score: Score


@dataclass(frozen=True, slots=True, kw_only=True)
class _GroupRecord:
    position: int
    """Of its prompt in the stream."""
    rollouts: tuple[_RolloutRecord, ...]
    baseline: _RolloutRecord | None


_RECORDS: TypeAdapter[tuple[_GroupRecord, ...]] = TypeAdapter(tuple[_GroupRecord, ...])


def write_carried(folder: Path, groups: Sequence[ScoredGroup]) -> dict[str, FileDigest]:
    """Into a checkpoint that is being made; no file where there is no group."""
    if not groups:
        return {}
    pairs = [_judged(scored) for scored in groups]
    rollouts = [rollout for of_group in pairs for rollout, _ in of_group]
    columns = {
        name: np.concatenate([getattr(rollout, name) for rollout in rollouts]).astype(dtype)
        for name, (_, dtype) in _COLUMNS.items()
    }
    specs = {name: (_COLUMNS[name][0], column.shape) for name, column in columns.items()}
    digest = write_tensor_file(folder / TOKENS_FILE, specs, lambda entry: [columns[entry.name].tobytes()])
    records = tuple(_record(scored, of_group) for scored, of_group in zip(groups, pairs, strict=True))
    (folder / GROUPS_FILE).write_bytes(_RECORDS.dump_json(records) + b"\n")
    for name in (TOKENS_FILE, GROUPS_FILE):
        sync(folder / name)
    return {TOKENS_FILE: digest, GROUPS_FILE: digest_file(folder / GROUPS_FILE)}


def read_carried(folder: Path, num_groups: int, prompt_at: Callable[[int], Prompt]) -> list[ScoredGroup]:
    """What `write_carried` wrote, with the prompts of the run that goes on."""
    if num_groups == 0:
        return []
    try:
        records = _RECORDS.validate_json((folder / GROUPS_FILE).read_bytes())
        columns = load_file(folder / TOKENS_FILE)
    except (OSError, ValidationError) as error:
        raise CheckpointError(f"{folder}: its carried groups cannot be read: {str(error).splitlines()[0]}") from error
    if len(records) != num_groups:
        raise CheckpointError(f"{folder / GROUPS_FILE}: has {len(records)} groups, its state says {num_groups}")
    tokens = _Tokens(columns)
    return [_group(record, tokens, prompt_at(record.position)) for record in records]


def _judged(scored: ScoredGroup) -> list[tuple[Rollout, Score]]:
    pairs = list(zip(scored.group.rollouts, scored.scores, strict=True))
    if scored.group.baseline is not None and scored.baseline is not None:
        pairs.append((scored.group.baseline, scored.baseline))
    return pairs


def _record(scored: ScoredGroup, judged: Sequence[tuple[Rollout, Score]]) -> _GroupRecord:
    rollouts = [
        _RolloutRecord(
            num_tokens=len(rollout.token_ids), finish_reason=rollout.finish_reason, text=rollout.text, score=score
        )
        for rollout, score in judged
    ]
    num_trained = len(scored.group.rollouts)
    return _GroupRecord(
        position=scored.group.prompt.position,
        rollouts=tuple(rollouts[:num_trained]),
        baseline=rollouts[num_trained] if len(rollouts) > num_trained else None,
    )


class _Tokens:
    """The columns, read from their start."""

    def __init__(self, columns: dict[str, npt.NDArray[np.generic]]) -> None:
        self._columns = columns
        self._place = 0

    def rollout(self, record: _RolloutRecord) -> Rollout:
        part = slice(self._place, self._place + record.num_tokens)
        self._place += record.num_tokens
        return Rollout(
            token_ids=cast("npt.NDArray[np.int32]", self._columns["token_ids"][part]),
            logprobs=cast("npt.NDArray[np.float32]", self._columns["logprobs"][part]),
            versions=cast("npt.NDArray[np.int32]", self._columns["versions"][part]),
            loss_mask=cast("npt.NDArray[np.bool_]", self._columns["loss_mask"][part]),
            finish_reason=record.finish_reason,
            text=record.text,
        )


def _group(record: _GroupRecord, tokens: _Tokens, prompt: Prompt) -> ScoredGroup:
    rollouts = tuple(tokens.rollout(item) for item in record.rollouts)
    baseline = None if record.baseline is None else tokens.rollout(record.baseline)
    return ScoredGroup(
        group=RolloutGroup(prompt=prompt, rollouts=rollouts, baseline=baseline),
        scores=tuple(item.score for item in record.rollouts),
        baseline=None if record.baseline is None else record.baseline.score,
    )
