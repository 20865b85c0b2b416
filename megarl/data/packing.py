"""Packs samples into micro-batches: which sequences share one, on which data-parallel rank, at which offset.

`plan_packs` decides from lengths alone; `fill` copies the tokens of one rank's share. Both are pure and deterministic:
equal samples give equal batches. Knows no models or devices. The packing changes speed and memory, not the loss.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from megarl.types import (
    BoolArray,
    FloatArray,
    MicroBatch,
    MiniBatch,
    SampleNumbers,
    TokenArray,
    TrainBatch,
    TrainSample,
)

_PADDING = -1
_CREDIT = ("advantages", "old_logprobs", "reference_logprobs", "values", "returns")
QUESTION = ("loss_mask", "rollout_logprobs", *_CREDIT)
"""Columns that a model does not need to compute numbers of tokens."""

_Bins: TypeAlias = list[list[int]]
"""The samples of each micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceCost:
    """The work of one sequence: linear in its length, and for attention also quadratic. Only the ratio matters."""

    per_token: float = 1.0
    per_squared_token: float = 0.0

    def of(self, length: int) -> float:
        return self.per_token * length + self.per_squared_token * length * length


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How the samples of a step are divided."""

    data_parallel: int
    tokens_per_micro_batch: int
    samples_per_update: int | None
    """None makes one mini-batch of all samples."""
    pad_multiple: int
    micro_batch_multiple: int
    cost: SequenceCost = SequenceCost()


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatchPlan:
    """The micro-batches of one optimizer update, as indices into the step's samples."""

    members: tuple[int, ...]
    shares: tuple[tuple[tuple[int, ...], ...], ...]
    """Per data-parallel rank the samples of each of its micro-batches; every rank has equally many."""
    num_tokens: int
    """The length of every micro-batch."""


def plan_packs(lengths: Sequence[int], packing: Packing) -> tuple[MiniBatchPlan, ...]:
    """Return the mini-batches of a step, in the order of its samples, of which `lengths` are the input tokens.

    The work is balanced over ranks. The micro-batches of a mini-batch are padded to one length.
    """
    assert lengths, "nothing to pack"
    longest, capacity = max(lengths), packing.tokens_per_micro_batch
    assert longest <= capacity, f"a sample has {longest} tokens, a micro-batch {capacity}"
    per_update = packing.samples_per_update or len(lengths)
    plans = []
    for first in range(0, len(lengths), per_update):
        members = range(first, min(first + per_update, len(lengths)))
        shares = _divide(members, lengths, packing)
        fullest = max(_load(bin_, lengths) for share in shares for bin_ in share)
        plans.append(
            MiniBatchPlan(
                members=tuple(members),
                shares=tuple(tuple(tuple(sorted(bin_)) for bin_ in share) for share in shares),
                num_tokens=_round_up(fullest, packing.pad_multiple),
            )
        )
    return tuple(plans)


def fill(
    samples: Sequence[TrainSample],
    plans: Sequence[MiniBatchPlan],
    data_rank: int,
    *,
    num_chosen: Sequence[int],
    temperature: float,
    has_versions: bool = False,
    without: Collection[str] = (),
) -> TrainBatch:
    """Return the share of one data-parallel rank; the tokens of other ranks' samples are not read.

    `num_chosen` are the loss tokens of every sample of the step. `has_versions` adds the policy that chose each token.
    Columns named in `without` are left out.
    """
    # All samples of a step have the same columns.
    given = tuple(name for name in _CREDIT if name not in without and getattr(samples[0], name) is not None)
    mini_batches = []
    for plan in plans:
        share = plan.shares[data_rank]
        rows = _rows(len(share), plan.num_tokens, given, has_versions=has_versions, without=without)
        chosen = [num_chosen[i] for i in plan.members]
        mini_batches.append(
            MiniBatch(
                micro_batches=tuple(
                    _micro_batch(samples, members, row) for members, row in zip(share, rows, strict=True)
                ),
                num_loss_tokens=sum(chosen),
                num_sequences=sum(count > 0 for count in chosen),
            )
        )
    return TrainBatch(mini_batches=tuple(mini_batches), temperature=temperature)


