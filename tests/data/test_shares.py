"""Shares are made without a token, and carry each response as a handle."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megarl.data.packing import Packing
from megarl.data.shares import make_shares
from megarl.tokens import Content
from megarl.types import Episode, TrainSample
from tests.filled_shares import pack
from tests.train.samples import make_samples

PACKING = Packing(
    data_parallel=2, tokens_per_micro_batch=60, samples_per_update=None, pad_multiple=1, micro_batch_multiple=1
)


@dataclass(frozen=True)
class CountedHandle:
    """A content that counts how often it is loaded."""

    inner: Content
    loads: list[int]
    repetition: float | None = None
    answer: str | None = None

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


def test_prompts_of_a_share_are_one_array_and_rollouts_of_one_prompt_have_it_once() -> None:
    first, second = make_samples(2, vocab=50)
    samples = [first, replace(second, prompt_ids=first.prompt_ids), *make_samples(3, vocab=50)]
    (share,) = make_shares(samples, replace(PACKING, data_parallel=1, tokens_per_micro_batch=500), temperature=1.0)
    assert len(share.prompt_ids) == sum(len(sample.prompt_ids) for sample in (first, *samples[2:]))
    rows = pickle.loads(pickle.dumps(share)).load()
    for row, sample in zip(rows.values(), samples, strict=True):
        assert np.array_equal(row.prompt_ids, sample.prompt_ids)


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


def with_routes(sample: TrainSample, *, first: int) -> TrainSample:
    """Give each token a route of its own, which counts from `first`; the last has none."""
    num_tokens = len(sample.prompt_ids) + sample.rollout.num_tokens - 1
    routes = (first + np.arange(num_tokens)).astype(np.uint16)[:, None, None]
    content = replace(sample.rollout.content.load(), routes=routes)
    return replace(sample, rollout=replace(sample.rollout, content=content))


def test_routes_lie_beside_the_tokens_of_their_sequence_and_are_not_copied() -> None:
    samples = make_samples(5, vocab=50)
    routed = [with_routes(each, first=100 * place) if place != 2 else each for place, each in enumerate(samples)]
    packing = replace(PACKING, data_parallel=1, tokens_per_micro_batch=500, pad_multiple=64, sequence_multiple=4)
    (share,) = make_shares(routed, packing, temperature=1.0, has_routes=True)
    (micro_batch,) = share.fill().mini_batches[0].micro_batches
    assert micro_batch.routes is not None
    column = micro_batch.routes.of_layers(0, 1)[:, 0, 0]
    for place, start in zip(micro_batch.sample_ids[:-1].tolist(), micro_batch.sequence_starts.tolist(), strict=False):
        num_tokens = len(samples[place].prompt_ids) + samples[place].rollout.num_tokens - 1
        expected = np.full(num_tokens, 65535) if place == 2 else 100 * place + np.arange(num_tokens)
        assert column[start : start + num_tokens].tolist() == expected.tolist()
    assert np.count_nonzero(column != 65535) == sum(
        len(each.prompt_ids) + each.rollout.num_tokens - 1 for each in (*samples[:2], *samples[3:])
    )
    theirs = [each.rollout.content.load().routes for each in routed]
    for _, part in micro_batch.routes.parts:
        assert any(np.shares_memory(part, each) for each in theirs if each is not None)
    (without,) = make_shares(routed, packing, temperature=1.0)
    assert without.fill().mini_batches[0].micro_batches[0].routes is None


def test_each_row_of_an_episode_has_the_routes_of_its_own_tokens() -> None:
    (sample,) = make_samples(1, vocab=50)
    content = Content(token_ids=np.arange(10, dtype=np.int32), logprobs=np.zeros(10, np.float32), text="", routes=None)
    rollout = replace(
        sample.rollout,
        content=content,
        versions=np.zeros(10, np.int32),
        loss_mask=np.ones(10, np.bool_),
        episode=Episode(rows=(4, 7)),
    )
    sample = replace(
        sample, prompt_ids=np.arange(40, 43, dtype=np.int32), rollout=rollout, advantages=np.zeros(10, np.float32)
    )
    packing = replace(PACKING, data_parallel=1)
    (share,) = make_shares([with_routes(sample, first=0)], packing, temperature=1.0, has_routes=True)
    (micro_batch,) = share.fill().mini_batches[0].micro_batches
    assert micro_batch.routes is not None
    # The prompt has routes 0 to 2, the token with id t has route 3 + t; the last token of a row is no input.
    expected = {**{40 + t: t for t in range(3)}, **{t: 3 + t for t in range(10)}}
    known = micro_batch.routes.are_known()
    routes = micro_batch.routes.of_layers(0, 1)[known, 0, 0]
    assert routes.tolist() == [expected[token] for token in micro_batch.token_ids[known].tolist()]
    assert micro_batch.token_ids[known].tolist() == [40, 41, 42, 0, 1, 2, 4, 5, 7, 8]


def test_the_numbers_of_a_teacher_lie_beside_the_tokens_that_each_row_predicts() -> None:
    samples = make_samples(3, vocab=50)
    taught = []
    for place, sample in enumerate(samples):
        content = sample.rollout.content.load()
        numbers = 100.0 * (place + 1) + np.arange(3 * sample.rollout.num_tokens).reshape(-1, 3)
        content = replace(content, teacher=numbers.astype(np.float32))
        taught.append(replace(sample, rollout=replace(sample.rollout, content=content)))
    packing = replace(PACKING, data_parallel=1, tokens_per_micro_batch=500, pad_multiple=64, sequence_multiple=4)
    (share,) = make_shares(taught, packing, temperature=1.0, teacher_width=3)
    (micro_batch,) = share.fill().mini_batches[0].micro_batches
    column = micro_batch.teacher
    assert column is not None
    assert column.shape == (len(micro_batch.token_ids), 3)
    for place, start, end in zip(
        micro_batch.sample_ids[:-1], micro_batch.response_starts, micro_batch.response_ends, strict=False
    ):
        np.testing.assert_array_equal(column[start:end], taught[place].rollout.content.load().teacher)
    assert np.count_nonzero(column) == 3 * sum(each.rollout.num_tokens for each in samples)
    (without,) = make_shares(taught, packing, temperature=1.0)
    assert without.fill().mini_batches[0].micro_batches[0].teacher is None
    # A rank without samples has the column as well: all ranks compute alike.
    *_, last = make_shares(taught[:1], replace(packing, data_parallel=2), temperature=1.0, teacher_width=3)
    empty = last.fill().mini_batches[0].micro_batches[0].teacher
    assert empty is not None
    assert empty.shape[1] == 3
