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
from uuid import uuid4

from pydantic import TypeAdapter, ValidationError
from safetensors.numpy import load_file

from megarl.checkpoint.manifest import FileDigest, digest_file, sync
from megarl.checkpoint.tensor_files import write_tensor_file
from megarl.data.group_encoding import GroupRecord, JoinedColumns, content_columns, rollout_columns
from megarl.data.rollout_files import make_text_folder
from megarl.errors import CheckpointError, first_line
from megarl.system.run_lock import check_held
from megarl.tokens import OF_ROLLOUT, Content
from megarl.types import PolicyVersion, Prompt, ScoredGroup

TOKENS_FILE = "carried.safetensors"
GROUPS_FILE = "carried.json"
OPEN_STEP_FOLDER = "open_step"

_STARTS = "starts."
"""Before the name of a column: where the numbers of each rollout begin in it."""
_TYPES = {"int32": "I32", "int64": "I64", "float32": "F32", "bool": "BOOL", "uint8": "U8", "uint16": "U16"}
_OPEN_PART_FILE = "part.json"
_PARTIAL = ".tmp"
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
class _OpenPart:
    version: int
    identity: str
    num_groups: int
    files: dict[str, FileDigest]


_OPEN_PART = TypeAdapter(_OpenPart)


def write_open_step(
    run_folder: Path,
    groups: Sequence[ScoredGroup],
    *,
    version: PolicyVersion,
    identity: str,
    is_continued: bool = False,
) -> None:
    """Write groups that `version` answered; `identity` is equal in runs whose answers and scores would be the same.

    Each part is complete under its name. With `is_continued` it comes beside those that are there. Raise MachineError
    where another driver has the run: they are its own.
    """
    folder = run_folder / OPEN_STEP_FOLDER
    check_held(run_folder)
    if not is_continued:
        remove_open_step(run_folder)
    make_text_folder(folder)
    for of_part in _parts(groups):
        name = uuid4().hex
        partial = folder / f"{name}{_PARTIAL}"
        partial.mkdir()
        files = write_groups(partial, of_part)
        record = _OpenPart(version=version, identity=identity, num_groups=len(of_part), files=files)
        (partial / _OPEN_PART_FILE).write_bytes(_OPEN_PART.dump_json(record))
        sync(partial / _OPEN_PART_FILE)
        sync(partial)
        check_held(run_folder)
        partial.rename(folder / name)
    sync(folder)


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
    groups: list[ScoredGroup] = []
    for part in sorted(folder.iterdir()) if folder.is_dir() else ():
        if part.name.endswith(_PARTIAL):
            continue  # its driver was killed while it wrote
        try:
            record = _OPEN_PART.validate_json((part / _OPEN_PART_FILE).read_bytes())
            if (record.version, record.identity) == (version, identity):
                groups += _read(part, record, prompt_at)
        except (OSError, ValidationError, CheckpointError) as error:
            warn(f"{part}: answers of the next step cannot be read and are asked again: {first_line(error)}")
    remove_open_step(run_folder)
    return sorted(groups, key=lambda scored: scored.group.prompt.position)


def remove_open_step(run_folder: Path) -> None:
    shutil.rmtree(run_folder / OPEN_STEP_FOLDER, ignore_errors=True)


def _read(folder: Path, part: _OpenPart, prompt_at: Callable[[int], Prompt]) -> list[ScoredGroup]:
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
