"""Scored groups in files: how they survive the process that had them.

A checkpoint carries the groups that were scored but not trained on when it was made; a resumed run trains on the same
ones. A preempted run leaves those of its open step in its folder, in parts; the next start of the run takes them from
there. Numbers per token are stored end to end in a safetensors file, all else in a JSON file.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError
from safetensors.numpy import load_file

from megarl.checkpoint.manifest import FileDigest, digest_file, sync
from megarl.checkpoint.tensor_files import write_tensor_file
from megarl.data.group_encoding import GroupRecord, JoinedColumns, content_columns, rollout_columns
from megarl.errors import CheckpointError, first_line
from megarl.tokens import OF_ROLLOUT, Content
from megarl.types import PolicyVersion, Prompt, ScoredGroup

TOKENS_FILE = "carried.safetensors"
GROUPS_FILE = "carried.json"
OPEN_STEP_FOLDER = "open_step"

_STARTS = "starts."
"""Before the name of a column: where the numbers of each rollout begin in it."""
_TYPES = {"int32": "I32", "int64": "I64", "float32": "F32", "bool": "BOOL", "uint8": "U8", "uint16": "U16"}
_OPEN_STEP_FILE = "open_step.json"
_PART_TOKENS = 16 << 20
"""Tokens of a part of an open step; one part at a time is in memory when it is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _FiledGroup:
    position: int
    """Position of the prompt in the stream."""
    record: GroupRecord
    texts: tuple[str, ...]
    """The text of each rollout."""


_FILED: TypeAdapter[tuple[_FiledGroup, ...]] = TypeAdapter(tuple[_FiledGroup, ...])


def write_groups(folder: Path, groups: Sequence[ScoredGroup]) -> dict[str, FileDigest]:
    """Write the groups into a folder that is being made; without groups no file is written."""
    if not groups:
        return {}
    rollouts = [rollout for scored in groups for rollout in scored.group.with_baseline]
    joined = JoinedColumns.of([{**content_columns(each.content.load()), **rollout_columns(each)} for each in rollouts])
    arrays = {**joined.arrays, **{f"{_STARTS}{name}": starts for name, starts in joined.starts.items()}}
    specs = {name: (_TYPES[array.dtype.name], array.shape) for name, array in arrays.items()}
    digest = write_tensor_file(folder / TOKENS_FILE, specs, lambda entry: [arrays[entry.name].tobytes()])
    filed = tuple(
        _FiledGroup(
            position=scored.group.prompt.position,
            record=GroupRecord.of(scored),
            texts=tuple(rollout.text for rollout in scored.group.with_baseline),
        )
        for scored in groups
    )
    (folder / GROUPS_FILE).write_bytes(_FILED.dump_json(filed) + b"\n")
    for name in (TOKENS_FILE, GROUPS_FILE):
        sync(folder / name)
    return {TOKENS_FILE: digest, GROUPS_FILE: digest_file(folder / GROUPS_FILE)}


def read_groups(folder: Path, num_groups: int, prompt_at: Callable[[int], Prompt]) -> list[ScoredGroup]:
    """Return the groups that `write_groups` wrote, with the prompts of the resumed run."""
    if num_groups == 0:
        return []
    try:
        filed = _FILED.validate_json((folder / GROUPS_FILE).read_bytes())
        arrays = load_file(folder / TOKENS_FILE)
    except (OSError, ValidationError) as error:
        raise CheckpointError(f"{folder}: cannot read its carried groups: {first_line(error)}") from error
    if len(filed) != num_groups:
        raise CheckpointError(f"{folder / GROUPS_FILE}: has {len(filed)} groups, state.json counts {num_groups}")
    starts = {name.removeprefix(_STARTS): array for name, array in arrays.items() if name.startswith(_STARTS)}
    columns = JoinedColumns(arrays={name: arrays[name] for name in starts}, starts=starts)
    groups: list[ScoredGroup] = []
    first = 0
    for each in filed:
        contents = []
        of_rollouts = []
        for index, text in enumerate(each.texts, start=first):
            of_content = columns.of_response(index)
            of_rollouts.append({column.name: of_content.pop(column.name) for column in OF_ROLLOUT})
            contents.append(Content(text=text, **of_content))
        groups.append(each.record.scored_group(prompt_at(each.position), contents, of_rollouts))
        first += len(each.texts)
    return groups


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    num_groups: int
    files: dict[str, FileDigest]


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenStep:
    version: int
    identity: str
    parts: tuple[_Part, ...]


_OPEN_STEP = TypeAdapter(_OpenStep)


def write_open_step(run_folder: Path, groups: Sequence[ScoredGroup], *, version: PolicyVersion, identity: str) -> None:
    """Write groups that `version` answered; `identity` is equal in runs whose answers and scores would be the same."""
    partial = run_folder / f"{OPEN_STEP_FOLDER}.tmp"
    shutil.rmtree(partial, ignore_errors=True)
    parts = []
    for index, of_part in enumerate(_parts(groups)):
        folder = partial / str(index)
        folder.mkdir(parents=True)
        parts.append(_Part(num_groups=len(of_part), files=write_groups(folder, of_part)))
        sync(folder)
    record = _OpenStep(version=version, identity=identity, parts=tuple(parts))
    (partial / _OPEN_STEP_FILE).write_bytes(_OPEN_STEP.dump_json(record))
    sync(partial / _OPEN_STEP_FILE)
    sync(partial)
    shutil.rmtree(run_folder / OPEN_STEP_FOLDER, ignore_errors=True)
    partial.rename(run_folder / OPEN_STEP_FOLDER)


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
    folder = run_folder / OPEN_STEP_FOLDER
    if not folder.is_dir():
        return []
    try:
        record = _OPEN_STEP.validate_json((folder / _OPEN_STEP_FILE).read_bytes())
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
    return read_groups(folder, part.num_groups, prompt_at)


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
