"""Plans the micro-batches of a step from lengths alone: which samples share one, on which data-parallel rank.

Pure and deterministic. Knows no tokens, models or devices. The packing changes speed and memory, not the loss.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from megarl.config.section import round_up
from megarl.data.prefixes import Prefix, Tree
from megarl.errors import DataError

_Bins: TypeAlias = list[list[int]]
"""The samples of each micro-batch."""
_Number = TypeVar("_Number", int, float)
_GAIN = 1.1
"""Times the speed that a tree must bring for which all micro-batches take more memory."""
_PARTS = (1, 2, 4, 8)
"""Parts of a micro-batch that rows with a common beginning may fill: smaller ones are balanced better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceCost:
    """The operations of a forward pass over one sequence: linear in its length, and for attention also quadratic.

    A packing depends on their ratio alone.
    """

    per_token: float = 1.0
    per_squared_token: float = 0.0

    def of(self, lengths: Sequence[int]) -> list[float]:
        sizes = np.asarray(lengths, np.float64)
        costs: list[float] = (self.per_token * sizes + self.per_squared_token * sizes * sizes).tolist()
        return costs


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """The division of a step's samples into mini-batches, ranks and micro-batches."""

    data_parallel: int
    tokens_per_micro_batch: int
    samples_per_update: int | None
    """None makes one mini-batch of all samples."""
    pad_multiple: int
    micro_batch_multiple: int
    sequence_multiple: int = 1
    """The length of each sequence is rounded up to a multiple of this."""
    cost: SequenceCost = SequenceCost()
    keeps_episodes: bool = False
    """The loss compares all tokens of an episode: its rows share a micro-batch."""
    tokens_per_tree: int = 0
    """Tokens of a micro-batch, if more than of others, where that keeps rows with a common beginning together."""
    bubble: float = 0.0
    """Micro-batches whose time passes in each update while a pipeline fills and empties."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatchPlan:
    """The micro-batches of one optimizer update, as indices into the step's rows."""

    members: tuple[int, ...]
    shares: tuple[tuple[tuple[int, ...], ...], ...]
    """Per data-parallel rank the rows of each of its micro-batches; every rank has equally many."""
    prefixes: tuple[tuple[tuple[Prefix, ...], ...], ...]
    """The common beginning of each row of `shares` with an earlier one of its micro-batch; () where none has any."""
    num_tokens: int
    """The tokens that every micro-batch computes."""


def plan_packs(
    lengths: Sequence[int],
    packing: Packing,
    *,
    ends: Sequence[int] | None = None,
    prefixes: Sequence[Prefix] | None = None,
) -> tuple[MiniBatchPlan, ...]:
    """Return the mini-batches of a step, in the order of its samples, of which `lengths` are the input tokens.

    The work is balanced over ranks. The micro-batches of a mini-batch are padded to one length. Where samples have
    several rows, `lengths` and the indices are those of rows, and `ends` has the end of each sample's among them.
    Tokens of `prefixes` are computed once in a micro-batch, as far as that takes less time than rows apart.
    """
    assert lengths, "nothing to pack"
    if packing.sequence_multiple > 1:
        lengths = [round_up(length, packing.sequence_multiple) for length in lengths]
    ends = range(1, len(lengths) + 1) if ends is None else ends
    bounds = [0, *ends]
    per_update = packing.samples_per_update or len(ends)
    rows = _Rows(lengths=lengths, prefixes=prefixes if prefixes and any(each.row >= 0 for each in prefixes) else None)
    plans = []
    for first in range(0, len(ends), per_update):
        samples = bounds[first : first + per_update + 1]
        plans.append(_plan(rows, samples, packing))
    return tuple(plans)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    lengths: Sequence[int]
    prefixes: Sequence[Prefix] | None
    """None where no row shares anything."""

    def shared(self, members: Sequence[int]) -> tuple[Prefix, ...]:
        """Return what each of some ascending rows shares with an earlier one of them; () where none does."""
        if self.prefixes is None or len(members) < 2:
            return ()
        found = tuple(map(Tree(self.prefixes).add, members))
        return found if any(prefix.num_tokens for prefix in found) else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Units:
    """Rows that stay together: single ones, episodes, or some with a common beginning."""

    members: list[list[int]]
    lengths: list[int]
    """Tokens that are computed."""
    squares: list[int]
    """Pairs of tokens, in twice their number: the square of a row's length, less that of its prefix."""

    def costs(self, cost: SequenceCost) -> list[float]:
        pairs = zip(self.lengths, self.squares, strict=True)
        return [cost.per_token * length + cost.per_squared_token * square for length, square in pairs]

    @classmethod
    def of(cls, groups: Iterable[Sequence[int]], rows: _Rows) -> _Units:
        units = cls(members=[], lengths=[], squares=[])
        for group in groups:
            total = [rows.lengths[row] for row in group]
            shared = [prefix.num_tokens for prefix in rows.shared(group)]
            units.members.append(list(group))
            units.lengths.append(sum(total) - sum(shared))
            units.squares.append(sum(each * each for each in total) - sum(each * each for each in shared))
        return units


