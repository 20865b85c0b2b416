"""How often lost ranks are started again: a budget between two checkpoints, and pauses that grow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.cluster.worker_group import WorkerDiedError
from megarl.errors import NodeMemoryError, WorkerError
from megarl.run.resume import Restarts

DEATH = WorkerDiedError("actor rank 1: died during update")


def test_pauses_double_and_the_budget_ends() -> None:
    restarts = Restarts(max_restarts=3, pause_s=1.0)
    assert [restarts.spend(DEATH, saved_step=0) for _ in range(3)] == [1.0, 2.0, 4.0]
    with pytest.raises(WorkerError, match=r"died during update; .* 3 times since step 0 was saved .*max_restarts"):
        restarts.spend(DEATH, saved_step=0)


def test_a_new_checkpoint_gives_a_new_budget() -> None:
    restarts = Restarts(max_restarts=1, pause_s=1.0)
    for step in range(1, 20):
        assert restarts.spend(DEATH, saved_step=step) == 1.0
    with pytest.raises(WorkerError):
        restarts.spend(DEATH, saved_step=19)


def test_none_at_all() -> None:
    with pytest.raises(WorkerDiedError) as caught:
        Restarts(max_restarts=0, pause_s=1.0).spend(DEATH, saved_step=5)
    assert caught.value is DEATH


def test_what_a_rank_says_twice_it_would_say_for_ever() -> None:
    restarts = Restarts(max_restarts=9, pause_s=1.0)
    failure = WorkerError("actor rank 0: update failed: OutOfMemoryError: tried to allocate 20 GiB")
    restarts.spend(failure, saved_step=3)
    with pytest.raises(WorkerError, match="failed the same way"):
        restarts.spend(failure, saved_step=3)


def test_but_not_after_a_checkpoint_and_not_when_it_says_something_else() -> None:
    restarts = Restarts(max_restarts=9, pause_s=1.0)
    failure = WorkerError("actor rank 0: update failed: RuntimeError: connection reset")
    restarts.spend(failure, saved_step=3)
    restarts.spend(failure, saved_step=4)
    restarts.spend(WorkerError("actor rank 1: update failed"), saved_step=4)


@given(
    max_restarts=st.integers(0, 5),
    pause_s=st.floats(0, 100),
    steps=st.lists(st.integers(0, 3), max_size=40),
)
def test_every_run_without_progress_ends(max_restarts: int, pause_s: float, steps: list[int]) -> None:
    restarts = Restarts(max_restarts=max_restarts, pause_s=pause_s)
    saved_step, num_since = 0, 0
    for advance in steps:
        saved_step, num_since = saved_step + advance, 0 if advance else num_since
        try:
            assert 0 <= restarts.spend(DEATH, saved_step=saved_step) <= 60
            num_since += 1
        except WorkerError:
            assert num_since == max_restarts
            return
        assert num_since <= max_restarts


def test_the_last_error_keeps_its_exit_code() -> None:
    restarts = Restarts(max_restarts=1, pause_s=1.0)
    short = NodeMemoryError("actor rank 1: died during update: its node ran short of memory")
    restarts.spend(short, saved_step=0)
    with pytest.raises(NodeMemoryError, match="started again 1 times") as caught:
        restarts.spend(short, saved_step=0)
    assert caught.value.exit_code == 5
