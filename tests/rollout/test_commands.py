from __future__ import annotations

import base64
import pickle
from dataclasses import replace

import pytest
import torch

from megarl.rollout.commands import (
    Abort,
    Command,
    Commit,
    Envelope,
    Fingerprint,
    Inspect,
    Join,
    Leave,
    Listen,
    Rendezvous,
    Reply,
    Stage,
    TransferSpec,
    read_envelope,
    read_reply,
    to_bytes,
    to_payload,
)
from megarl.weights.algebra.slices import TensorSpec
from megarl.weights.executors.group import StoreAddress
from megarl.weights.layouts.megatron import MegatronParallel
from tests.weights.reference import make_shape

ADDRESS = StoreAddress(host="127.0.0.1", port=1234)


def route_of(*, tensor: int = 2, num_engines: int = 1) -> TransferSpec:
    return TransferSpec(
        shape=make_shape(),
        parallel=MegatronParallel(tensor=2, pipeline=2, data=2),
        trainer_dtype="float32",
        num_engines=num_engines,
        tensor=tensor,
        engine_dtype="bfloat16",
        is_cpu_engine=False,
    )


ORDERS: list[Command] = [
    Inspect(),
    Join(
        route=route_of(),
        plan_hash="abc",
        meeting=Rendezvous(address=ADDRESS, name="publish-1", timeout_s=5.0, backend="gloo", bucket_bytes=1024),
    ),
    Stage(version=3),
    Commit(version=3),
    Abort(),
    Fingerprint(),
    Leave(),
]


def sent(order: Command) -> Envelope:
    """The order, there and back again."""
    envelope = Envelope(order=order, engine=1, tp_rank=0, host="127.0.0.1", mailbox=ADDRESS, reply_key="k")
    arrived = read_envelope(pickle.loads(base64.b64decode(to_payload(envelope))))
    assert arrived == envelope
    return arrived


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.op)
def test_an_order_arrives_as_it_was_given(order: Command) -> None:
    assert sent(order).order == order


@pytest.mark.parametrize(
    "payload",
    [
        [("model.norm.weight", torch.zeros(3))],
        [("megarl.order", torch.zeros(3, dtype=torch.uint8))],
        [],
    ],
)
def test_something_else_than_an_order_is_a_value_error(payload: list[tuple[str, torch.Tensor]]) -> None:
    with pytest.raises(ValueError):
        read_envelope(payload)


def test_a_reply_arrives_as_it_was_given() -> None:
    reply = Reply(
        parameters={"a": TensorSpec(shape=(2, 3), dtype="bfloat16")}, digests={"a": 2**64 - 1}, fingerprints={"a": "ff"}
    )
    assert read_reply(to_bytes(reply)) == reply


def test_two_processes_compute_the_same_plan_from_a_route() -> None:
    order = ORDERS[1]
    assert isinstance(order, Join)
    arrived = sent(order).order
    assert isinstance(arrived, Join)
    assert arrived.route.plan().hash == order.route.plan().hash


def test_engine_ranks_come_after_trainer_ranks() -> None:
    route = route_of(tensor=2, num_engines=3)
    assert route.num_peers == 8 + 6
    assert route.target_rank(engine=2, tp_rank=1) == 5
    assert route.peer(5) == 13
    assert {holding.rank for holding in route.engine_layout().holdings} == set(range(6))


def seated_route() -> TransferSpec:
    """Two engines of two ranks on the first rollout node, one on the second."""
    return replace(
        route_of(tensor=2, num_engines=3),
        trainer_gpus=tuple((0, rank) for rank in range(8)),
        engine_gpus=((1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 1)),
        relays=True,
    )


def test_a_route_with_places_survives_the_journey() -> None:
    order = Listen(route=seated_route())
    assert sent(order).order == order
    assert seated_route().plan().num_hops == 3


def test_a_roster_is_planned_once_and_keeps_the_places_of_its_engines() -> None:
    route = seated_route()
    fewer = route.with_engines([2, 0])
    assert (fewer.num_engines, fewer.engine_gpus) == (2, ((2, 0), (2, 1), (1, 0), (1, 1)))
    assert fewer.plan().hash != route.plan().hash
    assert route.with_engines([0, 1, 2]).plan() is route.plan()