def pack(
    samples: Sequence[TrainSample],
    packing: Packing,
    *,
    temperature: float,
    has_versions: bool = False,
    without: Collection[str] = (),
) -> Iterator[TrainBatch]:
    """Yield one step's samples as one share per data-parallel rank; the arguments are those of `fill`."""
    plans = plan_packs([num_positions(sample) for sample in samples], packing)
    num_chosen = [int(np.count_nonzero(sample.rollout.loss_mask)) for sample in samples]
    for rank in range(packing.data_parallel):
        yield fill(
            samples,
            plans,
            rank,
            num_chosen=num_chosen,
            temperature=temperature,
            has_versions=has_versions,
            without=without,
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
    num_prompt, num_response = len(sample.prompt_ids), len(sample.rollout.token_ids)
    assert min(num_prompt, num_response) > 0, f"prompt of {num_prompt} tokens, response of {num_response}"
    return num_prompt + num_response - 1


def _divide(members: Sequence[int], lengths: Sequence[int], packing: Packing) -> list[_Bins]:
    """Return the micro-batches of every rank, the fullest first.

    Dividing the samples over ranks balances their work; dividing whole micro-batches needs the fewest of them. The
    division whose slowest rank is done first is chosen.
    """
    longest_first = sorted(members, key=lambda i: (-lengths[i], i))
    whole = _share_out(_fill_all(longest_first, lengths, packing), lengths, packing)
    if packing.data_parallel == 1:
        return whole
    balanced = _fill_ranks(longest_first, lengths, packing)
    return min((balanced, whole), key=lambda shares: _slowest(shares, lengths, packing))


def _slowest(shares: Sequence[_Bins], lengths: Sequence[int], packing: Packing) -> float:
    """Return the work of the rank with the most of it, padding included."""
    cost = packing.cost
    fullest = max(_load(bin_, lengths) for share in shares for bin_ in share)
    padded = cost.per_token * len(shares[0]) * _round_up(fullest, packing.pad_multiple)
    squares = (sum(lengths[i] * lengths[i] for bin_ in share for i in bin_) for share in shares)
    return padded + cost.per_squared_token * max(squares)


def _fill_ranks(longest_first: Sequence[int], lengths: Sequence[int], packing: Packing) -> list[_Bins]:
    """Give each sample to the rank with the least work, then fill the micro-batches of each rank."""
    costs = {i: packing.cost.of(lengths[i]) for i in longest_first}
    owned = _spread(longest_first, costs, packing.data_parallel)
    tight = [_best_fit(ids, lengths, packing.tokens_per_micro_batch) for ids in owned]
    num_bins = _round_up(max(map(len, tight)), packing.micro_batch_multiple)
    shares = [_even(ids, bins, lengths, num_bins, packing) for ids, bins in zip(owned, tight, strict=True)]
    return [sorted(share, key=lambda bin_: -_load(bin_, lengths)) for share in shares]


def _fill_all(longest_first: Sequence[int], lengths: Sequence[int], packing: Packing) -> _Bins:
    """Return as few micro-batches as the budget allows, filled evenly: the fullest one sets the length of all."""
    tight = _best_fit(longest_first, lengths, packing.tokens_per_micro_batch)
    num_bins = _round_up(len(tight), packing.data_parallel * packing.micro_batch_multiple)
    return _even(longest_first, tight, lengths, num_bins, packing)


def _even(longest_first: Sequence[int], tight: _Bins, lengths: Sequence[int], num_bins: int, packing: Packing) -> _Bins:
    """Return `num_bins` micro-batches of about equal length, or the tight ones if an even one is over the budget."""
    even = _spread(longest_first, lengths, num_bins)
    if max(_load(members, lengths) for members in even) <= packing.tokens_per_micro_batch:
        return even
    return tight + [[] for _ in range(num_bins - len(tight))]


def _best_fit(longest_first: Sequence[int], lengths: Sequence[int], capacity: int) -> _Bins:
    """Put each sample into the fullest micro-batch with room for it."""
    bins: _Bins = []
    rooms: list[tuple[int, int]] = []
    """(tokens left, index of the bin), fullest first."""
    for sample_id in longest_first:
        place = bisect_left(rooms, (lengths[sample_id], 0))
        if place == len(rooms):
            insort(rooms, (capacity, len(bins)))
            bins.append([])
            place = bisect_left(rooms, (lengths[sample_id], 0))
        room, index = rooms.pop(place)
        bins[index].append(sample_id)
        insort(rooms, (room - lengths[sample_id], index))
    return bins


def _spread(longest_first: Sequence[int], loads: Sequence[int] | Mapping[int, float], num_bins: int) -> _Bins:
    """Put each sample into the bin with the least load."""
    bins: _Bins = [[] for _ in range(num_bins)]
    least: list[tuple[float, int]] = [(0, index) for index in range(num_bins)]
    for sample_id in longest_first:
        load, index = least[0]
        bins[index].append(sample_id)
        heapq.heapreplace(least, (load + loads[sample_id], index))
    return bins


def _share_out(bins: _Bins, lengths: Sequence[int], packing: Packing) -> list[_Bins]:
    """Give every rank equally many micro-batches, the most work first, each to the rank with the least work."""
    per_rank = len(bins) // packing.data_parallel
    shares: list[_Bins] = [[] for _ in range(packing.data_parallel)]
    costs = [sum(packing.cost.of(lengths[i]) for i in members) for members in bins]
    least: list[tuple[float, int]] = [(0, rank) for rank in range(packing.data_parallel)]
    for index in sorted(range(len(bins)), key=lambda i: (-costs[i], i)):
        load, rank = heapq.heappop(least)
        shares[rank].append(bins[index])
        if len(shares[rank]) < per_rank:
            heapq.heappush(least, (load + costs[index], rank))
    return shares


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """The columns of one micro-batch, [N] each, to be filled."""

    token_ids: TokenArray
    loss_mask: BoolArray
    rollout_logprobs: FloatArray
    versions: npt.NDArray[np.int32] | None
    credit: Mapping[str, FloatArray]


def _rows(
    num_rows: int, num_tokens: int, given: tuple[str, ...], *, has_versions: bool, without: Collection[str]
) -> Iterator[_Row]:
    """Yield zeros for each micro-batch. The columns of all are allocated at once: large arrays get large pages."""
    shape = (num_rows, num_tokens)
    token_ids = np.zeros(shape, np.int32)
    loss_mask = np.zeros((num_rows, 0) if "loss_mask" in without else shape, np.bool_)
    rollout_logprobs = np.zeros((num_rows, 0) if "rollout_logprobs" in without else shape, np.float32)
    versions = np.zeros(shape, np.int32) if has_versions else None
    credit = {name: np.zeros(shape, np.float32) for name in given}
    for row in range(num_rows):
        yield _Row(
            token_ids=token_ids[row],
            loss_mask=loss_mask[row],
            rollout_logprobs=rollout_logprobs[row],
            versions=None if versions is None else versions[row],
            credit={name: column[row] for name, column in credit.items()},
        )


def _micro_batch(samples: Sequence[TrainSample], members: Sequence[int], row: _Row) -> MicroBatch:
    num_tokens = len(row.token_ids)
    starts, last_ids, response_starts, sample_ids = [0], [], [], []
    for sample_id in members:
        sample = samples[sample_id]
        prompt_ids, rollout = sample.prompt_ids, sample.rollout
        start, end = starts[-1], starts[-1] + num_positions(sample)
        first = end - len(rollout.token_ids)
        row.token_ids[start : first + 1] = prompt_ids
        row.token_ids[first + 1 : end] = rollout.token_ids[:-1]
        if row.loss_mask.size:
            row.loss_mask[first:end] = rollout.loss_mask
        if row.rollout_logprobs.size:
            row.rollout_logprobs[first:end] = rollout.logprobs
        if row.versions is not None:
            row.versions[first:end] = rollout.versions
        for name, column in row.credit.items():
            column[first:end] = getattr(sample, name)
        starts.append(end)
        last_ids.append(int(rollout.token_ids[-1]))
        response_starts.append(first)
        sample_ids.append(sample_id)
    if starts[-1] < num_tokens:
        starts.append(num_tokens)
        last_ids.append(0)
        response_starts.append(num_tokens)
        sample_ids.append(_PADDING)
    return MicroBatch(
        token_ids=row.token_ids,
        sequence_starts=_int32(starts),
        last_ids=_int32(last_ids),
        loss_mask=row.loss_mask,
        rollout_logprobs=row.rollout_logprobs,
        advantages=row.credit.get("advantages", np.zeros(0, np.float32)),
        old_logprobs=row.credit.get("old_logprobs"),
        reference_logprobs=row.credit.get("reference_logprobs"),
        values=row.credit.get("values"),
        returns=row.credit.get("returns"),
        sample_ids=_int32(sample_ids),
        response_starts=_int32(response_starts),
        versions=row.versions,
    )


def _load(members: Sequence[int], lengths: Sequence[int]) -> int:
    return sum(lengths[i] for i in members)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _int32(values: Sequence[int]) -> npt.NDArray[np.int32]:
    return np.asarray(values, np.int32)
