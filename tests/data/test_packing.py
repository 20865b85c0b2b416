from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data.context_parts import zigzag
from megarl.data.packing import Packing, SequenceCost, plan_packs
from megarl.data.shares import UNUSED_IN_FORWARD, unpack, with_columns
from megarl.tokens import SampleColumn, assemble
from megarl.types import FloatArray, MicroBatch, TrainBatch, TrainSample
from tests.filled_shares import pack
from tests.values import make_rollout

PADDING = -1
PACKING = Packing(
    data_parallel=1, tokens_per_micro_batch=40, samples_per_update=None, pad_multiple=1, micro_batch_multiple=1
)
Lengths = list[tuple[int, int]]

lengths = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 20)), min_size=1, max_size=25)


def make_sample(num_prompt: int, num_response: int, seed: int) -> TrainSample:
    random = np.random.default_rng(seed)
    rollout = make_rollout(
        random.integers(1, 100, num_response),
        logprobs=random.standard_normal(num_response).astype(np.float32),
        loss_mask=random.random(num_response) < 0.7,
    )
    rollout = replace(rollout, versions=np.arange(num_response, dtype=np.int32))
    advantages, values, returns = random.standard_normal((3, num_response)).astype(np.float32)
    return TrainSample(
        prompt_ids=random.integers(1, 100, num_prompt).astype(np.int32),
        rollout=rollout,
        advantages=advantages,
        values=values,
        returns=returns,
    )


def make_samples(sizes: Lengths) -> list[TrainSample]:
    return [make_sample(num_prompt, num_response, seed) for seed, (num_prompt, num_response) in enumerate(sizes)]


def pack_samples(
    samples: list[TrainSample],
    *,
    data_parallel: int = 1,
    budget: int = 40,
    per_update: int | None = None,
    pad_multiple: int = 1,
    sequence_multiple: int = 1,
    micro_batch_multiple: int = 1,
    has_versions: bool = False,
) -> list[TrainBatch]:
    packing = replace(
        PACKING,
        data_parallel=data_parallel,
        tokens_per_micro_batch=budget,
        samples_per_update=per_update,
        pad_multiple=pad_multiple,
        sequence_multiple=sequence_multiple,
        micro_batch_multiple=micro_batch_multiple,
    )
    return list(pack(samples, packing, temperature=1.0, has_versions=has_versions))


def micro_batches(shares: list[TrainBatch]) -> list[MicroBatch]:
    return [item for share in shares for mini_batch in share.mini_batches for item in mini_batch.micro_batches]


def columns_of(share: TrainBatch, name: str) -> SampleColumn:
    """The numbers that a rank would return if its model had computed this column."""
    return unpack(
        share,
        [[getattr(item, name) for item in mini_batch.micro_batches] for mini_batch in share.mini_batches],
    )


def all_columns(shares: list[TrainBatch], name: str) -> tuple[FloatArray, ...]:
    return assemble([columns_of(share, name) for share in shares])


@pytest.mark.patient
@settings(max_examples=100)
@given(
    sizes=lengths,
    data_parallel=st.integers(1, 4),
    budget=st.integers(32, 80),
    per_update=st.none() | st.integers(1, 9),
    pad_multiple=st.sampled_from([1, 2, 8]),
    is_padded=st.booleans(),
    micro_batch_multiple=st.sampled_from([1, 2, 4]),
)
def test_every_sample_is_packed_once_and_whole(
    sizes: Lengths,
    data_parallel: int,
    budget: int,
    per_update: int | None,
    pad_multiple: int,
    is_padded: bool,
    micro_batch_multiple: int,
) -> None:
    samples = make_samples(sizes)
    sequence_multiple = pad_multiple if is_padded else 1
    shares = pack_samples(
        samples,
        data_parallel=data_parallel,
        budget=budget,
        per_update=per_update,
        pad_multiple=pad_multiple,
        sequence_multiple=sequence_multiple,
        micro_batch_multiple=micro_batch_multiple,
        has_versions=True,
    )
    packed_ids = [sample_id for item in micro_batches(shares) for sample_id in item.sample_ids if sample_id != PADDING]
    assert sorted(packed_ids) == list(range(len(samples)))
    for item in micro_batches(shares):
        check_contents(item, samples)
        assert not (np.diff(item.sequence_starts) % sequence_multiple).any()
    for found, sample in zip(all_columns(shares, "rollout_logprobs"), samples, strict=True):
        np.testing.assert_array_equal(found, sample.rollout.logprobs)
    assert len(shares) == data_parallel
    for index, of_ranks in enumerate(zip(*(share.mini_batches for share in shares), strict=True)):
        counts = {len(mini_batch.micro_batches) for mini_batch in of_ranks}
        num_tokens = {len(item.token_ids) for mini_batch in of_ranks for item in mini_batch.micro_batches}
        assert len(counts) == len(num_tokens) == 1
        assert counts.pop() % micro_batch_multiple == 0
        length = num_tokens.pop()
        assert length % pad_multiple == 0
        assert length < budget + pad_multiple
        size = per_update or len(samples)
        members = samples[index * size : (index + 1) * size]
        for mini_batch in of_ranks:
            assert mini_batch.num_sequences == sum(sample.rollout.loss_mask.any() for sample in members)
            assert mini_batch.num_loss_tokens == sum(sample.rollout.loss_mask.sum() for sample in members)
        masked = sum(int(item.loss_mask.sum()) for mini_batch in of_ranks for item in mini_batch.micro_batches)
        assert masked == of_ranks[0].num_loss_tokens


