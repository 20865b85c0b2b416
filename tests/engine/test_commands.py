from __future__ import annotations

import base64
import pickle

import pytest
import torch

from megarl.engine.commands import (
    Command,
    CommandMessage,
    Fingerprint,
    Inspect,
    Join,
    Receive,
    Rendezvous,
    Reply,
    StartRecording,
    read_message,
    read_reply,
    to_bytes,
    to_payload,
)
from megarl.weights.algebra.slices import TensorSpec
from megarl.weights.executors.meeting import StoreAddress
from tests.weights.reference import placed_transfer, transfer_spec

ADDRESS = StoreAddress(host="127.0.0.1", port=1234)


COMMANDS: list[Command] = [
    Inspect(),
    Join(
        transfer=transfer_spec(),
        plan_hash="abc",
        rendezvous=Rendezvous(address=ADDRESS, name="publish-1", timeout_s=5.0, backend="gloo", bucket_bytes=1024),
    ),
    Receive(version=3, group="publish"),
    Fingerprint(),
    StartRecording(transfer=placed_transfer()),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.op)
def test_a_command_arrives_as_it_was_given(command: Command) -> None:
    message = CommandMessage(command=command, engine=1, tp_rank=0, host="127.0.0.1", mailbox=ADDRESS, reply_key="k")
    assert read_message(pickle.loads(base64.b64decode(to_payload(message)))) == message


@pytest.mark.parametrize(
    "payload",
    [
        [("model.norm.weight", torch.zeros(3))],
        [("megarl.command", torch.zeros(3, dtype=torch.uint8))],
        [],
    ],
)
def test_something_else_than_a_command_is_a_value_error(payload: list[tuple[str, torch.Tensor]]) -> None:
    with pytest.raises(ValueError):
        read_message(payload)


def test_a_reply_arrives_as_it_was_given() -> None:
    reply = Reply(parameters={"a": TensorSpec(shape=(2, 3), dtype="bfloat16")}, digests={"a": 2**64 - 1})
    assert read_reply(to_bytes(reply)) == reply
