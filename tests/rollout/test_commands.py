from __future__ import annotations

import base64
import pickle

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
    Listen,
    Rendezvous,
    Reply,
    Stage,
    read_envelope,
    read_reply,
    to_bytes,
    to_payload,
)
from megarl.weights.algebra.slices import TensorSpec
from megarl.weights.executors.group import StoreAddress
from tests.weights.layouts.test_transfer_spec import placed_transfer, transfer_spec

ADDRESS = StoreAddress(host="127.0.0.1", port=1234)


ORDERS: list[Command] = [
    Inspect(),
    Join(
        transfer=transfer_spec(),
        plan_hash="abc",
        meeting=Rendezvous(address=ADDRESS, name="publish-1", timeout_s=5.0, backend="gloo", bucket_bytes=1024),
    ),
    Stage(version=3),
    Commit(version=3),
    Abort(),
    Fingerprint(),
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


def test_two_processes_compute_the_same_plan_from_a_transfer_spec() -> None:
    order = ORDERS[1]
    assert isinstance(order, Join)
    arrived = sent(order).order
    assert isinstance(arrived, Join)
    assert arrived.transfer.plan().hash == order.transfer.plan().hash


def test_a_transfer_with_places_survives_the_journey() -> None:
    order = Listen(transfer=placed_transfer())
    assert sent(order).order == order
    assert placed_transfer().plan().num_hops == 3
