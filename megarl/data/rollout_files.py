"""Samples of training in files, for people to read: `<run>/rollouts/step_N.parquet`, one rollout per row.

A list of them needs only small columns; the columns per token are read for one rollout at a time. The rollouts of
evaluations are in `evaluation_files`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from megarl.errors import MachineError
from megarl.tokens import COLUMNS, TokenColumn
from megarl.types import (
    DEMONSTRATION,
    Episode,
    FloatArray,
    Rollout,
    Score,
    ScoredGroup,
    TokenArray,
    TrainSample,
    with_short_images,
)

ROLLOUTS_FOLDER = "rollouts"
MAX_TABLE_ROWS = 64
"""Rows that are read to show one rollout."""

_STEP_FILE = re.compile(r"step_(\d{6,})\.(parquet|jsonl)")
_PARTIAL = ".tmp"
_LINE_CHARS = 160
_MAX_TOKENS_PER_CHAR = 4
_CUT_CHAR = "\N{REPLACEMENT CHARACTER}"
"""Ends the text of tokens that end within a character."""
_SPAN = {"start": pa.int32(), "end": pa.int32(), "kind": pa.string()}
_TURN = pa.struct({**_SPAN, "reward": pa.float64(), "seconds": pa.float64(), "versions": pa.list_(pa.int32())})


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRollout:
    """A rollout with its score, its training sample and the trainer's log-probabilities."""

    group: ScoredGroup
    index: int
    """Its place among the rollouts of the prompt."""
    sample: TrainSample
    trainer_logprobs: FloatArray  # [T], of the policy before the step's first update

    @property
    def score(self) -> Score:
        return self.group.scores[self.index]

    @property
    def largest_gap(self) -> float:
        """Largest difference between the log-probabilities of engine and trainer, over the tokens in the loss."""
        rollout = self.sample.rollout
        gaps = np.abs(rollout.logprobs - self.trainer_logprobs)[rollout.loss_mask]
        return float(gaps.max()) if len(gaps) else 0.0


def rollouts_file(run_folder: Path, step: int) -> Path:
    return run_folder / ROLLOUTS_FOLDER / f"step_{step:06d}.parquet"


def list_rollouts(run_folder: Path) -> dict[int, Path]:
    """Return the files by step, in the order of steps."""
    return list_steps(run_folder / ROLLOUTS_FOLDER)


def list_steps(folder: Path) -> dict[int, Path]:
    """Return the files of steps by step, in the order of steps."""
    names = {path: _STEP_FILE.fullmatch(path.name) for path in folder.iterdir()} if folder.is_dir() else {}
    return dict(sorted((int(match.group(1)), path) for path, match in names.items() if match))


def write_rollouts(path: Path, rollouts: Sequence[SampledRollout], *, decode: Callable[[TokenArray], str]) -> None:
    """Write the file in one operation. `decode` returns the text of tokens, special ones included."""
    batches = (rollouts[first : first + MAX_TABLE_ROWS] for first in range(0, len(rollouts), MAX_TABLE_ROWS))
    singles: dict[int, str] = {}
    write_tables(path, (make_table(batch, decode, singles) for batch in batches))


def write_tables(path: Path, tables: Iterable[pa.Table]) -> None:
    """Write a file with a row group for each table; under its name it is complete. No table makes no file."""
    # Tables come one at a time: the rows of a step may be larger than the memory that is left. No other process, such
    # as one that was taken for dead, writes to the same name.
    partial = path.with_name(f"{path.name}.{uuid4().hex[:8]}{_PARTIAL}")
    try:
        with ExitStack() as stack:
            writer: pq.ParquetWriter | None = None
            for table in tables:
                if writer is None:
                    make_text_folder(path.parent)
                    writer = stack.enter_context(pq.ParquetWriter(partial, table.schema))
                writer.write_table(table)
        if writer is not None:
            partial.replace(path)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        raise MachineError(f"{path}: cannot be written: {reason}") from error
    finally:
        with suppress(OSError):
            partial.unlink()


def make_table(
    rollouts: Sequence[SampledRollout], decode: Callable[[TokenArray], str], singles: dict[int, str]
) -> pa.Table:
    """Return one row per rollout. `singles` gets the text of every token alone."""
    prompts = [rollout.group.group.prompt for rollout in rollouts]
    samples = [rollout.sample for rollout in rollouts]
    _decode_singles(samples, decode, singles)
    return pa.table(
        {
            "prompt_uid": [prompt.uid for prompt in prompts],
            "data_source": [prompt.data_source for prompt in prompts],
            "index": [rollout.index for rollout in rollouts],
            "score": pa.array([rollout.score.value for rollout in rollouts], pa.float64()),
            "is_masked": [rollout.score.is_masked for rollout in rollouts],
            "components": pa.array(
                [list(rollout.score.components.items()) for rollout in rollouts], pa.map_(pa.string(), pa.float64())
            ),
            "prediction": pa.array([rollout.score.prediction for rollout in rollouts], pa.string()),
            "ground_truth": [prompt.ground_truth for prompt in prompts],
            "num_tokens": [sample.rollout.num_tokens for sample in samples],
            "largest_gap": [rollout.largest_gap for rollout in rollouts],
            "first_version": [int(_chosen(sample.rollout).min()) for sample in samples],
            "last_version": [int(_chosen(sample.rollout).max()) for sample in samples],
            "ending": pa.array([sample.rollout.episode.ending for sample in samples], pa.string()),
            "began": pa.array([sample.rollout.episode.began for sample in samples], pa.float64()),
            "row_starts": pa.array([sample.rollout.episode.rows for sample in samples], pa.list_(pa.int32())),
            "turns": pa.array([_turns(sample.rollout.episode) for sample in samples], pa.list_(_TURN)),
            "line": [_line(sample.rollout.text) for sample in samples],
            "prompt": [decode(with_short_images(sample.prompt_ids, sample.images)) for sample in samples],
            "images": pa.array([_digests(sample) for sample in samples], pa.list_(pa.string())),
            "pieces": pa.array(
                [_pieces(sample.rollout.token_ids, decode, singles) for sample in samples], pa.list_(pa.string())
            ),
            "trainer_logprobs": [rollout.trainer_logprobs for rollout in rollouts],
            **_columns(samples),
        },
    )


