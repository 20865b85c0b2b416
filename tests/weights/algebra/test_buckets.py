"""How moves are packed; what the buckets of a plan carry is in tests/weights/test_plan_properties.py."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.weights.algebra.buckets import PeerNumbers, buckets_from, rounds
from megarl.weights.algebra.plan import plan
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout
from megarl.weights.layouts.sglang import sglang_layout
from tests.weights.reference import make_shape

SHAPE = make_shape()
PLAN = plan(
    megatron_layout(SHAPE, MegatronParallel(tensor=2, data=2), dtype="float32"),
    sglang_layout(SHAPE, tensor=2, num_engines=2, dtype="float32"),
)


@settings(max_examples=20, deadline=None)
@given(bucket_bytes=st.integers(16, 4000))
def test_the_moves_of_a_bucket_are_aligned_and_do_not_overlap(bucket_bytes: int) -> None:
    for rank in range(4):
        for bucket in buckets_from(PLAN, rank, bucket_bytes=bucket_bytes):
            end = 0
            for move, start in zip(bucket.moves, bucket.starts, strict=True):
                assert start >= end
                assert start % 16 == 0
                end = start + move.num_bytes
            assert bucket.num_bytes == end
            longest_row_bytes = SHAPE.ffn_hidden // 2 * 4
            assert bucket.num_bytes <= max(bucket_bytes, longest_row_bytes)


def test_sources_start_at_different_targets() -> None:
    peers = PeerNumbers(first_target=4, num_peers=8)
    firsts = {rounds(buckets_from(PLAN, rank, bucket_bytes=1 << 20), (), peers)[0].sent for rank in range(4)}
    assert len({first.target_rank for first in firsts if first is not None}) > 1