def _plan(rows: _Rows, bounds: Sequence[int], packing: Packing) -> MiniBatchPlan:
    """Plan one mini-batch; `bounds` are where its samples begin, and the end."""
    members = range(bounds[0], bounds[-1])
    capacity = packing.tokens_per_micro_batch
    most = max(capacity, packing.tokens_per_tree)
    samples: list[Sequence[int]] = [range(*pair) for pair in pairwise(bounds)]
    wholes = samples if packing.keeps_episodes else [[row] for row in members]
    candidates = [_Units.of(wholes, rows)]
    if (longest := max(candidates[0].lengths)) > most:
        assert packing.keeps_episodes, f"a sample has {longest} tokens, a micro-batch {most}"
        raise DataError(
            f"the rows of an episode have {longest} tokens, and algorithm.loss needs them in one micro-batch: raise "
            f"train.tokens_per_micro_batch from {capacity}, or use a loss per token"
        )
    if rows.shared(members):
        candidates += [_Units.of(_bundles(wholes, rows, capacity // part), rows) for part in _PARTS]
        if most > capacity:
            trees = [tree for sample in samples for tree in _uncut(sample, rows, most)]
            candidates += [_Units.of(_bundles(trees, rows, size), rows) for size in (capacity, most)]
    # All are as long as the longest: one with a long tree gives as much room to the others.
    divided = [
        (units, _divide(units, replace(packing, tokens_per_micro_batch=max(capacity, *units.lengths))))
        for units in candidates
    ]

    def seconds(units: _Units, bins: list[_Bins]) -> float:
        is_larger = max(_sum(bin_, units.lengths) for share in bins for bin_ in share) > capacity
        return _slowest(bins, units, packing) * (_GAIN if is_larger else 1)

    units, bins = min(divided, key=lambda pair: seconds(*pair))
    shares = [[tuple(sorted(chain.from_iterable(map(units.members.__getitem__, bin_)))) for bin_ in s] for s in bins]
    prefixes = [[rows.shared(micro_batch) for micro_batch in share] for share in shares]
    fullest = max(
        sum(map(rows.lengths.__getitem__, micro_batch)) - sum(prefix.num_tokens for prefix in shared)
        for share, of_share in zip(shares, prefixes, strict=True)
        for micro_batch, shared in zip(share, of_share, strict=True)
    )
    return MiniBatchPlan(
        members=tuple(members),
        shares=tuple(map(tuple, shares)),
        prefixes=tuple(map(tuple, prefixes)),
        num_tokens=round_up(fullest, packing.pad_multiple),
    )


def _uncut(sample: Sequence[int], rows: _Rows, most: int) -> list[Sequence[int]]:
    """Return a sample as one unit if a micro-batch can hold it, else its rows."""
    num_tokens = sum(map(rows.lengths.__getitem__, sample)) - sum(each.num_tokens for each in rows.shared(sample))
    return [sample] if num_tokens <= most else [[row] for row in sample]


def _bundles(wholes: Sequence[Sequence[int]], rows: _Rows, capacity: int) -> Iterator[list[int]]:
    """Yield runs of consecutive units that share something, none longer than `capacity` unless it is a single one."""
    assert rows.prefixes is not None, "nothing is shared"
    bundle, num_tokens, tree = list[int](), 0, Tree(rows.prefixes)

    def added(whole: Sequence[int]) -> tuple[int, bool]:
        """Return the tokens that it adds to the bundle, and whether it shares some of those there."""
        shared = [tree.add(row) for row in whole]
        is_tied = any(prefix.num_tokens and prefix.row < len(bundle) for prefix in shared)
        return sum(map(rows.lengths.__getitem__, whole)) - sum(prefix.num_tokens for prefix in shared), is_tied

    for whole in wholes:
        more, is_tied = added(whole)
        if bundle and not (is_tied and num_tokens + more <= capacity):
            yield bundle
            bundle, num_tokens, tree = [], 0, Tree(rows.prefixes)
            more, _ = added(whole)
        bundle.extend(whole)
        num_tokens += more
    if bundle:
        yield bundle


def runs(firsts: npt.NDArray[np.integer], lengths: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """Return consecutive numbers from each of `firsts`, as many as its length says."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(firsts - before, lengths) + np.arange(lengths.sum())


def _divide(units: _Units, packing: Packing) -> list[_Bins]:
    """Return the micro-batches of every rank, the fullest first.

    Dividing the units over ranks balances their work; dividing whole micro-batches needs the fewest of them. The
    division whose slowest rank is done first is chosen.
    """
    lengths, costs = units.lengths, units.costs(packing.cost)
    longest_first = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    whole = _share_out(_fill_all(longest_first, lengths, packing), costs, packing)
    if packing.data_parallel == 1:
        return whole
    balanced = _fill_ranks(longest_first, lengths, costs, packing)
    return min((balanced, whole), key=lambda shares: _slowest(shares, units, packing))


def _slowest(shares: Sequence[_Bins], units: _Units, packing: Packing) -> float:
    """Return the work of the rank with the most of it, padding included."""
    cost = packing.cost
    fullest = max(_sum(bin_, units.lengths) for share in shares for bin_ in share)
    padded = cost.per_token * (len(shares[0]) + packing.bubble) * round_up(fullest, packing.pad_multiple)
    if not cost.per_squared_token:
        return padded
    squares = (sum(units.squares[i] for bin_ in share for i in bin_) for share in shares)
    return padded + cost.per_squared_token * max(squares)


def _fill_ranks(
    longest_first: Sequence[int], lengths: Sequence[int], costs: Sequence[float], packing: Packing
) -> list[_Bins]:
    """Give each sample to the rank with the least work, then fill the micro-batches of each rank."""
    owned = _spread(longest_first, costs, packing.data_parallel)
    tight = [_best_fit(ids, lengths, packing.tokens_per_micro_batch) for ids in owned]
    num_bins = round_up(max(map(len, tight)), packing.micro_batch_multiple)
    shares = [_even(ids, bins, lengths, num_bins, packing) for ids, bins in zip(owned, tight, strict=True)]
    return [sorted(share, key=lambda bin_: -_sum(bin_, lengths)) for share in shares]


def _fill_all(longest_first: Sequence[int], lengths: Sequence[int], packing: Packing) -> _Bins:
    """Return as few micro-batches as the budget allows, filled evenly: the fullest one sets the length of all."""
    tight = _best_fit(longest_first, lengths, packing.tokens_per_micro_batch)
    num_bins = round_up(len(tight), packing.data_parallel * packing.micro_batch_multiple)
    return _even(longest_first, tight, lengths, num_bins, packing)


def _even(longest_first: Sequence[int], tight: _Bins, lengths: Sequence[int], num_bins: int, packing: Packing) -> _Bins:
    """Return `num_bins` micro-batches of about equal length, or the tight ones if an even one is over the budget."""
    even = _spread(longest_first, lengths, num_bins)
    if max(_sum(members, lengths) for members in even) <= packing.tokens_per_micro_batch:
        return even
    return tight + [[] for _ in range(num_bins - len(tight))]


def _best_fit(longest_first: Sequence[int], lengths: Sequence[int], capacity: int) -> _Bins:
    """Put each sample into the fullest micro-batch with room for it."""
    bins: _Bins = []
    rooms: list[tuple[int, int]] = []
    """(tokens left, index of the bin), fullest first, of those that have room for the shortest sample."""
    shortest = min(map(lengths.__getitem__, longest_first), default=0)
    for sample_id in longest_first:
        length = lengths[sample_id]
        place = bisect_left(rooms, (length, 0))
        if place == len(rooms):
            rooms.append((capacity, len(bins)))
            bins.append([])
        room, index = rooms.pop(place)
        bins[index].append(sample_id)
        if room - length >= shortest:
            insort(rooms, (room - length, index))
    return bins


def _spread(longest_first: Sequence[int], loads: Sequence[float], num_bins: int) -> _Bins:
    """Put each sample into the bin with the least load."""
    bins: _Bins = [[] for _ in range(num_bins)]
    least: list[tuple[float, int]] = [(0, index) for index in range(num_bins)]
    for sample_id in longest_first:
        load, index = least[0]
        bins[index].append(sample_id)
        heapq.heapreplace(least, (load + loads[sample_id], index))
    return bins


def _share_out(bins: _Bins, costs: Sequence[float], packing: Packing) -> list[_Bins]:
    """Give every rank equally many micro-batches, the most work first, each to the rank with the least work."""
    per_rank = len(bins) // packing.data_parallel
    shares: list[_Bins] = [[] for _ in range(packing.data_parallel)]
    work = [_sum(members, costs) for members in bins]
    least: list[tuple[float, int]] = [(0, rank) for rank in range(packing.data_parallel)]
    for index in sorted(range(len(bins)), key=lambda i: (-work[i], i)):
        load, rank = heapq.heappop(least)
        shares[rank].append(bins[index])
        if len(shares[rank]) < per_rank:
            heapq.heappush(least, (load + work[index], rank))
    return shares


def _sum(members: Sequence[int], numbers: Sequence[_Number]) -> _Number:
    return sum(map(numbers.__getitem__, members))
