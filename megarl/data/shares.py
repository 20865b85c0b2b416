"""The share of one data-parallel rank of a step: handles of its responses, and the micro-batches that it makes of them.

The driver makes shares from lengths and credit; it does not read a token. The rank loads the responses of its share and
fills the micro-batches. Deterministic: equal samples give equal batches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from megarl.data.packing import MiniBatchPlan, Packing, plan_packs
from megarl.tokens import ContentHandle, SampleNumbers, is_repeated, num_true
from megarl.types import FloatArray, MicroBatch, MiniBatch, TokenArray, TrainBatch, TrainSample

_PADDING = -1
_CREDIT = ("advantages", "old_logprobs", "reference_logprobs", "values", "returns")
QUESTION = ("loss_mask", "rollout_logprobs", *_CREDIT)
"""Columns that a model does not need to compute numbers of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareSample:
    """One sample as it is sent to a rank."""

    prompt_ids: TokenArray  # [P]
    num_tokens: int
    """Tokens of the response."""
    content: ContentHandle
    columns: Mapping[str, npt.NDArray[Any]]  # [T] each, or [1] where all tokens have the same

    @property
    def num_positions(self) -> int:
        return len(self.prompt_ids) + self.num_tokens - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareOfUpdate:
    """The part of one optimizer update: the samples of each micro-batch, and the counts of all ranks."""

    micro_batches: tuple[tuple[int, ...], ...]
    num_tokens: int
    """The length of every micro-batch."""
    num_loss_tokens: int
    num_sequences: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One data-parallel rank's part of a step, before its tokens are loaded."""

    samples: Mapping[int, ShareSample]
    """By index into the step's samples."""
    updates: tuple[ShareOfUpdate, ...]
    temperature: float
    columns: tuple[str, ...]
    """Columns of `samples`, and `rollout_logprobs` where the rank needs them."""

    def fill(self) -> TrainBatch:
        """Load the responses and pack them."""
        mini_batches = []
        for update in self.updates:
            rows = _rows(len(update.micro_batches), update.num_tokens, self.columns)
            mini_batches.append(
                MiniBatch(
                    micro_batches=tuple(
                        _micro_batch(self.samples, members, row)
                        for members, row in zip(update.micro_batches, rows, strict=True)
                    ),
                    num_loss_tokens=update.num_loss_tokens,
                    num_sequences=update.num_sequences,
                )
            )
        return TrainBatch(mini_batches=tuple(mini_batches), temperature=self.temperature)


def make_shares(
    samples: Sequence[TrainSample],
    packing: Packing,
    *,
    temperature: float,
    has_versions: bool = False,
    without: Collection[str] = (),
) -> Iterator[Share]:
    """Yield the share of each data-parallel rank; no response is loaded.

    `has_versions` adds the policy that chose each token. Columns named in `without` are left out.
    """
    plans = plan_packs([num_positions(sample) for sample in samples], packing)
    num_chosen = [num_true(sample.rollout.loss_mask) for sample in samples]
    wanted = ("loss_mask", "rollout_logprobs", *(["versions"] if has_versions else []))
    # All samples of a step have the same columns.
    given = [name for name in _CREDIT if getattr(samples[0], name) is not None]
    columns = tuple(name for name in (*wanted, *given) if name not in without)
    for rank in range(packing.data_parallel):
        members = {i for plan in plans for micro_batch in plan.shares[rank] for i in micro_batch}
        yield Share(
            samples={i: _share_sample(samples[i], columns) for i in sorted(members)},
            updates=tuple(_share_of_update(plan, rank, num_chosen) for plan in plans),
            temperature=temperature,
            columns=columns,
        )


def pack(
    samples: Sequence[TrainSample],
    packing: Packing,
    *,
    temperature: float,
    has_versions: bool = False,
    without: Collection[str] = (),
) -> Iterator[TrainBatch]:
    """Yield the filled shares of a step; the arguments are those of `make_shares`."""
    shares = make_shares(samples, packing, temperature=temperature, has_versions=has_versions, without=without)
    return (share.fill() for share in shares)


def _share_of_update(plan: MiniBatchPlan, rank: int, num_chosen: Sequence[int]) -> ShareOfUpdate:
    chosen = [num_chosen[i] for i in plan.members]
    return ShareOfUpdate(
        micro_batches=plan.shares[rank],
        num_tokens=plan.num_tokens,
        num_loss_tokens=sum(chosen),
        num_sequences=sum(count > 0 for count in chosen),
    )


def _share_sample(sample: TrainSample, columns: Sequence[str]) -> ShareSample:
    rollout = sample.rollout
    arrays = {
        name: getattr(rollout if name in ("loss_mask", "versions") else sample, name)
        for name in columns
        if name != "rollout_logprobs"
    }
    return ShareSample(
        prompt_ids=sample.prompt_ids,
        num_tokens=rollout.num_tokens,
        content=rollout.content,
        columns={name: array[:1].copy() if is_repeated(array) else array for name, array in arrays.items()},
    )


def unpack(batch: TrainBatch, columns: Sequence[Sequence[FloatArray]]) -> SampleNumbers:
    """Return the numbers of the response tokens of a share's samples. `columns`: [N] per mini-batch and micro-batch."""
    sample_ids: list[int] = []
    arrays: list[FloatArray] = []
    for mini_batch, of_share in zip(batch.mini_batches, columns, strict=True):
        for micro_batch, of_tokens in zip(mini_batch.micro_batches, of_share, strict=True):
            for sample_id, start, end in _responses(micro_batch):
                sample_ids.append(sample_id)
                arrays.append(of_tokens[start:end])
    return SampleNumbers(
        sample_ids=_int32(sample_ids),
        starts=np.cumsum([0, *map(len, arrays)], dtype=np.int64),
        numbers=np.concatenate(arrays).astype(np.float32, copy=False) if arrays else np.zeros(0, np.float32),
    )


