"""Who is missing in a call that does not end: told from what the ranks say of themselves, or do not say."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from megarl.ranks.hang import RankStacks, Silence, ThreadStack, Wait, capture, explain_hang, write_report
from megarl.weights.executors.group import TransferGroup
from megarl.weights.executors.meeting import StoreServer

REDUCE = Wait(operation="all_reduce", caller="_reduce, tensor_parallel/mappings.py:31", ranks=(0, 1))
GATHER = Wait(operation="all_gather", caller="_gather, tensor_parallel/mappings.py:99", ranks=(2, 3))
STOPPED = Silence(reason="it does not answer; it is stopped (SIGSTOP) (pid 7)")


def rank(method: str = "update", *, wait: Wait | None = None, place: str = "sleep, reward.py:3") -> RankStacks:
    thread = ThreadStack(name="main", lines=("  File x\n    y\n",), place=place, method=method, wait=wait)
    return RankStacks(threads=(thread,))


def test_a_frozen_rank_is_missing_and_the_others_wait_for_it() -> None:
    verdict = explain_hang([rank(wait=REDUCE), STOPPED], method="update", late=[0, 1])
    assert list(verdict.missing) == [1]
    assert verdict.at_fault == (1,)
    assert str(verdict) == (
        "rank 1 is missing: it does not answer; it is stopped (SIGSTOP) (pid 7); "
        "rank 0 waits in all_reduce of ranks 0, 1 (_reduce, tensor_parallel/mappings.py:31)"
    )


def test_a_rank_that_is_somewhere_else_is_missing() -> None:
    verdict = explain_hang([rank(wait=REDUCE), rank()], method="update", late=[0, 1])
    assert verdict.missing == {1: "it is in sleep, reward.py:3"}
    assert verdict.waiting == {0: REDUCE}
    assert verdict.at_fault == (1,)


def test_ranks_that_are_all_late_without_waiting_are_not_at_fault() -> None:
    assert explain_hang([rank(), rank()], method="update", late=[0, 1]).at_fault == ()
    assert explain_hang([rank(), STOPPED], method="update", late=[0, 1]).at_fault == (1,)


def test_a_rank_that_has_answered_is_not_missing() -> None:
    verdict = explain_hang([RankStacks(threads=()), rank(wait=GATHER), rank()], method="update", late=[1, 2])
    assert list(verdict.missing) == [2]


def test_a_rank_that_has_not_begun_is_missing() -> None:
    verdict = explain_hang([rank(wait=REDUCE), rank(method="")], method="update", late=[0, 1])
    assert verdict.missing == {1: "it has not begun with update"}


def test_ranks_in_different_collectives_are_all_told() -> None:
    verdict = explain_hang([rank(wait=REDUCE), rank(wait=REDUCE), rank(wait=GATHER)], method="update", late=[0, 1, 2])
    assert not verdict.missing
    assert "ranks 0, 1 wait in all_reduce" in str(verdict)
    assert "rank 2 waits in all_gather of ranks 2, 3" in str(verdict)


def test_a_backward_pass_may_wait_in_a_thread_of_autograd() -> None:
    engine = ThreadStack(name="Dummy-3", lines=(), place="wait", method="", wait=REDUCE)
    stacks = RankStacks(threads=(*rank(place="run_backward").threads, engine))
    assert explain_hang([stacks], method="update", late=[0]).waiting == {0: REDUCE}


def test_the_report_has_a_headline_and_the_stack_of_every_rank(tmp_path: Path) -> None:
    said = write_report(
        tmp_path, role="actor", method="update", headline="rank 1 is missing", ranks=[rank(wait=REDUCE), STOPPED]
    )
    (path,) = tmp_path.iterdir()
    assert said == f"all stacks are in {path}"
    lines = path.read_text().splitlines()
    assert lines[0] == "rank 1 is missing"
    assert "==== actor rank 0 ====" in lines
    waits = "waits in all_reduce of ranks 0, 1 (_reduce, tensor_parallel/mappings.py:31)"
    assert f"-- thread main (update) {waits}" in lines
    assert lines[lines.index("==== actor rank 1 ====") + 1] == f"no answer: {STOPPED.reason}"


def update(release: threading.Event) -> None:
    release.wait(30)


def test_a_thread_is_found_by_the_method_it_carries_out() -> None:
    release = threading.Event()
    thread = threading.Thread(target=update, args=(release,), daemon=True, name="worker")
    thread.start()
    time.sleep(0.2)
    found = capture(__name__).running("update")
    release.set()
    assert found is not None
    assert found.name == "worker"
    assert found.wait is None
    assert any("release.wait(30)" in line for line in found.lines)


def join(server: StoreServer) -> None:
    with pytest.raises(Exception, match="still no peer 1"):
        TransferGroup.join(server.address, name="publish", peer=0, num_peers=2, timeout_s=1.5)


def test_a_wait_for_peers_says_what_it_is() -> None:
    server = StoreServer()
    thread = threading.Thread(target=join, args=(server,), daemon=True)
    thread.start()
    time.sleep(0.8)
    found = capture(__name__).wait_in("join")
    thread.join()
    assert found is not None
    assert found.operation == "peer 0 of 2 joining publish"