def check_contents(item: MicroBatch, samples: list[TrainSample]) -> None:
    """A micro-batch against its samples, token by token."""
    assert item.sequence_starts[0] == 0
    assert item.sequence_starts[-1] == len(item.token_ids)
    for index, sample_id in enumerate(item.sample_ids):
        start, end = item.sequence_starts[index], item.sequence_starts[index + 1]
        assert end > start
        assert item.positions[start:end].tolist() == list(range(end - start))
        if sample_id == PADDING:
            assert index == len(item.sample_ids) - 1
            assert not item.loss_mask[start:end].any()
            continue
        sample = samples[sample_id]
        sequence = [*sample.prompt_ids.tolist(), *sample.rollout.token_ids.tolist()]
        last = item.response_ends[index]
        assert item.token_ids[start:last].tolist() == sequence[:-1]
        assert item.targets[start:last].tolist() == sequence[1:]
        first = item.response_starts[index]
        assert first == start + len(sample.prompt_ids) - 1
        assert not item.loss_mask[start:first].any()
        assert not item.loss_mask[last:end].any()
        for found, expected in (
            (item.loss_mask, sample.rollout.loss_mask),
            (item.advantages, sample.advantages),
            (item.rollout_logprobs, sample.rollout.logprobs),
            (item.versions, sample.rollout.versions),
            (item.values, sample.values),
            (item.returns, sample.returns),
        ):
            assert found is not None
            np.testing.assert_array_equal(found[first:last], expected)
    assert item.old_logprobs is None
    assert item.reference_logprobs is None


@given(sizes=lengths, asked=st.integers(1, 3), learning=st.integers(1, 3), per_update=st.none() | st.integers(1, 9))
def test_numbers_of_one_division_are_columns_of_another(
    sizes: Lengths, asked: int, learning: int, per_update: int | None
) -> None:
    """A reference in a pool of its own has other data-parallel ranks than the actor."""
    samples = make_samples(sizes)
    parts = [columns_of(share, "rollout_logprobs") for share in pack_samples(samples, data_parallel=asked)]
    for share in pack_samples(samples, data_parallel=learning, per_update=per_update):
        for mini_batch in with_columns(share, {"values": parts, "old_logprobs": parts}).mini_batches:
            for item in mini_batch.micro_batches:
                np.testing.assert_array_equal(item.values, item.rollout_logprobs)
                np.testing.assert_array_equal(item.old_logprobs, item.rollout_logprobs)
                assert item.reference_logprobs is None


@given(sizes=lengths)
def test_the_same_samples_always_give_the_same_batch(sizes: Lengths) -> None:
    first, second = (pack_samples(make_samples(sizes), data_parallel=2) for _ in range(2))
    for one, other in zip(micro_batches(first), micro_batches(second), strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.sample_ids, other.sample_ids)


