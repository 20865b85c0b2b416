"""Shares are made without a token, and carry each response as a handle."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megarl.data.packing import Packing
from megarl.data.shares import make_shares, pack
from megarl.tokens import Content
from megarl.types import TrainSample
from tests.train.samples import make_samples

PACKING = Packing(
    data_parallel=2, tokens_per_micro_batch=60, samples_per_update=None, pad_multiple=1, micro_batch_multiple=1
)


@dataclass(frozen=True)
class CountedHandle:
    """A content that counts how often it is loaded."""

    inner: Content
    loads: list[int]

    def load(self) -> Content:
        return self.content(0)

    def locate(self) -> tuple[CountedHandle, int]:
        return self, 0

    def content(self, _index: int) -> Content:
        self.loads.append(1)
        return self.inner


def with_handles(samples: Sequence[TrainSample], loads: list[int]) -> list[TrainSample]:
    return [
        replace(sample, rollout=replace(sample.rollout, content=CountedHandle(sample.rollout.content.load(), loads)))
        for sample in samples
    ]


def test_the_driver_makes_shares_without_reading_a_token_and_a_rank_reads_only_its_own() -> None:
    samples, loads = make_samples(9, vocab=50), list[int]()
    shares = list(make_shares(with_handles(samples, loads), PACKING, temperature=1.0))
    assert not loads
    assert sorted(i for share in shares for i in share.sample_ids) == list(range(9))
    filled = shares[0].fill()
    assert len(loads) == len(shares[0].sample_ids)
    expected = next(iter(pack(samples, PACKING, temperature=1.0)))
    for one, other in zip(filled.mini_batches[0].micro_batches, expected.mini_batches[0].micro_batches, strict=True):
        assert np.array_equal(one.token_ids, other.token_ids)
        assert np.array_equal(one.rollout_logprobs, other.rollout_logprobs)
        assert np.array_equal(one.advantages, other.advantages)


def test_numbers_that_all_tokens_share_are_sent_once_and_filled_everywhere() -> None:
    (sample,) = make_samples(1, vocab=50)
    num_tokens = sample.rollout.num_tokens
    repeated = replace(
        sample,
        rollout=replace(
            sample.rollout,
            loss_mask=np.broadcast_to(np.True_, num_tokens),
            versions=np.broadcast_to(np.int32(7), num_tokens),
        ),
        advantages=np.broadcast_to(np.float32(0.5), num_tokens),
    )
    alone = replace(PACKING, data_parallel=1)
    (share,) = make_shares([repeated], alone, temperature=1.0, has_versions=True)
    assert share.columns == {"loss_mask": (True,), "versions": (7,), "advantages": (0.5,)}
    (batch,) = pickle.loads(pickle.dumps(share)).fill().mini_batches
    (micro_batch,) = batch.micro_batches
    first = micro_batch.response_starts[0]
    assert batch.num_loss_tokens == num_tokens
    assert (micro_batch.advantages[first : first + num_tokens] == 0.5).all()
    assert (micro_batch.versions[first : first + num_tokens] == 7).all()
    assert micro_batch.loss_mask.sum() == num_tokens


def test_padding_repeats_tokens_of_the_pack_and_counts_nowhere() -> None:
    """A mixture of experts would send many copies of one token to the same few experts."""
    samples = make_samples(3, vocab=50)
    packing = replace(PACKING, data_parallel=1, tokens_per_micro_batch=500, pad_multiple=256, micro_batch_multiple=2)
    (batch,) = pack(samples, packing, temperature=1.0)
    for micro_batch in batch.mini_batches[0].micro_batches:
        ends = micro_batch.sequence_starts
        padding = micro_batch.token_ids[ends[-2] :]
        assert len(padding) > 100
        assert set(padding.tolist()) <= {
            token for sample in samples for token in (*sample.prompt_ids, *sample.rollout.token_ids)
        }
        assert len(set(padding.tolist())) > 3
        assert not micro_batch.loss_mask[ends[-2] :].any()
