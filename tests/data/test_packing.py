from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.data.packing import pack, unpack
from megarl.types import FinishReason, MicroBatch, Rollout, TrainBatch, TrainSample

PADDING = -1
Lengths = list[tuple[int, int]]

lengths = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 20)), min_size=1, max_size=25)


def make_sample(num_prompt: int, num_response: int, seed: int) -> TrainSample:
    random = np.random.default_rng(seed)
    rollout = Rollout(
        token_ids=random.integers(1, 100, num_response).astype(np.int32),
        logprobs=random.standard_normal(num_response).astype(np.float32),
        versions=np.zeros(num_response, np.int32),
        loss_mask=random.random(num_response) < 0.7,
        finish_reason=FinishReason.STOP,
        text="",
    )
    return TrainSample(
        prompt_ids=random.integers(1, 100, num_prompt).astype(np.int32),
        rollout=rollout,
        advantages=random.standard_normal(num_response).astype(np.float32),
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
    micro_batch_multiple: int = 1,
    has_versions: bool = False,
) -> TrainBatch:
    return pack(
        samples,
        data_parallel=data_parallel,
        tokens_per_micro_batch=budget,
        samples_per_update=per_update,
        pad_multiple=pad_multiple,
        micro_batch_multiple=micro_batch_multiple,
        temperature=1.0,
        has_versions=has_versions,
    )


def micro_batches(batch: TrainBatch) -> list[MicroBatch]:
    return [item for mini_batch in batch.mini_batches for share in mini_batch.shares for item in share]


@given(
    sizes=lengths,
    data_parallel=st.integers(1, 4),
    budget=st.integers(31, 80),
    per_update=st.none() | st.integers(1, 9),
    pad_multiple=st.sampled_from([1, 2, 8]),
    micro_batch_multiple=st.sampled_from([1, 2, 4]),
)
def test_every_sample_is_packed_once_and_whole(
    sizes: Lengths,
    data_parallel: int,
    budget: int,
    per_update: int | None,
    pad_multiple: int,
    micro_batch_multiple: int,
) -> None:
    samples = make_samples(sizes)
    batch = pack_samples(
        samples,
        data_parallel=data_parallel,
        budget=budget,
        per_update=per_update,
        pad_multiple=pad_multiple,
        micro_batch_multiple=micro_batch_multiple,
    )
    packed_ids = [sample_id for item in micro_batches(batch) for sample_id in item.sample_ids if sample_id != PADDING]
    assert sorted(packed_ids) == list(range(len(samples)))
    for item in micro_batches(batch):
        check_contents(item, samples)
    for index, mini_batch in enumerate(batch.mini_batches):
        counts = {len(share) for share in mini_batch.shares}
        num_tokens = {len(item.token_ids) for share in mini_batch.shares for item in share}
        assert len(mini_batch.shares) == data_parallel
        assert len(counts) == len(num_tokens) == 1
        assert counts.pop() % micro_batch_multiple == 0
        length = num_tokens.pop()
        assert length % pad_multiple == 0
        assert length < budget + pad_multiple
        size = per_update or len(samples)
        members = samples[index * size : (index + 1) * size]
        assert mini_batch.num_sequences == sum(sample.rollout.loss_mask.any() for sample in members)
        assert mini_batch.num_loss_tokens == sum(sample.rollout.loss_mask.sum() for sample in members)
        masked = sum(int(item.loss_mask.sum()) for share in mini_batch.shares for item in share)
        assert masked == mini_batch.num_loss_tokens


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
        assert item.token_ids[start:end].tolist() == sequence[:-1]
        assert item.targets[start:end].tolist() == sequence[1:]
        first = item.response_starts[index]
        assert first == start + len(sample.prompt_ids) - 1
        assert not item.loss_mask[start:first].any()
        np.testing.assert_array_equal(item.targets[first:end], sample.rollout.token_ids)
        np.testing.assert_array_equal(item.loss_mask[first:end], sample.rollout.loss_mask)
        np.testing.assert_array_equal(item.advantages[first:end], sample.advantages)
        np.testing.assert_array_equal(item.rollout_logprobs[first:end], sample.rollout.logprobs)


