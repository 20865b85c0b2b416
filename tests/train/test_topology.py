from __future__ import annotations

import time

from megarl.weights.layouts.megatron import MegatronParallel
from tests.train import jobs
from tests.train.cluster import Cluster
from tests.train.splits import actor_of


def test_ranks_are_numbered_as_the_weights_layout_numbers_them(cluster: Cluster) -> None:
    for parallel in (
        MegatronParallel(tensor=2, pipeline=2),
        MegatronParallel(pipeline=2, virtual_pipeline=2, data=2),
        MegatronParallel(tensor=2, context=2),
        MegatronParallel(context=2, data=2),
    ):
        actor = actor_of(parallel)
        for rank, (tensor, context, data, pipeline, is_first, is_last) in enumerate(
            cluster.run(parallel.world_size, jobs.coordinates, actor)
        ):
            assert parallel.rank(tensor=tensor, context=context, data=data, pipeline=pipeline) == rank
            assert is_first == [pipeline == 0 and chunk == 0 for chunk in range(parallel.virtual_pipeline)]
            last_chunk = parallel.virtual_pipeline - 1
            assert is_last == [
                pipeline == parallel.pipeline - 1 and chunk == last_chunk for chunk in range(parallel.virtual_pipeline)
            ]


def test_a_rank_whose_peer_never_comes_gives_up_and_says_where_it_waited(cluster: Cluster) -> None:
    began = time.monotonic()
    (message,) = cluster.run(1, jobs.wait_alone, 1.0)
    assert time.monotonic() - began < 30
    assert message.startswith("trainer rank 0 of 2 could not join the other ranks at 127.0.0.1:")
    assert "within 1 s" in message
