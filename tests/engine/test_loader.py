"""The loader without SGLang: a module with parameters, a mailbox, commands. It never raises."""

from __future__ import annotations

import base64
import pickle
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from torch.distributed import TCPStore

from megarl.engine import loader
from megarl.engine.commands import (
    Command,
    CommandMessage,
    Inspect,
    Join,
    Receive,
    Rendezvous,
    Reply,
    read_reply,
    to_payload,
)
from megarl.engine.loader import load
from megarl.weights.algebra.slices import TensorSpec
from megarl.weights.executors.meeting import StoreAddress, StoreServer
from megarl.weights.layouts.lora import LoraShape
from tests.weights.reference import transfer_spec


@pytest.fixture(scope="module")
def server() -> StoreServer:
    return StoreServer()


@pytest.fixture
def model() -> torch.nn.Module:
    return torch.nn.Linear(3, 2)


def give(command: Command, model: torch.nn.Module, server: StoreServer) -> Reply:
    store = TCPStore("127.0.0.1", server.address.port, timeout=timedelta(seconds=60))
    message = CommandMessage(
        command=command, engine=0, tp_rank=0, host="127.0.0.1", mailbox=server.address, reply_key="reply"
    )
    load(model, pickle.loads(base64.b64decode(to_payload(message))))
    reply = read_reply(store.get("reply"))
    store.delete_key("reply")
    return reply


def join_of(server: StoreServer, plan_hash: str) -> Join:
    rendezvous = Rendezvous(address=server.address, name="group", timeout_s=1.0, backend="gloo", bucket_bytes=1024)
    return Join(transfer=transfer_spec(), plan_hash=plan_hash, rendezvous=rendezvous)


def test_inspect_tells_names_shapes_and_dtypes(model: torch.nn.Module, server: StoreServer) -> None:
    assert give(Inspect(), model, server).parameters == {
        "weight": TensorSpec(shape=(2, 3), dtype="float32"),
        "bias": TensorSpec(shape=(2,), dtype="float32"),
    }


class Latent(torch.nn.Module):
    """Decodes with a copy of its parameter, as SGLang's latent attention does with `w_kc` and `w_vc`."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_b_proj = torch.nn.Parameter(torch.zeros(2))
        self.post_load_weights()

    def post_load_weights(self) -> None:
        self.w_kc = self.kv_b_proj * 2


class Filling:
    """Receives a version by writing its number into the parameters."""

    def __init__(self, model: Latent) -> None:
        self._parameter = model.kv_b_proj

    def receive(self, version: int) -> dict[str, int]:
        self._parameter.detach().fill_(version)
        return {"kv_b_proj": version}


def test_tensors_that_a_model_derives_from_its_parameters_are_those_of_the_version(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Latent()
    monkeypatch.setattr(loader._MEMBERS["publish"], "_receiver", Filling(model))
    for version in (3, 5):
        reply = give(Receive(version=version, group="publish"), model, server)
        assert reply.error is None
        assert model.w_kc.tolist() == [2.0 * version] * 2
        assert not model.w_kc.requires_grad


def test_a_version_cannot_be_received_without_a_group(model: torch.nn.Module, server: StoreServer) -> None:
    assert (
        give(Receive(version=1, group="publish"), model, server).error
        == "not in a transfer group for weights; join comes first"
    )


def test_another_plan_is_refused(model: torch.nn.Module, server: StoreServer) -> None:
    error = give(join_of(server, "another"), model, server).error
    assert error == f"plan hash is {transfer_spec().plan().hash} here and another at the driver"


def test_adapters_need_an_engine_that_was_started_with_them(model: torch.nn.Module, server: StoreServer) -> None:
    transfer = replace(transfer_spec(), lora=LoraShape(rank=2, modules=frozenset({"o_proj"})))
    join = replace(join_of(server, transfer.plan().hash), transfer=transfer)
    assert give(join, model, server).error == "this engine was started without adapters"
    error = give(Receive(version=1, group="publish", adapter="policy@1"), model, server).error
    assert error == "not in a transfer group for adapters; join comes first"


def test_parameters_that_are_not_those_of_the_layout_are_named(model: torch.nn.Module, server: StoreServer) -> None:
    error = give(join_of(server, transfer_spec().plan().hash), model, server).error
    assert error is not None
    assert error.startswith("TP rank 0 does not match its layout: model.embed_tokens.weight is missing;")


def test_what_is_not_a_command_is_survived(model: torch.nn.Module) -> None:
    load(model, [("weight", torch.zeros(2, 3))])


def test_a_mailbox_out_of_reach_is_survived(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.engine.loader._MAILBOX_TIMEOUT_S", 1.0)
    nobody = StoreAddress(host="127.0.0.1", port=1)
    message = CommandMessage(command=Inspect(), engine=0, tp_rank=0, host="127.0.0.1", mailbox=nobody, reply_key="k")
    load(model, pickle.loads(base64.b64decode(to_payload(message))))
