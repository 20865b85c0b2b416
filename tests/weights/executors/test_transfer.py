from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import get_args

import pytest
import torch

from megarl.errors import WeightSyncError
from megarl.weights.algebra.plan import plan
from megarl.weights.executors.digest import check_digests
from megarl.weights.executors.group import TransferGroup
from megarl.weights.executors.meeting import StoreServer
from megarl.weights.executors.transfer import Receiver, Sender
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout
from megarl.weights.layouts.sglang import sglang_layout
from tests.processes import run_processes
from tests.weights.reference import make_shape
from tests.weights.transfer_peers import (
    CORRUPTED_VERSION,
    TIMEOUT_S,
    EngineLog,
    Placed,
    SenderLog,
    cut,
    make_plan,
    num_engine_ranks,
    run_and_die,
    run_beside_the_dead,
    run_engine,
    run_trainer,
    tensors_of,
)

Call = tuple[Callable[..., object], tuple[object, ...]]
Logs = tuple[list[SenderLog], list[EngineLog]]


@pytest.fixture(scope="module", params=get_args(Placed))
def placed(request: pytest.FixtureRequest) -> Placed:
    where: Placed = request.param
    return where


@pytest.fixture(scope="module")
def logs(placed: Placed) -> Logs:
    """Two trainer ranks publish three versions to the ranks of one or two engines; the third has a flipped bit."""
    server = StoreServer()
    calls: list[Call] = [(run_trainer, (server.address, rank, placed)) for rank in range(2)]
    calls += [(run_engine, (server.address, rank, placed)) for rank in range(num_engine_ranks(placed))]
    results = run_processes(calls)
    values = [result.get() for result in results]
    return (
        [value for value in values if isinstance(value, dict)],
        [value for value in values if isinstance(value, EngineLog)],
    )


@pytest.mark.parametrize("version", [1, 2])
def test_received_parameters_are_the_trainers_cast_to_the_engines_dtype(
    logs: Logs, placed: Placed, version: int
) -> None:
    for rank, log in enumerate(logs[1]):
        expected = tensors_of(make_plan(placed=placed).target.by_rank[rank], version)
        for name, tensor in expected.items():
            assert tensor.dtype == torch.bfloat16
            assert torch.equal(log.received[version][name], tensor), name


def test_ranks_on_other_nodes_pass_on_what_they_receive() -> None:
    expected: dict[Placed, int] = {"on one node": 1, "on other nodes": 2, "on other nodes, relayed": 3}
    for placed, num_hops in expected.items():
        moves = make_plan(placed=placed)
        assert moves.num_hops == num_hops
        assert bool(moves.traffic.forwarded_bytes) == (num_hops > 1)


@pytest.mark.parametrize("version", [1, 2])
def test_the_senders_digests_add_up_to_the_receivers(logs: Logs, placed: Placed, version: int) -> None:
    senders, engines = logs
    arrived = {rank: log.digests[version] for rank, log in enumerate(engines)}
    assert all(
        set(names) == set(make_plan(placed=placed).target.by_rank[rank].tensors) for rank, names in arrived.items()
    )
    check_digests([log[version] for log in senders], arrived)


def test_one_flipped_bit_is_found_and_its_tensor_named(logs: Logs, placed: Placed) -> None:
    senders, engines = logs
    arrived = {rank: log.digests[CORRUPTED_VERSION] for rank, log in enumerate(engines)}
    with pytest.raises(WeightSyncError) as caught:
        check_digests([log[CORRUPTED_VERSION] for log in senders], arrived)
    # What a receiver passes on is as wrong as what it got.
    assert 1 <= str(caught.value).count("has digest") <= (2 if "other nodes" in placed else 1)


def test_a_dead_peer_is_an_error_long_before_the_deadline() -> None:
    server = StoreServer()
    calls: list[Call] = [(run_and_die, (server.address, 0))]
    calls += [(run_beside_the_dead, (server.address, peer)) for peer in (1, 2, 3)]
    dead, *others = run_processes(calls)
    assert dead.value is None
    for outcome in others:
        seconds = outcome.get()
        assert isinstance(seconds, float)
        assert seconds < TIMEOUT_S / 4


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_parameters_on_any_device_travel_through_host_memory(device: str) -> None:
    """One trainer rank, one engine rank, as two threads."""
    shape = make_shape()
    trainer = megatron_layout(shape, MegatronParallel(), dtype="float32")
    moves = plan(trainer, sglang_layout(shape, tensor=1, dtype="bfloat16"))
    model = {name: torch.randn(spec.shape, device=device) for name, spec in trainer.canonical.items()}
    sources = cut(moves.source.holdings[0], model)
    targets = {name: torch.zeros_like(tensor) for name, tensor in cut(moves.target.holdings[0], model).items()}
    server = StoreServer()

    def join(peer: int) -> TransferGroup:
        return TransferGroup.join(server.address, name="threads", peer=peer, num_peers=2, timeout_s=300)

    with ThreadPoolExecutor(2) as pool:
        trainer_group, engine_group = pool.map(join, range(2))
        receiver = Receiver(moves, 0, targets, engine_group, bucket_bytes=3000)
        sending = pool.submit(Sender(moves, 0, sources, trainer_group, bucket_bytes=3000).send, 7)
        arrived = receiver.receive(7)
        check_digests([sending.result()], {0: arrived})
    for name, expected in cut(moves.target.holdings[0], model).items():
        assert torch.equal(targets[name], expected), name
