"""The groups that a preempted run had answered for its next step: the run that continues it does not ask again.

They lie in a folder of the run beside its checkpoints, which are complete without it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from megarl.checkpoint.carried import read_carried, write_carried
from megarl.checkpoint.manifest import FileDigest, digest_file, sync
from megarl.errors import CheckpointError, first_line
from megarl.types import PolicyVersion, Prompt, ScoredGroup

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
