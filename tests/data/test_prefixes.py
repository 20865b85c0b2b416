"""Rows with common beginnings: what each shares, how they are packed, and that every one can be rebuilt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.data.packing import Packing, SequenceCost, plan_packs
from megarl.data.prefixes import NOTHING, Prefix, Tree
from megarl.data.row_prefixes import row_prefixes
from megarl.tokens import Content
from megarl.types import Episode, MicroBatch, TrainSample
from tests.data.test_packing import columns_of, make_sample
from tests.filled_shares import pack
from tests.values import make_rollout

PACKING = Packing(
    data_parallel=1, tokens_per_micro_batch=60, samples_per_update=None, pad_multiple=4, micro_batch_multiple=1
)
# Two different tokens: many rows begin alike.
rows = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=12)


def num_equal(left: Sequence[int], right: Sequence[int]) -> int:
    same = [a == b for a, b in zip(left, right, strict=False)]
    return same.index(False) if False in same else len(same)


def longest(row: Sequence[int], earlier: Sequence[Sequence[int]]) -> int:
    return max((num_equal(row, each) for each in earlier), default=0)


def tree_of(tokens: Sequence[Sequence[int]]) -> list[Prefix]:
    found = []
    for index, row in enumerate(tokens):
        common = [num_equal(row, each) for each in tokens[:index]]
        best = max(common, default=0)
        found.append(Prefix(common.index(best), best) if best else NOTHING)
    return found


@given(rows, st.data())
def test_the_tree_knows_what_any_rows_have_in_common(tokens: list[list[int]], data: st.DataObject) -> None:
    members = [index for index in range(len(tokens)) if data.draw(st.booleans())]
    tree = Tree(tree_of(tokens))
    for place, member in enumerate(members):
        prefix = tree.add(member)
        assert prefix.num_tokens == longest(tokens[member], [tokens[each] for each in members[:place]])
        if prefix.num_tokens:
            assert num_equal(tokens[member], tokens[members[prefix.row]]) >= prefix.num_tokens


@given(rows, st.integers(1, 3), st.integers(20, 60))
def test_packing_computes_each_beginning_once_in_a_micro_batch(
    tokens: list[list[int]], data_parallel: int, budget: int
) -> None:
    packing = replace(PACKING, data_parallel=data_parallel, tokens_per_micro_batch=budget)
    (plan,) = plan_packs(list(map(len, tokens)), packing, prefixes=tree_of(tokens))
    assert sorted(row for share in plan.shares for micro_batch in share for row in micro_batch) == [*range(len(tokens))]
    for share, prefixes in zip(plan.shares, plan.prefixes, strict=True):
        for members, of_members in zip(share, prefixes, strict=True):
            beginnings = {tuple(tokens[row][:end]) for row in members for end in range(1, len(tokens[row]) + 1)}
            saved = sum(prefix.num_tokens for prefix in of_members)
            assert sum(len(tokens[row]) for row in members) - saved == len(beginnings)
            assert len(beginnings) <= plan.num_tokens <= budget + packing.pad_multiple


@given(st.lists(st.integers(1, 20), min_size=1, max_size=12), st.integers(1, 3))
def test_rows_without_anything_in_common_are_packed_as_ever(lengths: list[int], data_parallel: int) -> None:
    packing = replace(PACKING, data_parallel=data_parallel, cost=SequenceCost(per_token=1.0, per_squared_token=0.1))
    assert plan_packs(lengths, packing, prefixes=[NOTHING] * len(lengths)) == plan_packs(lengths, packing)


def test_a_group_is_divided_where_one_rank_would_have_all_of_it() -> None:
    prefixes = [NOTHING, *[Prefix(0, 4)] * 7]
    packing = replace(PACKING, data_parallel=2, tokens_per_micro_batch=200)
    (plan,) = plan_packs([24] * 8, packing, prefixes=prefixes)
    assert [sum(map(len, share)) for share in plan.shares] == [4, 4]
    assert plan.num_tokens == 84


LONG = [24, 34, 44, 54, 64]
"""Rows of an episode: of each 4 tokens are left out of the history of the next, to which 14 are added."""
HISTORY = [NOTHING, Prefix(0, 20), Prefix(1, 30), Prefix(2, 40), Prefix(3, 50)]


@pytest.mark.parametrize(
    ("tokens_per_tree", "num_computed"), [(0, 52 + 54 + 64), (70, 66 + 64), (79, 66 + 64), (80, 80)]
)
def test_a_tree_that_memory_holds_is_not_cut(tokens_per_tree: int, num_computed: int) -> None:
    """A trunk is repeated in each part of a tree."""
    packing = replace(PACKING, tokens_per_micro_batch=64, pad_multiple=1, tokens_per_tree=tokens_per_tree)
    (plan,) = plan_packs(LONG, packing, ends=[5], prefixes=HISTORY)
    shared = sum(prefix.num_tokens for micro_batch in plan.prefixes[0] for prefix in micro_batch)
    assert sum(LONG) - shared == num_computed
    assert plan.num_tokens <= max(64, tokens_per_tree)


def test_more_memory_is_taken_for_a_gain_alone_and_not_where_a_pipeline_would_wait() -> None:
    packing = replace(PACKING, tokens_per_micro_batch=64, pad_multiple=1, tokens_per_tree=1000)
    (plan,) = plan_packs([30] * 10, packing, prefixes=[NOTHING, *[Prefix(0, 2)] * 9])
    assert plan.num_tokens <= 64
    trees = [moved(each, 5 * index) for index in range(4) for each in HISTORY]
    counts = [
        len(plan_packs(LONG * 4, replace(packing, bubble=bubble), ends=[5, 10, 15, 20], prefixes=trees)[0].shares[0])
        for bubble in (0.0, 20.0)
    ]
    assert counts[0] == 4 < counts[1]


def moved(prefix: Prefix, by: int) -> Prefix:
    return prefix if prefix.row < 0 else Prefix(prefix.row + by, prefix.num_tokens)


def make_group(sizes: Sequence[int], seed: int) -> list[TrainSample]:
    samples = [make_sample(6, size, seed + index) for index, size in enumerate(sizes)]
    return [replace(sample, prompt_ids=samples[0].prompt_ids) for sample in samples]


@given(st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=6), min_size=1, max_size=4), st.integers(1, 2))
def test_every_row_can_be_rebuilt_from_what_is_computed(groups: list[list[int]], data_parallel: int) -> None:
    samples = [sample for seed, sizes in enumerate(groups) for sample in make_group(sizes, 20 * seed)]
    packing = replace(PACKING, data_parallel=data_parallel, tokens_per_micro_batch=40)
    shares = list(pack(samples, packing, temperature=1.0, shares_prefixes=True))
    seen = []
    for micro_batch in (each for share in shares for each in share.mini_batches[0].micro_batches):
        seen += rebuilt(micro_batch, samples)
    assert sorted(seen) == [*range(len(samples))]
    for share in shares:
        column = columns_of(share, "advantages")
        for place, sample_id in enumerate(column.sample_ids.tolist()):
            numbers = column.numbers[column.starts[place] : column.starts[place + 1]]
            np.testing.assert_array_equal(numbers, samples[sample_id].advantages)


def rebuilt(micro_batch: MicroBatch, samples: Sequence[TrainSample]) -> list[int]:
    """Compare each row, put together from computed tokens, with its sample; return the samples."""
    shared = micro_batch.shared
    places = np.arange(len(micro_batch.token_ids)) if shared is None else shared.places
    computed = places if shared is None else shared.computed
    token_ids, positions = (column[computed] for column in (micro_batch.token_ids, micro_batch.positions))
    found = []
    for number, sample_id in enumerate(micro_batch.sample_ids.tolist()):
        if sample_id < 0:
            continue
        row = places[micro_batch.sequence_starts[number] : micro_batch.sequence_starts[number + 1]]
        sample = samples[sample_id]
        whole = np.concatenate([sample.prompt_ids, sample.rollout.token_ids])
        assert [*token_ids[row], micro_batch.last_ids[number]] == whole.tolist()
        assert positions[row].tolist() == [*range(len(row))]
        found.append(sample_id)
    if shared is not None:
        assert len(computed) == len(set(places.tolist()))
    return found


EPISODE = np.array([7, 8, 9, 1, 2, 3, 7, 8, 4, 5, 6, 7, 8, 4, 5, 9], np.int32)
"""A row that continues the prompt [1, 2, 3], then rows that begin at 3 and 8."""


def test_rows_of_an_episode_share_their_history() -> None:
    prompt_ids = np.array([1, 2, 3], np.int32)
    assert row_prefixes(prompt_ids, EPISODE, [3, 10]) == (NOTHING, Prefix(0, 5), NOTHING)
    again = np.concatenate([EPISODE[:10], EPISODE[3:9], EPISODE[:1]])
    # The last token of a row is no input.
    assert row_prefixes(prompt_ids, again, [3, 10]) == (NOTHING, Prefix(0, 5), Prefix(1, 6))


def test_tokens_that_went_to_other_experts_are_not_shared() -> None:
    prompt_ids = np.array([1, 2, 3], np.int32)
    routes = np.zeros((len(prompt_ids) + len(EPISODE) - 1, 2, 2), np.uint8)
    assert row_prefixes(prompt_ids, EPISODE, [3, 10], routes)[1] == Prefix(0, 5)
    routes[2, 1] = 3
    assert row_prefixes(prompt_ids, EPISODE, [3, 10], routes)[1] == Prefix(0, 2)


def episode_sample() -> TrainSample:
    prompt_ids, starts = np.array([1, 2, 3], np.int32), (3, 10)
    rollout = make_rollout(EPISODE, loss_mask=np.ones(len(EPISODE), np.bool_))
    rollout = replace(rollout, content=Content(token_ids=EPISODE, logprobs=np.zeros(len(EPISODE), np.float32), text=""))
    episode = Episode(rows=starts, shared=row_prefixes(prompt_ids, EPISODE, starts))
    advantages = np.ones(len(EPISODE), np.float32)
    rollout = replace(rollout, episode=episode)
    return TrainSample(prompt_ids=prompt_ids, rollout=rollout, advantages=advantages)


def test_rows_of_episodes_are_packed_with_their_history_once() -> None:
    first = episode_sample()
    samples = [first, replace(episode_sample(), prompt_ids=first.prompt_ids)]
    (share,) = pack(samples, replace(PACKING, pad_multiple=1), temperature=1.0, shares_prefixes=True)
    (micro_batch,) = share.mini_batches[0].micro_batches
    assert micro_batch.shared is not None
    # Rows of 5, 6 and 5 tokens: the second begins with the first, and that of another rollout with its prompt of 3.
    assert len(micro_batch.token_ids) == 32
    assert len(micro_batch.shared.computed) == (5 + 1 + 5) + (2 + 1 + 5)


@pytest.mark.parametrize(("routes", "is_shared"), [("aa", True), ("ab", False), ("aba", True)])
def test_a_prompt_is_shared_by_rollouts_whose_replayed_experts_are_equal_in_it(routes: str, is_shared: bool) -> None:
    samples = [
        replace(sample, rollout=replace(sample.rollout, prompt_routes=digest))
        for sample, digest in zip(make_group([5] * len(routes), 0), routes, strict=True)
    ]
    found = {
        has_routes: next(pack(samples, PACKING, temperature=1.0, has_routes=has_routes, shares_prefixes=True))
        for has_routes in (False, True)
    }
    shared = {key: share.mini_batches[0].micro_batches[0].shared for key, share in found.items()}
    assert shared[False] is not None
    assert (shared[True] is not None) == is_shared


def test_a_prefix_that_is_none_is_a_bug() -> None:
    samples = make_group([5, 5], 0)
    token_ids = samples[0].prompt_ids.copy()
    (share,) = pack(samples, PACKING, temperature=1.0, shares_prefixes=True)
    assert share.mini_batches[0].micro_batches[0].shared is not None
    wrong = replace(
        samples[0], rollout=replace(samples[0].rollout, episode=Episode(rows=(2,), shared=((-1, 0), (0, 2))))
    )
    assert len(token_ids) == 6
    with pytest.raises(AssertionError, match="differ in 2"):
        list(pack([wrong], PACKING, temperature=1.0, shares_prefixes=True))
