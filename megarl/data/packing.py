"""Packs samples into micro-batches: which sequences share one, on which data-parallel rank, at which offset.

Pure and deterministic: equal samples give equal batches. Knows no models or devices. The packing changes speed and
memory, not the loss.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megarl.types import BoolArray, FloatArray, MicroBatch, MiniBatch, TokenArray, TrainBatch, TrainSample

_PADDING = -1
_CREDIT = ("advantages", "old_logprobs", "reference_logprobs", "values", "returns")


def pack(
    samples: Sequence[TrainSample],
    *,
    data_parallel: int,
    tokens_per_micro_batch: int,
    samples_per_update: int | None,
    pad_multiple: int,
    micro_batch_multiple: int,
    temperature: float,
    has_versions: bool = False,
) -> TrainBatch:
    """Return one step's samples as mini-batches of `samples_per_update` (one with all if None), in their order.

    Every rank gets equally many micro-batches, a multiple of `micro_batch_multiple`. The micro-batches of a mini-batch
    are padded to one length, a multiple of `pad_multiple`. `has_versions` adds the policy that chose each token.
    """
    assert samples, "nothing to pack"
    lengths = [_num_positions(sample) for sample in samples]
    longest = max(lengths)
    assert longest <= tokens_per_micro_batch, f"a sample has {longest} tokens, a micro-batch {tokens_per_micro_batch}"
    per_update = samples_per_update or len(samples)
    given = _credit_columns(samples[0])
    mini_batches = []
    for first in range(0, len(samples), per_update):
        sample_ids = list(range(first, min(first + per_update, len(samples))))
        bins = _fill(sample_ids, lengths, tokens_per_micro_batch, data_parallel, micro_batch_multiple)
        num_tokens = _round_up(max(_load(members, lengths) for members in bins), pad_multiple)
        rows = _rows(len(bins), num_tokens, given, has_versions=has_versions)
        num_chosen = [int(np.count_nonzero(samples[i].rollout.loss_mask)) for i in sample_ids]
        mini_batches.append(
            MiniBatch(
                shares=tuple(
                    tuple(_micro_batch(samples, members, next(rows)) for members in share)
                    for share in _share_out(bins, lengths, data_parallel)
                ),
                num_loss_tokens=sum(num_chosen),
                num_sequences=sum(count > 0 for count in num_chosen),
            )
        )
    return TrainBatch(mini_batches=tuple(mini_batches), temperature=temperature)


def unpack(batch: TrainBatch, columns: Sequence[FloatArray]) -> tuple[FloatArray, ...]:
    """Return one array per sample, over its response tokens. `columns`: [ranks, micro-batches, N] per mini-batch."""
    assert len(columns) == len(batch.mini_batches), f"{len(columns)} arrays, {len(batch.mini_batches)} mini-batches"
    by_sample: dict[int, FloatArray] = {}
    for mini_batch, of_ranks in zip(batch.mini_batches, columns, strict=True):
        for share, of_share in zip(mini_batch.shares, of_ranks, strict=True):
            for micro_batch, of_tokens in zip(share, of_share, strict=True):
                ends = micro_batch.sequence_starts[1:]
                for sample_id, start, end in zip(
                    micro_batch.sample_ids, micro_batch.response_starts, ends, strict=True
                ):
                    if sample_id != _PADDING:
                        by_sample[int(sample_id)] = np.asarray(of_tokens[start:end], np.float32)
    return tuple(by_sample[sample_id] for sample_id in range(len(by_sample)))


def _num_positions(sample: TrainSample) -> int:
    """Return the number of input tokens: the last token predicts nothing and is no input."""
    num_prompt, num_response = len(sample.prompt_ids), len(sample.rollout.token_ids)
    assert min(num_prompt, num_response) > 0, f"prompt of {num_prompt} tokens, response of {num_response}"
    return num_prompt + num_response - 1


def _fill(
    sample_ids: list[int], lengths: Sequence[int], capacity: int, data_parallel: int, micro_batch_multiple: int
) -> list[list[int]]:
    """Return as few micro-batches as the budget allows, filled evenly: the fullest one sets the length of all."""
    longest_first = sorted(sample_ids, key=lambda i: (-lengths[i], i))
    tight = _best_fit(longest_first, lengths, capacity)
    num_bins = _round_up(len(tight), data_parallel * micro_batch_multiple)
    even = _spread(longest_first, lengths, num_bins)
    if max(_load(members, lengths) for members in even) <= capacity:
        return even
    return tight + [[] for _ in range(num_bins - len(tight))]


def _best_fit(longest_first: Sequence[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Put each sample into the fullest micro-batch with room for it."""
    bins: list[list[int]] = []
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


def _spread(longest_first: Sequence[int], lengths: Sequence[int], num_bins: int) -> list[list[int]]:
    """Put each sample into the emptiest micro-batch."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads = [(0, index) for index in range(num_bins)]
    for sample_id in longest_first:
        load, index = heapq.heappop(loads)
        bins[index].append(sample_id)
        heapq.heappush(loads, (load + lengths[sample_id], index))
    return bins


def _share_out(bins: list[list[int]], lengths: Sequence[int], data_parallel: int) -> list[list[list[int]]]:
    """Give every rank equally many micro-batches, the fullest first, each to the rank with the fewest tokens."""
    per_rank = len(bins) // data_parallel
    shares: list[list[list[int]]] = [[] for _ in range(data_parallel)]
    loads = [0] * data_parallel
    for index in sorted(range(len(bins)), key=lambda i: (-_load(bins[i], lengths), i)):
        rank = min((r for r in range(data_parallel) if len(shares[r]) < per_rank), key=lambda r: (loads[r], r))
        shares[rank].append(bins[index])
        loads[rank] += _load(bins[index], lengths)
    return shares


def _credit_columns(sample: TrainSample) -> tuple[str, ...]:
    """Return the credit columns that this sample has; all samples of a step have the same."""
    return tuple(name for name in _CREDIT if getattr(sample, name) is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """The columns of one micro-batch, [N] each, to be filled."""

    token_ids: TokenArray
    loss_mask: BoolArray
    rollout_logprobs: FloatArray
    versions: npt.NDArray[np.int32] | None
    credit: Mapping[str, FloatArray]


def _rows(num_rows: int, num_tokens: int, given: tuple[str, ...], *, has_versions: bool) -> Iterator[_Row]:
    """Yield zeros for each micro-batch. The columns of all are allocated at once: large arrays get large pages."""
    shape = (num_rows, num_tokens)
    token_ids = np.zeros(shape, np.int32)
    loss_mask, rollout_logprobs = np.zeros(shape, np.bool_), np.zeros(shape, np.float32)
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
    for sample_id in sorted(members):
        sample = samples[sample_id]
        prompt_ids, rollout = sample.prompt_ids, sample.rollout
        start, end = starts[-1], starts[-1] + _num_positions(sample)
        first = end - len(rollout.token_ids)
        row.token_ids[start : first + 1] = prompt_ids
        row.token_ids[first + 1 : end] = rollout.token_ids[:-1]
        row.loss_mask[first:end] = rollout.loss_mask
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
        advantages=row.credit["advantages"],
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
