from __future__ import annotations

from tests.weights.reference import placed_transfer, transfer_spec


def test_engine_ranks_come_after_trainer_ranks() -> None:
    transfer = transfer_spec(tensor=2, num_engines=3)
    assert transfer.num_peers == 8 + 6
    assert transfer.target_rank(engine=2, tp_rank=1) == 5
    assert transfer.peer(5) == 13
    assert {holding.rank for holding in transfer.engine_layout().holdings} == set(range(6))


def test_a_roster_is_planned_once_and_keeps_the_places_of_its_engines() -> None:
    transfer = placed_transfer()
    fewer = transfer.with_engines([2, 0])
    assert (fewer.num_engines, fewer.engine_gpus) == (2, ((2, 0), (2, 1), (1, 0), (1, 1)))
    assert fewer.plan().hash != transfer.plan().hash
    assert transfer.with_engines([0, 1, 2]).plan() is transfer.plan()
