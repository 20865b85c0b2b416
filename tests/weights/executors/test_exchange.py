"""An exchange among equals tells what is complete while the rest is still on its way."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from megarl.checkpoint.save import assign_tensors
from megarl.weights.algebra.plan import plan
from megarl.weights.algebra.slices import same_processes
from megarl.weights.executors.transfer import exchange
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout
from tests.weights.executors.test_rounds import join_all, tensors_of
from tests.weights.reference import fill_from_canonical, make_shape, numbered
from tests.weights.rendezvous import Wire


def test_a_tensor_is_told_when_all_of_it_is_there_and_before_the_last_one_is() -> None:
    shape, num_ranks = make_shape(layers=4), 2
    layout = megatron_layout(shape, MegatronParallel(tensor=num_ranks), dtype="float32")
    target, model = assign_tensors(layout), numbered(shape)
    moves = plan(layout, target, locations=same_processes(layout, target))
    sources = [tensors_of(each, fill_from_canonical(each, model)) for each in layout.holdings]
    expected = [tensors_of(each, fill_from_canonical(each, model)) for each in target.holdings]
    targets = [{name: torch.full_like(tensor, -1.0) for name, tensor in each.items()} for each in expected]
    groups = join_all(num_ranks, Wire())
    told: list[list[str]] = [[] for _ in groups]
    num_waiting: list[list[int]] = [[] for _ in groups]

    def run(rank: int) -> None:
        def filled(name: str) -> None:
            assert torch.equal(targets[rank][name], expected[rank][name])
            told[rank].append(name)
            num_waiting[rank].append(sum(bool((tensor == -1.0).any()) for tensor in targets[rank].values()))

        exchange(moves, sources[rank], targets[rank], groups[rank], bucket_bytes=4096, filled=filled)

    with ThreadPoolExecutor(num_ranks) as pool:
        list(pool.map(run, range(num_ranks)))
    for rank, names in enumerate(told):
        assert sorted(names) == sorted(target.by_rank[rank].tensors), "each is told once"
        split = [count for count in num_waiting[rank] if count]
        assert len(split) > len(names) // 2, "most are told while others are on their way"
