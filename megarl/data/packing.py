"""Samples to micro-batches and back: which sequences share a pack, on which data-parallel rank, at which offset.

Pure and deterministic: the same samples always give the same batch. Knows nothing of models or devices.
The loss does not depend on anything decided here; only speed and memory do.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megarl.types import FloatArray, MicroBatch, MiniBatch, TrainBatch, TrainSample

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
) -> TrainBatch:
    """One step's samples as mini-batches of `samples_per_update` (all at once when None), in their order.

    Every rank gets equally many micro-batches, a multiple of `micro_batch_multiple`; those of one mini-batch are
    padded to one length, a multiple of `pad_multiple`.
    """
    assert samples, "nothing to pack"
    lengths = [_num_positions(sample) for sample in samples]
    longest = max(lengths)
    assert longest <= tokens_per_micro_batch, f"a sample has {longest} tokens, a micro-batch {tokens_per_micro_batch}"
    per_update = samples_per_update or len(samples)
    given = _given(samples[0])
    mini_batches = []
    for first in range(0, len(samples), per_update):
        sample_ids = list(range(first, min(first + per_update, len(samples))))
        bins = _fill(sample_ids, lengths, tokens_per_micro_batch, data_parallel, micro_batch_multiple)
        num_tokens = _round_up(max(_load(members, lengths) for members in bins), pad_multiple)
        mini_batches.append(
            MiniBatch(
                shares=tuple(
                    tuple(_micro_batch(samples, members, num_tokens, given) for members in share)
                    for share in _share_out(bins, lengths, data_parallel)
                ),
                num_loss_tokens=sum(int(samples[i].rollout.loss_mask.sum()) for i in sample_ids),
                num_sequences=sum(bool(samples[i].rollout.loss_mask.any()) for i in sample_ids),
            )
        )
    return TrainBatch(mini_batches=tuple(mini_batches), temperature=temperature)


def unpack(batch: TrainBatch, columns: Sequence[FloatArray]) -> tuple[FloatArray, ...]:
    """Per sample, of its response tokens. `columns` has one array per mini-batch: [ranks, micro-batches, N]."""
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
    """The last token predicts nothing, so it is not an input."""
    num_prompt, num_response = len(sample.prompt_ids), len(sample.rollout.token_ids)
    assert min(num_prompt, num_response) > 0, f"prompt of {num_prompt} tokens, response of {num_response}"
    return num_prompt + num_response - 1


def _fill(
    sample_ids: list[int], lengths: Sequence[int], capacity: int, data_parallel: int, micro_batch_multiple: int
) -> list[list[int]]:
    """As few micro-batches as the budget allows, then as even as they get: the fullest one sets everyone's length."""
    longest_first = sorted(sample_ids, key=lambda i: (-lengths[i], i))
    tight = _best_fit(longest_first, lengths, capacity)
    num_bins = _round_up(len(tight), data_parallel * micro_batch_multiple)
    even = _spread(longest_first, lengths, num_bins)
    if max(_load(members, lengths) for members in even) <= capacity:
        return even
    return tight + [[] for _ in range(num_bins - len(tight))]


def _best_fit(longest_first: Sequence[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Each sample into the fullest micro-batch that still has room for it."""
    bins: list[list[int]] = []
    rooms: list[int] = []
    for sample_id in longest_first:
        fitting = [(room, index) for index, room in enumerate(rooms) if room >= lengths[sample_id]]
        if fitting:
            _, index = min(fitting)
        else:
            index = len(bins)
            bins.append([])
            rooms.append(capacity)
        bins[index].append(sample_id)
        rooms[index] -= lengths[sample_id]
    return bins


def _spread(longest_first: Sequence[int], lengths: Sequence[int], num_bins: int) -> list[list[int]]:
    """Each sample into the emptiest micro-batch."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads = [(0, index) for index in range(num_bins)]
    for sample_id in longest_first:
        load, index = heapq.heappop(loads)
        bins[index].append(sample_id)
        heapq.heappush(loads, (load + lengths[sample_id], index))
    return bins


def _share_out(bins: list[list[int]], lengths: Sequence[int], data_parallel: int) -> list[list[list[int]]]:
    """Equally many micro-batches to every rank, the fullest first to the rank with the fewest tokens."""
    per_rank = len(bins) // data_parallel
    shares: list[list[list[int]]] = [[] for _ in range(data_parallel)]
    loads = [0] * data_parallel
    for index in sorted(range(len(bins)), key=lambda i: (-_load(bins[i], lengths), i)):
        rank = min((r for r in range(data_parallel) if len(shares[r]) < per_rank), key=lambda r: (loads[r], r))
        shares[rank].append(bins[index])
        loads[rank] += _load(bins[index], lengths)
    return shares


def _given(sample: TrainSample) -> tuple[str, ...]:
    """The columns that this sample, and so every sample of its step, has besides those of its rollout."""
    return tuple(name for name in _CREDIT if getattr(sample, name) is not None)


def _micro_batch(
    samples: Sequence[TrainSample], members: Sequence[int], num_tokens: int, given: tuple[str, ...]
) -> MicroBatch:
    token_ids = np.zeros(num_tokens, np.int32)
    positions = np.zeros(num_tokens, np.int32)
    targets = np.zeros(num_tokens, np.int32)
    loss_mask = np.zeros(num_tokens, np.bool_)
    rollout_logprobs = np.zeros(num_tokens, np.float32)
    columns = {name: np.zeros(num_tokens, np.float32) for name in given}
    starts, response_starts, sample_ids = [0], [], []
    for sample_id in sorted(members):
        sample = samples[sample_id]
        rollout = sample.rollout
        sequence = np.concatenate([sample.prompt_ids, rollout.token_ids])
        start, end = starts[-1], starts[-1] + len(sequence) - 1
        response = slice(end - len(rollout.token_ids), end)
        token_ids[start:end] = sequence[:-1]
        targets[start:end] = sequence[1:]
        positions[start:end] = np.arange(end - start)
        loss_mask[response] = rollout.loss_mask
        rollout_logprobs[response] = rollout.logprobs
        for name, column in columns.items():
            column[response] = getattr(sample, name)
        starts.append(end)
        response_starts.append(response.start)
        sample_ids.append(sample_id)
    if starts[-1] < num_tokens:
        positions[starts[-1] :] = np.arange(num_tokens - starts[-1])
        starts.append(num_tokens)
        response_starts.append(num_tokens)
        sample_ids.append(_PADDING)
    return MicroBatch(
        token_ids=token_ids,
        positions=positions,
        sequence_starts=_int32(starts),
        targets=targets,
        loss_mask=loss_mask,
        rollout_logprobs=rollout_logprobs,
        advantages=columns["advantages"],
        old_logprobs=columns.get("old_logprobs"),
        reference_logprobs=columns.get("reference_logprobs"),
        values=columns.get("values"),
        returns=columns.get("returns"),
        sample_ids=_int32(sample_ids),
        response_starts=_int32(response_starts),
    )


def _load(members: Sequence[int], lengths: Sequence[int]) -> int:
    return sum(lengths[i] for i in members)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _int32(values: Sequence[int]) -> npt.NDArray[np.int32]:
    return np.asarray(values, np.int32)
