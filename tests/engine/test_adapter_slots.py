"""The slots of adapters, with a stand-in for SGLang's manager."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch

from megarl.engine.adapter_slots import AdapterSlots
from megarl.engine.loader import _Member
from megarl.errors import WeightSyncError
from megarl.weights.algebra.plan import plan
from megarl.weights.algebra.slices import Holding
from megarl.weights.executors.digest import check_digests
from megarl.weights.executors.tensors import box_of
from megarl.weights.executors.transfer import Receiver, Sender
from megarl.weights.layouts.canonical import canonical_tensors
from megarl.weights.layouts.lora import LOCAL_A, LoraShape, adapter_layout, adapter_tensors, served_layout
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout
from megarl.weights.layouts.sglang import sglang_layout
from tests.weights.reference import fill_from_canonical, make_shape, numbered_tensors
from tests.weights.rendezvous import Wire, join_all, tensors_of


@dataclass
class Loaded:
    lora_name: str
    pinned: bool = True


@dataclass
class Pool:
    """Three slots for adapters of rank 2, given in order, as SGLang does to adapters without values."""

    uid_to_buffer_id: dict[str, int] = field(default_factory=dict)
    filled: list[str] = field(default_factory=list)
    A_buffer: dict[str, list[torch.Tensor]] = field(
        default_factory=lambda: {"up_proj": [], "gate_up_proj": [torch.zeros(0), torch.zeros(3, 4, 4)]}
    )
    B_buffer: dict[str, list[torch.Tensor]] = field(
        default_factory=lambda: {"up_proj": [], "gate_up_proj": [torch.zeros(0), torch.zeros(3, 6, 2)]}
    )

    def prepare_lora_batch(
        self, *, cur_uids: set[str], lora_modules: Sequence[Mapping[str, object]], **_others: object
    ) -> None:
        for uid in cur_uids - self.uid_to_buffer_id.keys():
            self.uid_to_buffer_id[uid] = 1 + len(self.uid_to_buffer_id)
            self.filled += [f"{uid} {name}" for modules in lora_modules for name in modules]


@dataclass
class Manager:
    lora_refs: Mapping[str, Loaded] = field(
        default_factory=lambda: {"x7": Loaded("policy@7"), "x8": Loaded("policy@8"), "y": Loaded("loose", pinned=False)}
    )
    lora_modules: Sequence[Mapping[str, object]] = ({}, {"model.layers.1.mlp.gate_up_proj": None})
    memory_pool: Pool = field(default_factory=Pool)
    loras: Mapping[str, object] = field(default_factory=dict)


@dataclass
class Runner:
    lora_manager: Manager | None


@dataclass
class Worker:
    model_runner: Runner


@dataclass
class Scheduler:
    tp_worker: Worker

    def process(self) -> AdapterSlots:
        """Call the loader as SGLang does: some functions lie between."""
        return (lambda: AdapterSlots.of_caller())()


def test_an_adapter_keeps_the_slot_that_it_was_given() -> None:
    slots = Scheduler(Worker(Runner(Manager()))).process()
    assert [slots.take(name) for name in ("policy@8", "policy@7", "policy@8")] == [1, 2, 1]


@pytest.mark.parametrize(("is_received", "filled"), [(False, ["x7 model.layers.1.mlp.gate_up_proj"]), (True, [])])
def test_only_a_slot_that_is_not_received_is_filled_by_sglang(*, is_received: bool, filled: list[str]) -> None:
    manager = Manager()
    AdapterSlots(cast(Any, manager)).take("policy@7", is_received=is_received)
    assert manager.memory_pool.filled == filled


def test_what_is_written_into_a_slot_is_what_its_layers_compute_with() -> None:
    manager, name = Manager(), "model.layers.1.mlp.gate_up_proj"
    tensors = AdapterSlots(cast(Any, manager)).tensors(2)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        f"{name}.lora_a": (4, 4),
        f"{name}.lora_b": (6, 2),
    }
    tensors[f"{name}.lora_b"].fill_(3)
    assert manager.memory_pool.B_buffer["gate_up_proj"][1].sum(dim=(1, 2)).tolist() == [0, 0, 36]


@pytest.mark.parametrize(
    ("name", "message"), [("policy@9", "policy@9 is not loaded"), ("loose", "loose is not pinned")]
)
def test_an_adapter_that_could_lose_its_slot_gets_none(name: str, message: str) -> None:
    with pytest.raises(WeightSyncError, match=message):
        AdapterSlots(cast(Any, Manager())).take(name)


def test_an_engine_without_adapters_is_named() -> None:
    with pytest.raises(WeightSyncError, match="started without adapters"):
        Scheduler(Worker(Runner(None))).process()


def manager_of(holding: Holding) -> Manager:
    """Return the manager of an engine of two layers with this holding, in three slots."""
    layers: list[dict[str, object]] = [{}, {}]
    pool = Pool(A_buffer=defaultdict(list), B_buffer=defaultdict(list))
    for local_name, spec in sorted(holding.tensors.items()):
        name, _, end = local_name.rpartition(".")
        layers[int(name.split(".")[2])][name] = None
        buffers = pool.A_buffer if f".{end}" == LOCAL_A else pool.B_buffer
        buffers[name.rpartition(".")[2]].append(torch.zeros(3, *spec.shape))
    return Manager(lora_modules=layers, memory_pool=pool)


def test_versions_arrive_in_the_slots_of_their_adapters() -> None:
    shape, lora = make_shape("qwen3", layers=2), LoraShape(rank=2, modules=frozenset({"q_proj", "v_proj", "o_proj"}))
    source = adapter_layout(megatron_layout(shape, MegatronParallel(), dtype="float32"), lora)
    target = served_layout(sglang_layout(shape, tensor=1, dtype="float32"), lora)
    model = numbered_tensors(adapter_tensors(canonical_tensors(shape), lora))
    sent = tensors_of(source.holdings[0], fill_from_canonical(source.holdings[0], model))
    moves, groups = plan(source, target), join_all(2, Wire())
    slots, member = AdapterSlots(cast(Any, manager_of(target.holdings[0]))), _Member()
    sender = Sender(moves, 0, sent, groups[0], bucket_bytes=4096)
    member._slots, member._receiver = slots, Receiver(moves, 0, slots.tensors(0), groups[1], bucket_bytes=4096)
    with ThreadPoolExecutor(1) as threads:
        for version in (7, 8, 9):
            sending = threads.submit(sender.send, version)
            arrived = member._receive_adapter(version, f"policy@{min(version, 8)}")
            check_digests([sending.result()], {0: arrived})
            for tensor in sent.values():
                tensor += 1
    expected = tensors_of(target.holdings[0], fill_from_canonical(target.holdings[0], model))
    for name, added in (("policy@7", 0), ("policy@8", 2)):
        found = slots.tensors(slots.take(name))
        for piece in target.holdings[0].pieces:
            place = piece.local_offsets, piece.slice.shape
            assert torch.equal(
                box_of(found[piece.local_name], *place), box_of(expected[piece.local_name], *place) + added
            )
    assert not any(tensor.any() for tensor in slots.tensors(0).values()), "the slot of requests without an adapter"
