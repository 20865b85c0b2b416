from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.weights.algebra.buckets import Bucket, PeerNumbers, buckets_from, buckets_to, rounds
from megarl.weights.algebra.plan import Plan, plan
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout
from megarl.weights.layouts.sglang import sglang_layout
from tests.weights.reference import apply, assert_equal, empty, fill_from_canonical, make_shape, numbered, sglang_rank

SHAPE = make_shape()


def make_plan() -> Plan:
    source = megatron_layout(SHAPE, MegatronParallel(tensor=2, data=2), dtype="float32")
    return plan(source, sglang_layout(SHAPE, tensor=2, num_engines=2, dtype="float32"))


def by_pair(buckets: list[Bucket]) -> dict[tuple[int, int, int], Bucket]:
    return {(bucket.source_rank, bucket.target_rank, bucket.index): bucket for bucket in buckets}


@settings(max_examples=20, deadline=None)
@given(bucket_bytes=st.integers(16, 4000))
def test_both_sides_pack_the_same_buckets(bucket_bytes: int) -> None:
    moves = make_plan()
    sent = [bucket for rank in range(4) for bucket in buckets_from(moves, rank, bucket_bytes=bucket_bytes)]
    expected = [bucket for rank in range(4) for bucket in buckets_to(moves, rank, bucket_bytes=bucket_bytes)]
    assert by_pair(sent) == by_pair(expected)
    assert len(by_pair(sent)) == len(sent)


@settings(max_examples=20, deadline=None)
@given(bucket_bytes=st.integers(16, 4000))
def test_moves_do_not_overlap_and_carry_the_whole_plan(bucket_bytes: int) -> None:
    moves = make_plan()
    model = numbered(SHAPE)
    targets = {holding.rank: empty(holding) for holding in moves.target.holdings}
    sources = {holding.rank: fill_from_canonical(holding, model) for holding in moves.source.holdings}
    for rank in range(4):
        for bucket in buckets_from(moves, rank, bucket_bytes=bucket_bytes):
            end = 0
            for move, start in zip(bucket.moves, bucket.starts, strict=True):
                assert start >= end
                assert start % 16 == 0
                end = start + move.num_bytes
            assert bucket.num_bytes == end
            longest_row_bytes = SHAPE.ffn_hidden // 2 * 4
            assert bucket.num_bytes <= max(bucket_bytes, longest_row_bytes)
            apply(bucket.moves, sources, targets)
    for rank, arrays in targets.items():
        assert_equal(arrays, sglang_rank(SHAPE, model, tensor=rank % 2, size=2))


def test_sources_start_at_different_targets() -> None:
    moves = make_plan()
    peers = PeerNumbers(first_target=4, num_peers=8)
    firsts = set()
    for rank in range(4):
        first = rounds(buckets_from(moves, rank, bucket_bytes=1 << 20), (), peers)[0].sent
        assert first is not None
        firsts.add(first.target_rank)
    assert len(firsts) > 1


@settings(max_examples=20, deadline=None)
@given(bucket_bytes=st.integers(16, 4000))
def test_a_peer_has_one_bucket_each_way_in_a_round(bucket_bytes: int) -> None:
    moves = make_plan()
    peers = PeerNumbers(first_target=4, num_peers=8)
    for rank in range(4):
        for buckets in (buckets_from, buckets_to):
            packed = buckets(moves, rank, bucket_bytes=bucket_bytes)
            assert len({peers.round_of(bucket) for bucket in packed}) == len(packed)