def assemble(parts: Sequence[SampleNumbers]) -> tuple[FloatArray, ...]:
    """Return one array per sample of a step from the parts of all data-parallel ranks."""
    by_sample: dict[int, FloatArray] = {}
    for part in parts:
        by_sample |= part.by_sample()
    return tuple(by_sample[sample_id] for sample_id in range(len(by_sample)))


def with_numbers(batch: TrainBatch, numbers: Mapping[str, Sequence[SampleNumbers]]) -> TrainBatch:
    """Return the share with these columns, each from parts that together have all of its samples."""
    if not numbers:
        return batch
    found = {
        name: {sample_id: array for part in parts for sample_id, array in part.by_sample().items()}
        for name, parts in numbers.items()
    }

    def complete(micro_batch: MicroBatch) -> MicroBatch:
        columns = {name: _column(micro_batch, by_sample) for name, by_sample in found.items()}
        return replace(
            micro_batch,
            old_logprobs=columns.get("old_logprobs", micro_batch.old_logprobs),
            reference_logprobs=columns.get("reference_logprobs", micro_batch.reference_logprobs),
            values=columns.get("values", micro_batch.values),
        )

    mini_batches = (
        replace(each, micro_batches=tuple(map(complete, each.micro_batches))) for each in batch.mini_batches
    )
    return replace(batch, mini_batches=tuple(mini_batches))


def _column(micro_batch: MicroBatch, by_sample: Mapping[int, FloatArray]) -> FloatArray:
    column = np.zeros(len(micro_batch.token_ids), np.float32)
    for sample_id, start, end in _responses(micro_batch):
        column[start:end] = by_sample[sample_id]
    return column


def _responses(micro_batch: MicroBatch) -> Iterator[tuple[int, int, int]]:
    """Yield index, first and end position of the response of every sample."""
    ends = micro_batch.sequence_starts[1:]
    for sample_id, start, end in zip(micro_batch.sample_ids, micro_batch.response_starts, ends, strict=True):
        if sample_id != _PADDING:
            yield int(sample_id), int(start), int(end)


def num_positions(sample: TrainSample) -> int:
    """Return the number of input tokens: the last token predicts nothing and is no input."""
    num_prompt, num_response = len(sample.prompt_ids), sample.rollout.num_tokens
    assert min(num_prompt, num_response) > 0, f"prompt of {num_prompt} tokens, response of {num_response}"
    return num_prompt + num_response - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """The columns of one micro-batch, [N] each, to be filled."""

    token_ids: TokenArray
    columns: Mapping[str, npt.NDArray[Any]]


_DTYPES: dict[str, type[np.generic]] = {"loss_mask": np.bool_, "versions": np.int32}


def _rows(num_rows: int, num_tokens: int, names: Sequence[str]) -> Iterator[_Row]:
    """Yield zeros for each micro-batch. The columns of all are allocated at once: large arrays get large pages."""
    shape = (num_rows, num_tokens)
    token_ids = np.zeros(shape, np.int32)
    columns = {name: np.zeros(shape, _DTYPES.get(name, np.float32)) for name in names}
    for row in range(num_rows):
        yield _Row(token_ids=token_ids[row], columns={name: column[row] for name, column in columns.items()})


def _micro_batch(samples: Mapping[int, ShareSample], members: Sequence[int], row: _Row) -> MicroBatch:
    num_tokens = len(row.token_ids)
    starts, last_ids, response_starts, sample_ids = [0], [], [], []
    for sample_id in members:
        sample = samples[sample_id]
        content = sample.content.load()
        assert len(content.token_ids) == sample.num_tokens, f"{len(content.token_ids)} tokens, not {sample.num_tokens}"
        start, end = starts[-1], starts[-1] + sample.num_positions
        first = end - sample.num_tokens
        row.token_ids[start : first + 1] = sample.prompt_ids
        row.token_ids[first + 1 : end] = content.token_ids[:-1]
        for name, column in row.columns.items():
            column[first:end] = content.logprobs if name == "rollout_logprobs" else sample.columns[name]
        starts.append(end)
        last_ids.append(int(content.token_ids[-1]))
        response_starts.append(first)
        sample_ids.append(sample_id)
    if starts[-1] < num_tokens:
        # The same token at every position would be sent to the same few experts of a mixture.
        known = row.token_ids[: starts[-1]] if members else next((each.prompt_ids for each in samples.values()), [0])
        row.token_ids[starts[-1] :] = np.resize(known, num_tokens - starts[-1])
        starts.append(num_tokens)
        last_ids.append(0)
        response_starts.append(num_tokens)
        sample_ids.append(_PADDING)
    nothing, get = np.zeros(0, np.float32), row.columns.get
    return MicroBatch(
        token_ids=row.token_ids,
        sequence_starts=_int32(starts),
        last_ids=_int32(last_ids),
        loss_mask=get("loss_mask", np.zeros(0, np.bool_)),
        rollout_logprobs=get("rollout_logprobs", nothing),
        advantages=get("advantages", nothing),
        old_logprobs=get("old_logprobs"),
        reference_logprobs=get("reference_logprobs"),
        values=get("values"),
        returns=get("returns"),
        sample_ids=_int32(sample_ids),
        response_starts=_int32(response_starts),
        versions=get("versions"),
    )


def _int32(values: Sequence[int]) -> npt.NDArray[np.int32]:
    return np.asarray(values, np.int32)
