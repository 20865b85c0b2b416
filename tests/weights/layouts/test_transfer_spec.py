from __future__ import annotations

from dataclasses import replace

from megarl.weights.layouts.megatron import MegatronParallel
from megarl.weights.layouts.transfer_spec import TransferSpec
from tests.weights.reference import make_shape


def transfer_spec(*, tensor: int = 2, num_engines: int = 1) -> TransferSpec:
    return TransferSpec(
        shape=make_shape(),
        parallel=MegatronParallel(tensor=2, pipeline=2, data=2),
        trainer_dtype="float32",
        num_engines=num_engines,
        tensor=tensor,
        engine_dtype="bfloat16",
        is_cpu_engine=False,
    )


def test_engine_ranks_come_after_trainer_ranks() -> None:
    transfer = transfer_spec(tensor=2, num_engines=3)
    assert transfer.num_peers == 8 + 6
    assert transfer.target_rank(engine=2, tp_rank=1) == 5
    assert transfer.peer(5) == 13
    assert {holding.rank for holding in transfer.engine_layout().holdings} == set(range(6))


def placed_transfer() -> TransferSpec:
    """Two engines of two ranks on the first rollout node, one on the second."""
    return replace(
        transfer_spec(tensor=2, num_engines=3),
        trainer_gpus=tuple((0, rank) for rank in range(8)),
        engine_gpus=((1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 1)),
        relays=True,
    )


def test_a_roster_is_planned_once_and_keeps_the_places_of_its_engines() -> None:
    transfer = placed_transfer()
    fewer = transfer.with_engines([2, 0])
    assert (fewer.num_engines, fewer.engine_gpus) == (2, ((2, 0), (2, 1), (1, 0), (1, 1)))
    assert fewer.plan().hash != transfer.plan().hash
    assert transfer.with_engines([0, 1, 2]).plan() is transfer.plan()