def _digests(sample: TrainSample) -> list[str]:
    return [image.digest for image in sample.images]


def _turns(episode: Episode) -> list[dict[str, Any]]:
    return [asdict(turn) for turn in episode.turns]


def _chosen(rollout: Rollout) -> npt.NDArray[np.int32]:
    """Return the versions of the tokens that a policy chose, or of all where it chose none."""
    chosen = rollout.versions[rollout.versions != DEMONSTRATION]
    return chosen if len(chosen) else rollout.versions


def write_samples(path: Path, samples: Sequence[TrainSample]) -> None:
    """Write one row per sample: its tokens and text, and every number per token."""
    write_tables(path, [pa.table(_columns(samples))])


def make_text_folder(folder: Path) -> None:
    """Make a folder for prompts and responses: other users do not enter it, and its group does as the umask says."""
    folder.mkdir(mode=0o770, parents=True, exist_ok=True)


def prune_rollouts(run_folder: Path, *, max_bytes: int) -> None:
    """Remove the oldest files until the rest has at most `max_bytes`; the newest one stays.

    Files that a killed process did not finish are removed as well: only one process writes at a time.
    """
    for partial in (run_folder / ROLLOUTS_FOLDER).glob(f"*{_PARTIAL}"):
        partial.unlink(missing_ok=True)
    files = list(list_rollouts(run_folder).values())
    total = sum(path.stat().st_size for path in files)
    for path in files[:-1]:
        if total <= max_bytes:
            return
        total -= path.stat().st_size
        path.unlink()


def _columns(samples: Sequence[TrainSample]) -> dict[str, Any]:
    """Return the tokens and text of each sample, and every single number per token."""
    singles = [column for column in COLUMNS if column.is_single]
    return {
        "prompt_ids": [sample.prompt_ids for sample in samples],
        "text": [sample.rollout.text for sample in samples],
        "finish_reason": [sample.rollout.finish_reason.value for sample in samples],
        **{column.packed_as or column.name: _column(column, samples) for column in singles},
    }


def _column(column: TokenColumn, samples: Sequence[TrainSample]) -> pa.Array:
    """Return a column whose type does not depend on whether there are values."""
    match column.owner:
        case "content":
            arrays = [getattr(sample.rollout.content.load(), column.name) for sample in samples]
        case "rollout":
            arrays = [getattr(sample.rollout, column.name) for sample in samples]
        case "sample":
            arrays = [getattr(sample, column.name) for sample in samples]
    return pa.array(arrays, pa.list_(pa.from_numpy_dtype(column.dtype)))


def _decode_singles(
    samples: Sequence[TrainSample], decode: Callable[[TokenArray], str], singles: dict[int, str]
) -> None:
    """Add the text of each token of the responses that `singles` does not have: a vocabulary has few in use."""
    if not samples:
        return
    used = np.unique(np.concatenate([sample.rollout.token_ids for sample in samples]))
    for token_id in used.tolist():
        if token_id not in singles:
            singles[token_id] = decode(np.array([token_id], dtype=np.int32))


def _pieces(token_ids: TokenArray, decode: Callable[[TokenArray], str], singles: Mapping[int, str]) -> list[str]:
    """Return the text of each token. A character of several tokens appears with the last of them."""
    pieces = [singles[token_id] for token_id in token_ids.tolist()]
    next_first = 0
    for first in [place for place, piece in enumerate(pieces) if piece.endswith(_CUT_CHAR)]:
        if first < next_first:
            continue  # a part of a character that began before
        for end in range(first + 1, len(pieces) + 1):
            text = decode(token_ids[first:end]) if end > first + 1 else pieces[first]
            is_open = text.endswith(_CUT_CHAR) and end < len(pieces) and end - first < _MAX_TOKENS_PER_CHAR
            pieces[end - 1] = "" if is_open else text
            if not is_open:
                next_first = end
                break
    return pieces


def _line(text: str) -> str:
    """Return the beginning of the text, on one line."""
    return " ".join(text[: 2 * _LINE_CHARS].split())[:_LINE_CHARS]