@given(sizes=lengths, data_parallel=st.integers(1, 3), per_update=st.none() | st.integers(1, 9))
def test_unpacking_gives_each_sample_its_own_back(sizes: Lengths, data_parallel: int, per_update: int | None) -> None:
    samples = make_samples(sizes)
    batch = pack_samples(samples, data_parallel=data_parallel, per_update=per_update)
    arrays = [
        np.stack([np.stack([item.rollout_logprobs for item in share]) for share in mini_batch.shares])
        for mini_batch in batch.mini_batches
    ]
    unpacked = unpack(batch, arrays)
    assert len(unpacked) == len(samples)
    for found, sample in zip(unpacked, samples, strict=True):
        np.testing.assert_array_equal(found, sample.rollout.logprobs)


@given(sizes=lengths)
def test_the_same_samples_always_give_the_same_batch(sizes: Lengths) -> None:
    first, second = (pack_samples(make_samples(sizes), data_parallel=2) for _ in range(2))
    for one, other in zip(micro_batches(first), micro_batches(second), strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.sample_ids, other.sample_ids)


def test_ranks_get_about_the_same_number_of_tokens() -> None:
    random = np.random.default_rng(0)
    samples = make_samples([(4, int(size)) for size in random.integers(1, 200, 64)])
    (mini_batch,) = pack_samples(samples, data_parallel=4, budget=512).mini_batches
    loads = [sum(num_real_tokens(item) for item in share) for share in mini_batch.shares]
    assert max(loads) - min(loads) < 0.05 * max(loads), loads
    num_slots = sum(len(item.token_ids) for share in mini_batch.shares for item in share)
    assert sum(loads) > 0.95 * num_slots, f"{num_slots} slots for {sum(loads)} tokens"


def num_real_tokens(item: MicroBatch) -> int:
    sizes: npt.NDArray[np.int32] = np.diff(item.sequence_starts)
    return int(sizes[item.sample_ids != PADDING].sum())


def test_the_budget_is_used_before_another_micro_batch_is_opened() -> None:
    samples = make_samples([(1, 10)] * 8)  # ten positions each
    ((share,),) = (mini_batch.shares for mini_batch in pack_samples(samples, budget=40).mini_batches)
    assert [len(item.sample_ids) for item in share] == [4, 4]


def test_a_rank_without_samples_gets_pure_padding() -> None:
    (mini_batch,) = pack_samples(make_samples([(3, 4)]), data_parallel=2, pad_multiple=4).mini_batches
    (full,), (empty,) = mini_batch.shares
    assert full.sample_ids.tolist() == [0, PADDING]
    assert empty.sample_ids.tolist() == [PADDING]
    assert len(empty.token_ids) == len(full.token_ids) == 8


def test_a_sample_larger_than_the_budget_is_refused() -> None:
    with pytest.raises(AssertionError, match="a sample has 41 tokens, a micro-batch 40"):
        pack_samples(make_samples([(21, 21)]), budget=40)


@given(sizes=lengths)
def test_columns_that_samples_have_are_packed_and_others_are_left_out(sizes: Lengths) -> None:
    samples = [
        replace(sample, values=sample.advantages + 1, returns=sample.advantages) for sample in make_samples(sizes)
    ]
    batch = pack_samples(samples, data_parallel=1)
    micro_batches = [item for mini_batch in batch.mini_batches for item in mini_batch.shares[0]]
    for item in micro_batches:
        assert item.values is not None
        assert item.returns is not None
        np.testing.assert_array_equal(item.returns, item.advantages)
        assert item.old_logprobs is None
        assert item.reference_logprobs is None
    arrays = [
        np.stack([np.stack([item.values for item in share if item.values is not None]) for share in mini_batch.shares])
        for mini_batch in batch.mini_batches
    ]
    for found, sample in zip(unpack(batch, arrays), samples, strict=True):
        np.testing.assert_array_equal(found, sample.values)


@given(sizes=lengths)
def test_versions_are_packed_where_ranks_need_them(sizes: Lengths) -> None:
    samples = [
        replace(
            sample, rollout=replace(sample.rollout, versions=np.arange(len(sample.rollout.token_ids), dtype=np.int32))
        )
        for sample in make_samples(sizes)
    ]
    assert all(item.versions is None for item in micro_batches(pack_samples(samples)))
    batch = pack_samples(samples, data_parallel=2, has_versions=True)
    columns = [
        np.stack([np.stack([item.versions for item in share if item.versions is not None]) for share in each.shares])
        for each in batch.mini_batches
    ]
    for found, sample in zip(unpack(batch, [column.astype(np.float32) for column in columns]), samples, strict=True):
        np.testing.assert_array_equal(found, sample.rollout.versions)
