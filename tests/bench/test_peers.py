from __future__ import annotations

import multiprocessing

import pytest

from bench.figures import Failure, Figure
from bench.peers import PeersOptions, measure_peers

OPTIONS = PeersOptions(device="cpu", sizes=(2, 4), reducing_sizes=(2,), bucket_bytes=1 << 17)


@pytest.mark.patient
def test_peers_of_every_size_and_setting_exchange_with_each_other() -> None:
    outcomes = list(measure_peers(OPTIONS))
    assert [outcome for outcome in outcomes if isinstance(outcome, Failure)] == []
    figures = {outcome.key: outcome for outcome in outcomes if isinstance(outcome, Figure)}
    for size in OPTIONS.sizes:
        for setting in ("0", "mixed", "1"):
            part = f"peers, {size} peers, cumem {setting}"
            assert figures[f"{part}, join"].value > 0
            assert figures[f"{part}, {size // 2} senders to one receiver"].value > 0
            assert figures[f"{part}, connected to {size // 2}"].unit == "MiB a peer"
    assert "peers, all-reduce of 2 ranks, second communicator" in figures


@pytest.mark.patient
def test_what_the_time_does_not_suffice_for_is_named() -> None:
    outcomes = list(measure_peers(PeersOptions(device="cpu", sizes=(2,), reducing_sizes=(), budget_s=0.0)))
    failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    assert [failure.part for failure in failures] == ["2 peers, cumem 0", "2 peers, cumem mixed", "2 peers, cumem 1"]
    assert failures[0].reason == "no time is left of 0 s"


def test_a_process_that_has_ended_costs_its_groups_alone() -> None:
    others = set(multiprocessing.active_children())
    outcomes = measure_peers(PeersOptions(device="cpu", sizes=(2,), reducing_sizes=(), bucket_bytes=1 << 17))
    next(outcomes)  # all have started
    first = min(set(multiprocessing.active_children()) - others, key=lambda child: child.pid or 0)
    first.kill()
    first.join()
    found = list(outcomes)
    assert Failure(part="2 peers, cumem 0", reason="process 0 has ended") in found
    assert any(isinstance(figure, Figure) and figure.key.startswith("peers, 2 peers, cumem 1") for figure in found)
