from __future__ import annotations

import pytest
import torch

from megarl.errors import WeightSyncError
from megarl.weights.check import check_delivery
from megarl.weights.group import StoreServer
from tests.processes import Outcome, run_processes
from tests.weights.transfer_peers import (
    CORRUPTED_VERSION,
    TIMEOUT_S,
    EngineLog,
    SenderLog,
    make_plan,
    run_and_die,
    run_beside_the_dead,
    run_engine,
    run_trainer,
    tensors_of,
)

Logs = tuple[list[SenderLog], list[EngineLog]]


@pytest.fixture(scope="module")
def logs() -> Logs:
    """Two trainer ranks publish three versions to an engine of two ranks; the third has a flipped bit."""
    server = StoreServer()
    calls = [(run_trainer, (server.address, 0)), (run_trainer, (server.address, 1))]
    calls += [(run_engine, (server.address, 0)), (run_engine, (server.address, 1))]  # type: ignore[list-item]
    results: list[Outcome[object]] = run_processes(calls)
    values = [result.get() for result in results]
    return (
        [value for value in values if isinstance(value, dict)],
        [value for value in values if isinstance(value, EngineLog)],
    )


@pytest.mark.parametrize("version", [1, 2])
def test_committed_parameters_are_the_trainers_cast_to_the_engines_dtype(logs: Logs, version: int) -> None:
    for rank, log in enumerate(logs[1]):
        expected = tensors_of(make_plan().target.by_rank[rank], version)
        for name, tensor in expected.items():
            assert tensor.dtype == torch.bfloat16
            assert torch.equal(log.after_commit[version][name], tensor), name


def test_staging_touches_no_parameter(logs: Logs) -> None:
    for log in logs[1]:
        assert all(not tensor.any() for tensor in log.before_commit.values())


@pytest.mark.parametrize("version", [1, 2])
def test_the_senders_digests_add_up_to_the_receivers(logs: Logs, version: int) -> None:
    senders, engines = logs
    arrived = {rank: log.digests[version] for rank, log in enumerate(engines)}
    assert all(set(names) == set(make_plan().target.by_rank[rank].tensors) for rank, names in arrived.items())
    check_delivery([log[version] for log in senders], arrived)


def test_one_flipped_bit_is_found_and_its_tensor_named(logs: Logs) -> None:
    senders, engines = logs
    arrived = {rank: log.digests[CORRUPTED_VERSION] for rank, log in enumerate(engines)}
    with pytest.raises(WeightSyncError) as caught:
        check_delivery([log[CORRUPTED_VERSION] for log in senders], arrived)
    assert str(caught.value).count("has digest") == 1


def test_an_aborted_version_leaves_the_last_committed_one(logs: Logs) -> None:
    for log in logs[1]:
        for name, tensor in log.after_commit[2].items():
            assert torch.equal(log.after_abort[name], tensor)


def test_a_dead_peer_is_an_error_long_before_the_deadline() -> None:
    server = StoreServer()
    calls = [(run_and_die, (server.address, 0))]
    calls += [(run_beside_the_dead, (server.address, peer)) for peer in (1, 2, 3)]
    dead, _, *engines = run_processes(calls)
    assert dead.value is None
    for outcome in engines:
        assert isinstance(outcome.error, WeightSyncError)
        assert "from peer 0" in str(outcome.error) or "from peer 1" in str(outcome.error)
        assert outcome.seconds < TIMEOUT_S / 2
