"""The properties of every plan: random models, splits, engines and placements."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from megarl.weights.algebra.buckets import staging_bound
from megarl.weights.algebra.slices import Link
from tests.weights.execution import Case, cases, execute
from tests.weights.reference import (
    Array,
    assert_equal,
    box,
    empty,
    fill_from_canonical,
    numbered,
    sglang_rank,
)


def check(case: Case) -> None:
    check_values(case)
    check_nodes(case)
    check_origins(case)
    check_buckets(case)


def check_values(case: Case) -> None:
    """Each element is written once, with the right value, by a rank that has it, in an order that ends."""
    model = numbered(case.shape)
    sources = {holding.rank: fill_from_canonical(holding, model) for holding in case.source.holdings}
    targets = {holding.rank: empty(holding) for holding in case.target.holdings}
    execute(case.buckets, sources, targets)
    for holding in case.target.holdings:
        assert_equal(targets[holding.rank], fill_from_canonical(holding, model))
        if case.tensor is not None and not case.is_cpu_engine:
            rank = holding.rank % case.tensor
            expected = sglang_rank(case.shape, model, tensor=rank, size=case.tensor, expert=case.expert)
            assert_equal(targets[holding.rank], expected)


def check_nodes(case: Case) -> None:
    """A byte enters a node at most once, and not at all where a source is; on one GPU it does not travel."""
    locations = case.plan.locations
    held: defaultdict[tuple[str, str], Array] = defaultdict(lambda: np.zeros(0, dtype=np.int64))
    entered: dict[tuple[str, str], Array] = {}

    def counts(table: dict[tuple[str, str], Array], node: str, name: str) -> Array:
        return table.setdefault((node, name), np.zeros(case.source.canonical[name].shape, dtype=np.int64))

    for holding in case.source.holdings:
        for piece in holding.pieces:
            node, part = locations.sources[holding.rank].node, piece.slice
            box(counts(held, node, part.name), part.offsets, part.shape)[...] = 1
    for move in case.plan.moves:
        givers = locations.targets if move.hop else locations.sources
        location = locations.targets[move.target_rank]
        if givers[move.source_rank].link(location) is Link.NETWORK:
            box(counts(entered, location.node, move.slice.name), move.slice.offsets, move.slice.shape)[...] += 1
    for (node, name), times in entered.items():
        assert times.max() <= 1, f"{name} enters {node} {times.max()} times"
        assert not (times * counts(held, node, name)).any(), f"{name} enters {node}, which has it"


def check_origins(case: Case) -> None:
    """Every element of every target's tensors is in the digests of one source, however many hops away."""
    digested: Counter[tuple[int, str]] = Counter()
    for holding in case.source.holdings:
        for source_box in case.plan.boxes_from(holding.rank):
            for key in source_box.targets:
                digested[key] += source_box.slice.num_elements
    needed: Counter[tuple[int, str]] = Counter()
    for holding in case.target.holdings:
        for piece in holding.pieces:
            needed[holding.rank, piece.local_name] += piece.slice.num_elements
    assert digested == needed


def check_buckets(case: Case) -> None:
    """Both sides agree on the buckets, and no rank holds more than `staging_bound`."""
    buckets = case.buckets
    for rank, received in buckets.received.items():
        held = max((bucket.num_bytes for bucket in received), default=0)
        held += max((bucket.num_bytes for bucket in buckets.forwarded[rank]), default=0)
        assert held <= staging_bound(case.plan, rank, bucket_bytes=case.bucket_bytes)
    given = {bucket for table in (buckets.sent, buckets.forwarded) for sent in table.values() for bucket in sent}
    assert given == {bucket for received in buckets.received.values() for bucket in received}
    traffic = case.plan.traffic
    assert sum(traffic.between.values()) == sum(move.num_bytes for move in case.plan.moves)
    assert sum(traffic.bytes_by_link.values()) == sum(traffic.between.values())


_PATIENT = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@pytest.mark.patient
@settings(_PATIENT, max_examples=25)
@given(case=cases())
def test_every_plan_delivers_each_byte_once_and_once_into_each_node(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.timeout(2400)
@settings(_PATIENT, max_examples=2000)
@given(case=cases())
def test_thousands_of_plans_deliver_each_byte_once_and_once_into_each_node(case: Case) -> None:
    check(case)