def test_ranks_get_about_the_same_number_of_tokens() -> None:
    random = np.random.default_rng(0)
    samples = make_samples([(4, int(size)) for size in random.integers(1, 200, 64)])
    shares = pack_samples(samples, data_parallel=4, budget=512)
    loads = [sum(map(num_real_tokens, micro_batches([share]))) for share in shares]
    assert max(loads) - min(loads) < 0.05 * max(loads), loads
    num_slots = sum(len(item.token_ids) for item in micro_batches(shares))
    assert sum(loads) > 0.95 * num_slots, f"{num_slots} slots for {sum(loads)} tokens"


# Operations of Qwen2.5-7B: attention is as much work as the weights at about 35,000 tokens.
COST = SequenceCost(per_token=1.41e10, per_squared_token=2.0e5)


@given(seed=st.integers(0, 2**32 - 1), data_parallel=st.sampled_from([2, 8, 16, 64]))
def test_ranks_get_about_the_same_work_from_lengths_with_a_long_tail(seed: int, data_parallel: int) -> None:
    random = np.random.default_rng(seed)
    found = random.lognormal(7.5, 1.1, 32 * data_parallel).astype(int) + 200
    lengths = np.minimum(found, 20_480).tolist()
    packing = replace(PACKING, data_parallel=data_parallel, tokens_per_micro_batch=22_528, pad_multiple=64, cost=COST)
    (plan,) = plan_packs(lengths, packing)
    work = [sum(COST.of([lengths[i] for members in share for i in members])) for share in plan.shares]
    assert max(work) <= 1.05 * np.mean(work), work
    fewest = -(-sum(lengths) // (packing.tokens_per_micro_batch * data_parallel))
    assert len(plan.shares[0]) <= fewest + 1


def test_balance_is_not_bought_with_another_micro_batch() -> None:
    """Every sample fills a micro-batch: equal work would give three short ones to one rank."""
    cost = SequenceCost(per_token=100.0, per_squared_token=1.0)
    packing = replace(PACKING, data_parallel=2, tokens_per_micro_batch=100, cost=cost)
    (plan,) = plan_packs([100, 57, 56, 55], packing)
    assert [len(share) for share in plan.shares] == [2, 2]


def num_real_tokens(item: MicroBatch) -> int:
    sizes: npt.NDArray[np.int32] = np.diff(item.sequence_starts)
    return int(sizes[item.sample_ids != PADDING].sum())


def test_a_sample_larger_than_the_budget_is_refused() -> None:
    with pytest.raises(AssertionError, match="a sample has 41 tokens, a micro-batch 40"):
        pack_samples(make_samples([(21, 21)]), budget=40)


@given(sizes=lengths, data_parallel=st.integers(1, 3))
def test_a_question_has_only_tokens(sizes: Lengths, data_parallel: int) -> None:
    samples = make_samples(sizes)
    packing = replace(PACKING, data_parallel=data_parallel)
    asked = list(pack(samples, packing, temperature=1.0, without=UNUSED_IN_FORWARD))
    for lean, full in zip(
        micro_batches(asked), micro_batches(list(pack(samples, packing, temperature=1.0))), strict=True
    ):
        np.testing.assert_array_equal(lean.token_ids, full.token_ids)
        np.testing.assert_array_equal(lean.targets, full.targets)
        assert lean.loss_mask.size == lean.rollout_logprobs.size == lean.advantages.size == 0


def test_versions_are_packed_only_where_ranks_need_them() -> None:
    assert all(item.versions is None for item in micro_batches(pack_samples(make_samples([(3, 4)]))))


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=12),
    st.integers(1, 6),
)
def test_zigzag_gives_every_position_to_one_rank_and_all_ranks_the_same_causal_work(
    chunks: list[int], context: int
) -> None:
    starts = np.cumsum([0, *(2 * context * chunk for chunk in chunks)]).astype(np.int32)
    order = zigzag(starts, context)
    assert order.shape == (context, starts[-1] // context)
    inverse = np.argsort(order.ravel())
    np.testing.assert_array_equal(order.ravel()[inverse], np.arange(starts[-1]))
    np.testing.assert_array_equal(inverse[order.ravel()], np.arange(starts[-1]))
    seen = np.arange(starts[-1]) - np.repeat(starts[:-1], np.diff(starts)) + 1
    work = seen[order].sum(axis=1)
    assert (work == work[0]).all(), "each rank has equally many pairs of query and key"
    sequence = np.repeat(np.arange(len(chunks)), np.diff(starts))
    assert (np.diff(sequence[order], axis=1) >= 0).all(), "each rank has the sequences in their order"
